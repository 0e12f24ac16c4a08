// CudaPages(): pages are cut into pieces of at most 2 KiB that never cross a view, numbered page after page.
// A warp moves a piece, four 16-byte loads in flight a lane.
//
// The grid has a warp for every piece, as far as the host can count them (views may lie on the device), and
// the hardware hands CTAs out in order: so all reads and all writes of the moment lie close together, and
// large pages balance as well as small ones. On an H200, at 960 MiB, a resident grid that strides over the
// pieces drifts apart and moves 4 to 7 % less; the bulk copy engine (cp.async.bulk) moves 20 % less in a
// resident grid and no more in this one; streaming loads cost 2 to 4 %.
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/copy.h"

namespace kvsummary {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 4;  // in flight a lane
constexpr int kPieceBytes = 32 * kLoads * static_cast<int>(sizeof(uint4));

static_assert(kPieceBytes % kCudaMoveAlignment == 0, "pieces keep the alignment of their view");
static_assert(kMaxPageViews * ((kMaxIndex + kPieceBytes) / kPieceBytes) <= 0xffffffff,
              "pieces of a page are counted in 32 bits");

// Where the pieces and bytes of each view begin in a page; entry view_count is the page's end.
struct PageIndex {
  std::uint32_t piece[kMaxPageViews + 1];
  std::uint32_t byte[kMaxPageViews + 1];
};

// Fills the index by the CTA's first warp and checks the views by all of it; the answer is the same for every
// thread. The index holds for all threads on return.
__device__ bool IndexViews(const PageMove& move, PageIndex& index) {
  const int n = move.view_count;
  bool bad = false;
  for (int v = static_cast<int>(threadIdx.x); v < n; v += kThreads)
    bad |= !GoodView(move, v, kCudaMoveAlignment);
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    const int share = (n + 31) / 32;  // views of a lane
    const int begin = min(lane * share, n);
    const int end = min(begin + share, n);
    const PageView* views = move.shape();
    std::uint32_t pieces = 0;
    unsigned long long bytes = 0;  // 512 views of 63 bits may wrap around, but not while all views are good
    const auto add = [&](int v) {
      const auto b = static_cast<unsigned long long>(views[v].bytes);
      pieces += static_cast<std::uint32_t>((b + kPieceBytes - 1) / kPieceBytes);
      bytes += b;
    };
    for (int v = begin; v < end; ++v) add(v);
    for (int distance = 1; distance < 32 && distance < n; distance *= 2) {
      const std::uint32_t p = __shfl_up_sync(~0u, pieces, distance);
      const unsigned long long b = __shfl_up_sync(~0u, bytes, distance);
      if (lane >= distance) {
        pieces += p;
        bytes += b;
      }
    }
    if (begin < end && end == n) {
      bad |= bytes != static_cast<unsigned long long>(move.page_bytes);
      index.piece[n] = pieces;
      index.byte[n] = static_cast<std::uint32_t>(bytes);
    }
    pieces = __shfl_up_sync(~0u, pieces, 1);
    bytes = __shfl_up_sync(~0u, bytes, 1);
    if (lane == 0) {
      pieces = 0;
      bytes = 0;
    }
    for (int v = begin; v < end; ++v) {
      index.piece[v] = pieces;
      index.byte[v] = static_cast<std::uint32_t>(bytes);
      add(v);
    }
  }
  return !__syncthreads_or(bad);
}

// The view that holds a piece: the last that begins at or before it, since empty views hold none.
__device__ __forceinline__ int ViewOf(const PageIndex& index, int view_count, std::uint32_t piece) {
  int low = 0;
  int high = view_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (index.piece[middle] <= piece) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Where a view's part of a block lies; in a buffer, where the page's bytes from `in_page` on do.
__device__ __forceinline__ std::uint8_t* Begin(const PageEnd& end, int v, std::int64_t block,
                                               std::uint32_t in_page, std::int64_t page_bytes) {
  if (!end.views) return end.base + block * page_bytes + in_page;
  return end.base + end.views[v].offset + block * end.views[v].block_stride;
}

// Moves `bytes`, at most a piece, by one warp.
__device__ __forceinline__ void MovePiece(const std::uint8_t* from, std::uint8_t* to, std::uint32_t bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* sink = reinterpret_cast<uint4*>(to);
  const std::uint32_t words = bytes / sizeof(uint4);
  const std::uint32_t lane = threadIdx.x % 32;
  uint4 word[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (lane + 32 * i < words) word[i] = source[lane + 32 * i];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (lane + 32 * i < words) sink[lane + 32 * i] = word[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    MovePages(const __grid_constant__ PageMove move, unsigned long long* skipped) {
  __shared__ PageIndex index;
  const bool first_thread = blockIdx.x == 0 && threadIdx.x == 0;
  if (!IndexViews(move, index)) {
    if (first_thread && skipped) atomicAdd(skipped, static_cast<unsigned long long>(move.pages));
    return;
  }
  const std::int64_t pieces_a_page = index.piece[move.view_count];
  const std::int64_t pieces = move.pages * pieces_a_page;
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarps;
  // One turn, unless some views end in a short piece.
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < pieces; i += warps) {
    const std::int64_t page = i / pieces_a_page;
    const auto piece = static_cast<std::uint32_t>(i - page * pieces_a_page);
    const std::int64_t from = move.from_block(page);
    const std::int64_t to = move.to_block(page);
    const PageState state = ClassifyPage(move, from, to);
    if (state == PageState::kLive) {
      const int v = ViewOf(index, move.view_count, piece);
      const std::uint32_t in_page = index.byte[v];
      const std::uint32_t in_view = (piece - index.piece[v]) * kPieceBytes;
      MovePiece(Begin(move.from, v, from, in_page, move.page_bytes) + in_view,
                Begin(move.to, v, to, in_page, move.page_bytes) + in_view,
                min(index.byte[v + 1] - in_page - in_view, kPieceBytes));
    } else if (state == PageState::kBad && piece == 0 && threadIdx.x % 32 == 0 && skipped) {
      atomicAdd(skipped, 1ull);
    }
  }
}

bool Aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % kCudaMoveAlignment == 0; }

class Cuda final : public PageMover {
  int Move(const PageMove& move, const Launch& launch) const override {
    if (!Aligned(move.from.base) || !Aligned(move.to.base) || move.page_bytes % kCudaMoveAlignment != 0)
      return kInvalidMove;
    // At least as many pieces are in a page, whatever its views.
    const std::int64_t pieces = move.pages * ((move.page_bytes + kPieceBytes - 1) / kPieceBytes);
    const std::int64_t ctas = (pieces + kWarps - 1) / kWarps;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas < kMaxIndex ? ctas : kMaxIndex));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(launch.stream);
    return cudaLaunchKernelEx(&config, MovePages, move, launch.skipped);
  }
};

}  // namespace

const PageMover* CudaPages() {
  static const Cuda mover;
  return &mover;
}

}  // namespace kvsummary
