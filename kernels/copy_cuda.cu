// CudaPages(): pages are cut into pieces of at most 2 KiB that never cross a view, numbered page after page;
// a persistent grid takes them in turn, so few large pages balance as well as many small ones.
//
// From sm_90 on the bulk copy engine moves a piece: a few lanes of each CTA own slots of shared memory, and
// each lane keeps loads of several pieces and stores of others in flight. Before sm_90 a warp moves a piece,
// four 16-byte loads in flight a lane.
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/copy.h"

namespace kvsummary {
namespace {

constexpr int kThreads = 128;
constexpr int kPieceBytes = 2048;

static_assert(kThreads % 32 == 0 && kPieceBytes == 32 * 4 * static_cast<int>(sizeof(uint4)),
              "a warp moves a piece with four loads a lane");
static_assert(kPieceBytes % kCudaMoveAlignment == 0, "pieces keep the alignment of their view");
static_assert(kMaxPageViews * ((kMaxIndex + kPieceBytes) / kPieceBytes) <= 0xffffffff,
              "pieces of a page are counted in 32 bits");

// Where the pieces and bytes of each view begin in a page; entry view_count is the page's end.
struct PageIndex {
  std::uint32_t piece[kMaxPageViews + 1];
  std::uint32_t byte[kMaxPageViews + 1];
};

// Fills the index by the CTA's first warp and checks the views by all of it; the answer is the same for
// every thread. The index holds for all threads on return.
__device__ bool IndexViews(const PageMove& move, PageIndex& index) {
  const int n = move.view_count;
  bool bad = false;
  for (int v = static_cast<int>(threadIdx.x); v < n; v += kThreads)
    bad |= !GoodView(move, v, kCudaMoveAlignment);
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    const int share = (n + 31) / 32;
    const int begin = min(lane * share, n);
    const int end = min(begin + share, n);
    const PageView* views = move.shape();
    std::uint32_t pieces = 0;
    unsigned long long bytes = 0;
    const auto add = [&](int v) {
      const auto b = static_cast<unsigned long long>(views[v].bytes);
      pieces += static_cast<std::uint32_t>((b + kPieceBytes - 1) / kPieceBytes);
      bytes += b;
    };
    for (int v = begin; v < end; ++v) add(v);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::uint32_t p = __shfl_up_sync(~0u, pieces, distance);
      const unsigned long long b = __shfl_up_sync(~0u, bytes, distance);
      if (lane >= distance) {
        pieces += p;
        bytes += b;
      }
    }
    if (lane == 31) {
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

struct Piece {
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;
  std::uint32_t bytes = 0;  // 0: nothing to move
};

// One worker's pieces: number `first`, then every `step`-th.
class Pieces {
 public:
  __device__ __forceinline__ Pieces(const PageMove& move, const PageIndex& index, unsigned long long* skipped,
                                    std::uint32_t first, std::uint32_t step)
      : move_(move), index_(index), skipped_(skipped), pieces_a_page_(index.piece[move.view_count]) {
    const long long all = move.pages * pieces_a_page_;
    turns_ = first < all ? (all - first + step - 1) / step : 0;
    page_ = first / pieces_a_page_;
    piece_ = first % pieces_a_page_;
    step_pages_ = step / pieces_a_page_;
    step_pieces_ = step % pieces_a_page_;
  }

  __device__ __forceinline__ long long turns() const { return turns_; }

  // The next piece, or an empty one: of a page that is not moved, or past the last turn.
  __device__ __forceinline__ Piece Next() {
    Piece out;
    if (page_ >= move_.pages) return out;
    const std::int64_t from = move_.from_block(page_);
    const std::int64_t to = move_.to_block(page_);
    const PageState state = ClassifyPage(move_, from, to);
    if (state == PageState::kLive) {
      const int v = ViewOf(index_, move_.view_count, piece_);
      const std::uint32_t in_view = (piece_ - index_.piece[v]) * kPieceBytes;
      const std::uint32_t view_begin = index_.byte[v];
      out.from = Address(move_.from, v, from, view_begin) + in_view;
      out.to = Address(move_.to, v, to, view_begin) + in_view;
      out.bytes = min(index_.byte[v + 1] - view_begin - in_view, kPieceBytes);
    } else if (state == PageState::kBad && piece_ == 0 && skipped_) {
      atomicAdd(skipped_, 1ull);
    }
    page_ += step_pages_;
    piece_ += step_pieces_;
    if (piece_ >= pieces_a_page_) {
      piece_ -= pieces_a_page_;
      ++page_;
    }
    return out;
  }

 private:
  __device__ __forceinline__ std::uint8_t* Address(const PageEnd& end, int v, std::int64_t block,
                                                   std::uint32_t view_begin) const {
    if (!end.views) return end.base + block * move_.page_bytes + view_begin;
    return end.base + end.views[v].offset + block * end.views[v].block_stride;
  }

  const PageMove& move_;
  const PageIndex& index_;
  unsigned long long* const skipped_;
  const std::uint32_t pieces_a_page_;
  long long turns_;
  long long page_;
  std::uint32_t piece_;
  std::uint32_t step_pages_;
  std::uint32_t step_pieces_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr int kLanes = 4;   // of a CTA, each with its own slots
constexpr int kStages = 5;  // slots of a lane; with kLanes, five CTAs a multiprocessor on sm_90

__device__ __forceinline__ std::uint32_t SharedAddress(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// One lane's slots. Each slot has a barrier that its load completes, so lanes share nothing.
struct Slots {
  alignas(128) std::uint8_t bytes[kLanes][kStages][kPieceBytes];
  std::uint64_t full[kLanes][kStages];
};

__device__ __forceinline__ void InitBarrier(std::uint64_t& barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&barrier)) : "memory");
}

__device__ __forceinline__ void StartLoad(void* slot, std::uint64_t& full, const Piece& piece) {
  const std::uint32_t barrier = SharedAddress(&full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(piece.bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          SharedAddress(slot)),
      "l"(__cvta_generic_to_global(piece.from)), "r"(piece.bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void AwaitLoad(std::uint64_t& full, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(SharedAddress(&full)), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void StartStore(const void* slot, std::uint8_t* to, std::uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
      "r"(SharedAddress(slot)), "r"(bytes)
      : "memory");
}

__device__ void MovePieces(const PageMove& move, const PageIndex& index, unsigned long long* skipped) {
  __shared__ Slots slots;
  if (threadIdx.x >= kLanes) return;
  auto& slot = slots.bytes[threadIdx.x];
  auto& full = slots.full[threadIdx.x];
#pragma unroll
  for (int s = 0; s < kStages; ++s) InitBarrier(full[s]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

  Pieces pieces(move, index, skipped, blockIdx.x * kLanes + threadIdx.x, gridDim.x * kLanes);
  // Of the piece in each slot; all indices of these arrays are known at compile time.
  std::uint8_t* to[kStages];
  std::uint32_t bytes[kStages];
  std::uint32_t phases = 0;  // bit s: the parity of slot s's next load
  const auto fill = [&](int s) {
    const Piece piece = pieces.Next();
    to[s] = piece.to;
    bytes[s] = piece.bytes;
    if (piece.bytes) StartLoad(slot[s], full[s], piece);
  };
#pragma unroll
  for (int s = 0; s < kStages; ++s) fill(s);
  for (long long turn = 0; turn < pieces.turns(); turn += kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (bytes[s]) {
        AwaitLoad(full[s], phases >> s & 1);
        phases ^= 1u << s;
        StartStore(slot[s], to[s], bytes[s]);
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      // Refill the slot before this one as soon as its store has read it: this one's store runs meanwhile.
      if (turn + s > 0) {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        fill((s + kStages - 1) % kStages);
      }
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#else

__device__ void MovePieces(const PageMove& move, const PageIndex& index, unsigned long long* skipped) {
  constexpr int kLoads = 4;
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // One lane counts the warp's bad pages.
  Pieces pieces(move, index, lane == 0 ? skipped : nullptr, blockIdx.x * kWarps + threadIdx.x / 32,
                gridDim.x * kWarps);
  for (long long turn = 0; turn < pieces.turns(); ++turn) {
    const Piece piece = pieces.Next();
    const auto* from = reinterpret_cast<const uint4*>(piece.from);
    auto* to = reinterpret_cast<uint4*>(piece.to);
    const int words = static_cast<int>(piece.bytes / sizeof(uint4));
    uint4 word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (lane + 32 * i < words) word[i] = __ldcs(from + lane + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (lane + 32 * i < words) __stcs(to + lane + 32 * i, word[i]);
    }
  }
}

#endif

__global__ void __launch_bounds__(kThreads)
    MovePagesKernel(const __grid_constant__ PageMove move, unsigned long long* skipped) {
  __shared__ PageIndex index;
  if (IndexViews(move, index)) {
    MovePieces(move, index, skipped);
  } else if (blockIdx.x == 0 && threadIdx.x == 0 && skipped) {
    atomicAdd(skipped, static_cast<unsigned long long>(move.pages));
  }
}

// CTAs that the current device holds at once, or a cudaError_t.
cudaError_t ResidentCtas(int& ctas) {
  int device = 0;
  int multiprocessors = 0;
  int each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(MovePagesKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, MovePagesKernel, kThreads, 0);
  ctas = multiprocessors * each;
  return error;
}

bool Aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % kCudaMoveAlignment == 0; }

class Cuda final : public PageMover {
  int Move(const PageMove& move, const Launch& launch) const override {
    if (!Aligned(move.from.base) || !Aligned(move.to.base) || move.page_bytes % kCudaMoveAlignment != 0)
      return kInvalidMove;
    int ctas = 0;
    if (const cudaError_t error = ResidentCtas(ctas); error != cudaSuccess) return error;
    // Views tell how many pieces a page has, but only on the device; no CTA is worth less than this.
    constexpr std::int64_t kCtaBytes = 4 * kPieceBytes;
    const std::int64_t useful = (move.pages * move.page_bytes + kCtaBytes - 1) / kCtaBytes;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(useful < ctas ? useful : ctas));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(launch.stream);
    return cudaLaunchKernelEx(&config, MovePagesKernel, move, launch.skipped);
  }
};

}  // namespace

const PageMover* CudaPages() {
  static const Cuda mover;
  return &mover;
}

}  // namespace kvsummary
