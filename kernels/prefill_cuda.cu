// Prefill on the GPU, in one launch and without helper arrays. Two kinds of CTAs a layer:
//
// - one a request (the first `requests` of the grid): computes the regions that begin before the request's
//   first live row, so need the ring; then, after a barrier, stores the last rows in the ring. Nobody else
//   touches the request's ring, so every read of it precedes every write.
// - the others: a warp takes eight rows and closes the regions whose eighth row is among them. They read
//   inputs only. Both kinds agree on who takes a region: the first when row r - 7 lies before the request's
//   first live row, the second otherwise.
//
// Of a request's rows only those that ClassifyRow calls live count; see semantics of dead rows in update.h.
#include "kernels/launch_cuda.h"
#include "kernels/step_cuda.cuh"

namespace kvsummary::cuda {
namespace {

constexpr int kWords = 4;  // eight channels a lane: 16-byte loads
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerCta = kWarps * kRegionTokens;
static_assert(32 * 2 * kWords == kChannels, "a warp holds a row");

struct Row {
  std::int64_t slot = -1;
  std::int64_t position = 0;
  std::int64_t base = -1;
  RowState state = RowState::kPadding;

  Row() = default;
  __device__ __forceinline__ Row(const CacheView& view, const PrefillStep& step, int r)
      : slot(step.slots[r]),
        position(step.positions[r]),
        base(step.ring_bases[r]),
        state(ClassifyRow(view, slot, position, base)) {}
  __device__ __forceinline__ bool live() const { return state == RowState::kLive; }
  __device__ __forceinline__ bool closing() const {
    return live() && position % kRegionTokens == kRegionTokens - 1;
  }
};

// First row of the request that row r belongs to, or -1 where query_start_loc covers it by no good range.
__device__ __forceinline__ int OwnerStart(const PrefillStep& step, int r) {
  int low = 0, high = step.requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (step.query_start_loc[middle] <= r) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int start = step.query_start_loc[low], end = step.query_start_loc[low + 1];
  return GoodRange(start, end, step.rows) && start <= r && r < end ? start : -1;
}

// The first live row of [start, end), or end. Warp-wide.
__device__ __forceinline__ int FirstLive(const CacheView& view, const PrefillStep& step, int start, int end,
                                         int lane) {
  for (int r = start; r < end; r += 32) {
    const bool live = r + lane < end && Row(view, step, r + lane).live();
    const unsigned mask = __ballot_sync(kFullWarp, live);
    if (mask) return r + __ffs(static_cast<int>(mask)) - 1;
  }
  return end;
}

__device__ __forceinline__ void WriteSummary(std::uint8_t* summary,
                                             const std::uint32_t (&k)[kRegionTokens][kWords],
                                             const std::uint32_t (&z)[kRegionTokens][kWords], int lane) {
  RowMaxima maxima = ThreadMaxima(z);
  maxima.ReduceWarp();
  std::uint8_t out[2 * kWords];
  Summarize(k, z, maxima, out);
  StoreSummary<kWords>(summary, out, lane);
}

// The region that live row r closes, of a request whose first live row is `first` > r - 7.
__device__ __forceinline__ void CloseFromRing(const CacheView& view, const LayerRows& in, std::int64_t layer,
                                              const Row& row, int r, int first, int lane) {
  const RingWindow ring(view, layer, row.base, row.position);
  std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const int source = r - (kRegionTokens - 1) + t;
    const std::uint16_t* from_ring = ring.row(t - (kRegionTokens - 1));
    Load(k[t], source >= first ? in.key_row(source) : from_ring, lane);
    Load(z[t], source >= first ? in.z_row(source) : from_ring + kChannels, lane);
  }
  WriteSummary(view.summary(layer, row.slot), k, z, lane);
}

__device__ __forceinline__ void RequestCta(const CacheView& view, const PrefillStep& step, int request,
                                           unsigned long long* skipped) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  const std::int64_t layer = blockIdx.y;
  const int start = step.query_start_loc[request], end = step.query_start_loc[request + 1];
  if (!GoodRange(start, end, step.rows)) {
    if (thread == 0) CountSkipped(skipped);
    return;
  }
  const LayerRows in(step.in, layer);
  const int first = FirstLive(view, step, start, end, lane);
  if (first == end) return;
  if (warp == 0) {
    Row row;
    if (lane < kRegionTokens - 1 && first + lane < end) row = Row(view, step, first + lane);
    unsigned mask = __ballot_sync(kFullWarp, row.closing());
    for (; mask; mask &= mask - 1) {
      const int r = first + __ffs(static_cast<int>(mask)) - 1;
      CloseFromRing(view, in, layer, Row(view, step, r), r, first, lane);
    }
  }
  __syncthreads();
  // Positions rise by one: the last `capacity` rows have a ring row each of their own.
  for (int r = max(first, end - view.capacity) + warp; r < end; r += kWarps) {
    const Row row(view, step, r);
    if (!row.live()) continue;
    std::uint16_t* to = view.ring_row(layer, row.base, row.position);
    std::uint32_t k[kWords], z[kWords];
    Load(k, in.key_row(r), lane);
    Load(z, in.z_row(r), lane);
    Store(to, k, lane);
    Store(to + kChannels, z, lane);
  }
}

__device__ __forceinline__ void RegionWarp(const CacheView& view, const PrefillStep& step, int row0,
                                           unsigned long long* skipped) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t layer = blockIdx.y;
  // Lanes 8 to 15 hold this warp's rows, lanes 0 to 7 the eight before them.
  const int mine = row0 - kRegionTokens + lane;
  Row row;
  if (lane < 2 * kRegionTokens && 0 <= mine && mine < step.rows) row = Row(view, step, mine);
  if (row.state == RowState::kBad && lane >= kRegionTokens && OwnerStart(step, mine) >= 0)
    CountSkipped(skipped);
  const unsigned live = __ballot_sync(kFullWarp, row.live());
  unsigned closing = __ballot_sync(kFullWarp, row.closing()) & ~0xffu;

  const LayerRows in(step.in, layer);
  for (; closing; closing &= closing - 1) {
    const int at = __ffs(static_cast<int>(closing)) - 1;
    const std::int64_t slot = __shfl_sync(kFullWarp, row.slot, at);
    const int head = row0 + at - kRegionTokens - (kRegionTokens - 1);  // the region's first row
    const int start = OwnerStart(step, row0 + at - kRegionTokens);
    if (start < 0 || head < start) continue;
    // A dead head: the request's own CTA takes the region, unless a live row comes before the head.
    if (!(live >> (at - (kRegionTokens - 1)) & 1) && FirstLive(view, step, start, head, lane) == head)
      continue;
    std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      Load(k[t], in.key_row(head + t), lane);
      Load(z[t], in.z_row(head + t), lane);
    }
    WriteSummary(view.summary(layer, slot), k, z, lane);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    Prefill(const __grid_constant__ CacheView view, const __grid_constant__ PrefillStep step,
            unsigned long long* skipped) {
  const int cta = static_cast<int>(blockIdx.x);
  if (cta < step.requests) {
    RequestCta(view, step, cta, skipped);
    return;
  }
  const int row0 = (cta - step.requests) * kRowsPerCta + static_cast<int>(threadIdx.x) / 32 * kRegionTokens;
  if (row0 < step.rows) RegionWarp(view, step, row0, skipped);
}

}  // namespace

int LaunchPrefill(const CacheView& view, const PrefillStep& step, const Launch& launch) {
  if (step.rows <= 0 || step.requests <= 0) return cudaSuccess;
  const std::int64_t regions = (std::int64_t{step.rows} + kRowsPerCta - 1) / kRowsPerCta;
  return LaunchGrid(Prefill, step.requests + regions, view.layers, kThreads, launch.stream, view, step,
                    launch.skipped);
}

}  // namespace kvsummary::cuda
