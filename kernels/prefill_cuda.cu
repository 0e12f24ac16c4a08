// Prefill on the GPU, in one launch and without helper arrays. Two kinds of CTAs a layer:
//
// - one a request (the first `requests` of the grid): computes the regions that begin before the request's
//   first live row, so need the ring; then, after a barrier, stores the last rows in the ring. Nobody else
//   touches the request's ring, so every read of it precedes every write.
// - the others, of which there are as many as the device holds at once: each warp walks over groups of
//   eight rows and closes the region whose eighth row is in the group. They read inputs only, and fetch the
//   next region into shared memory while they compute the present one.
//
// Both kinds agree on who takes a region: the first when row r - 7 lies before the request's first live
// row, the second otherwise. Consecutive positions let a group of eight rows have at most one region of the
// second kind; further ones, which only arrays without meaning have, are left out.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "kernels/launch_cuda.h"
#include "kernels/step_cuda.cuh"

namespace kvsummary::cuda {
namespace {

constexpr int kWords = 4;  // eight channels a lane: 16-byte loads
constexpr int kWarps = 3;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 2;     // the region in work and the next one
constexpr int kCtasPerSm = 4;  // as many as shared memory allows on sm_90
constexpr int kLast = kRegionTokens - 1;
static_assert(32 * 2 * kWords == kChannels, "a warp holds a row");

// A region's rows in shared memory. A lane reads back only what it fetched itself.
struct Stage {
  uint4 key[kRegionTokens][32];
  uint4 z[kRegionTokens][32];
};
static_assert(sizeof(Stage) * kWarps * kStages <= 48 << 10, "static shared memory");

struct Row {
  std::int64_t slot = -1;
  std::int64_t position = 0;
  std::int64_t base = -1;

  Row() = default;
  __device__ __forceinline__ Row(const PrefillStep& step, int r)
      : slot(step.slots[r]), position(step.positions[r]), base(step.ring_bases[r]) {}
  __device__ __forceinline__ RowState state(const CacheView& view) const {
    return ClassifyRow(view, slot, position, base);
  }
  __device__ __forceinline__ bool live(const CacheView& view) const { return state(view) == RowState::kLive; }
  __device__ __forceinline__ bool closes() const { return position % kRegionTokens == kLast; }
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
    const bool live = r + lane < end && Row(step, r + lane).live(view);
    const unsigned mask = __ballot_sync(kFullWarp, live);
    if (mask) return r + __ffs(static_cast<int>(mask)) - 1;
  }
  return end;
}

// The last live row of [start, end), or start - 1. Warp-wide.
__device__ __forceinline__ int LastLive(const CacheView& view, const PrefillStep& step, int start, int end,
                                        int lane) {
  for (int r = end - 1; r >= start; r -= 32) {
    const bool live = r - lane >= start && Row(step, r - lane).live(view);
    const unsigned mask = __ballot_sync(kFullWarp, live);
    if (mask) return r - (__ffs(static_cast<int>(mask)) - 1);
  }
  return start - 1;
}

__device__ __forceinline__ void WriteSummary(std::uint8_t* summary,
                                             const std::uint32_t (&k)[kRegionTokens][kWords],
                                             const std::uint32_t (&z)[kRegionTokens][kWords], int lane) {
  RowMaxima maxima = ThreadMaxima(z);
  maxima.ReduceWarp();
  std::uint16_t out[kWords];
  Summarize(k, z, maxima, out);
  StoreSummary(summary, out, lane);
}

// The region that live row r closes, of a request whose first live row is `first` > r - 7.
__device__ __forceinline__ void CloseFromRing(const CacheView& view, const LayerRows& in, std::int64_t layer,
                                              const Row& row, int r, int first, int lane) {
  const RingWindow ring(view, layer, row.base, row.position);
  std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const int source = r - kLast + t;
    const std::uint16_t* from_ring = ring.row(t - kLast);
    Load(k[t], source >= first ? in.key_row(source) : from_ring, lane);
    Load(z[t], source >= first ? in.z_row(source) : from_ring + kChannels, lane);
  }
  WriteSummary(view.summary(layer, row.slot), k, z, lane);
}

__device__ __forceinline__ void UpdateRequest(const CacheView& view, const PrefillStep& step, int request,
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
  const int last = LastLive(view, step, first, end, lane);
  if (warp == 0) {
    Row row;
    if (lane < kLast && first + lane < end) row = Row(step, first + lane);
    unsigned mask = __ballot_sync(kFullWarp, row.closes() && row.live(view));
    for (; mask; mask &= mask - 1) {
      const int r = first + __ffs(static_cast<int>(mask)) - 1;
      CloseFromRing(view, in, layer, Row(step, r), r, first, lane);
    }
  }
  __syncthreads();
  // Positions rise by one: the last `capacity` live rows have a ring row each of their own.
  for (int r = max(first, last - view.capacity + 1) + warp; r <= last; r += kWarps) {
    const Row row(step, r);
    if (!row.live(view)) continue;
    std::uint16_t* to = view.ring_row(layer, row.base, row.position);
    std::uint32_t k[kWords], z[kWords];
    Load(k, in.key_row(r), lane);
    Load(z, in.z_row(r), lane);
    Store(to, k, lane);
    Store(to + kChannels, z, lane);
  }
}

// A region whose eight rows are rows head to head + 7 of the inputs.
struct Region {
  int head = -1;  // negative: none
  std::int64_t slot = -1;
};

// Lanes 8 to 15 get the rows of a group, lanes 0 to 7 the eight before them.
__device__ __forceinline__ Row LoadGroup(const PrefillStep& step, int group, int lane) {
  const std::int64_t r = (std::int64_t{group} - 1) * kRegionTokens + lane;
  return lane < 2 * kRegionTokens && 0 <= r && r < step.rows ? Row(step, static_cast<int>(r)) : Row();
}

__device__ __forceinline__ Region FindRegion(const CacheView& view, const PrefillStep& step, int group,
                                             const Row& row, int lane, unsigned long long* skipped) {
  const int row0 = (group - 1) * kRegionTokens;  // of lane 0
  const RowState state = row.state(view);
  if (state == RowState::kBad && lane >= kRegionTokens && OwnerStart(step, row0 + lane) >= 0) {
    CountSkipped(skipped);
  }
  const unsigned live = __ballot_sync(kFullWarp, state == RowState::kLive);
  unsigned closing = __ballot_sync(kFullWarp, row.closes()) & live & ~0xffu;
  for (; closing; closing &= closing - 1) {
    const int at = __ffs(static_cast<int>(closing)) - 1;
    const int head = row0 + at - kLast;
    const int start = OwnerStart(step, row0 + at);
    if (start < 0 || head < start) continue;
    // A dead head: the request's own CTA takes the region, unless a live row comes before the head.
    if (!(live >> (at - kLast) & 1) && FirstLive(view, step, start, head, lane) == head) continue;
    return {head, __shfl_sync(kFullWarp, row.slot, at)};
  }
  return {};
}

__device__ __forceinline__ void Fetch(Stage& stage, const LayerRows& in, int head, int lane) {
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    __pipeline_memcpy_async(&stage.key[t][lane], ThreadPart<kWords>(in.key_row(head + t), lane),
                            sizeof(uint4));
    __pipeline_memcpy_async(&stage.z[t][lane], ThreadPart<kWords>(in.z_row(head + t), lane), sizeof(uint4));
  }
}

__device__ __forceinline__ void CloseFetched(const CacheView& view, std::int64_t layer, const Stage& stage,
                                             std::int64_t slot, int lane) {
  std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const uint4 a = stage.key[t][lane], b = stage.z[t][lane];
    k[t][0] = a.x, k[t][1] = a.y, k[t][2] = a.z, k[t][3] = a.w;
    z[t][0] = b.x, z[t][1] = b.y, z[t][2] = b.z, z[t][3] = b.w;
  }
  WriteSummary(view.summary(layer, slot), k, z, lane);
}

// Groups first, first + stride, ... of the step.
__device__ __forceinline__ void UpdateGroups(const CacheView& view, const PrefillStep& step,
                                             Stage (&stages)[kStages], int first, int stride,
                                             unsigned long long* skipped) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t layer = blockIdx.y;
  const int groups = (step.rows - 1) / kRegionTokens + 1;
  const LayerRows in(step.in, layer);

  Region region;
  Row row = LoadGroup(step, first, lane);
  for (int ahead = first, stage = 0; ahead < groups + stride; ahead += stride, stage ^= 1) {
    Region next;
    if (ahead < groups) {
      next = FindRegion(view, step, ahead, row, lane, skipped);
      if (next.head >= 0) Fetch(stages[stage], in, next.head, lane);
      row = LoadGroup(step, ahead + stride, lane);
    }
    __pipeline_commit();
    __pipeline_wait_prior(1);
    if (region.head >= 0) CloseFetched(view, layer, stages[stage ^ 1], region.slot, lane);
    region = next;
  }
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    Prefill(const __grid_constant__ CacheView view, const __grid_constant__ PrefillStep step,
            unsigned long long* skipped) {
  __shared__ Stage stages[kWarps][kStages];
  const int cta = static_cast<int>(blockIdx.x);
  if (cta < step.requests) {
    UpdateRequest(view, step, cta, skipped);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  UpdateGroups(view, step, stages[warp], (cta - step.requests) * kWarps + warp,
               (static_cast<int>(gridDim.x) - step.requests) * kWarps, skipped);
}

}  // namespace

int LaunchPrefill(const CacheView& view, const PrefillStep& step, const Launch& launch) {
  if (step.requests <= 0 || view.layers <= 0) return cudaSuccess;
  int device = 0, processors = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  // Enough CTAs for one group a warp, but no more than run at once beside those of the requests.
  const std::int64_t groups = (std::int64_t{step.rows} + kRegionTokens - 1) / kRegionTokens;
  const std::int64_t room = std::int64_t{processors} * kCtasPerSm / view.layers - step.requests;
  const std::int64_t ctas =
      std::min((groups + kWarps - 1) / kWarps, std::max<std::int64_t>(room, processors / view.layers + 1));
  return LaunchGrid(Prefill, step.requests + ctas, view.layers, kThreads, launch.stream, view, step,
                    launch.skipped);
}

}  // namespace kvsummary::cuda
