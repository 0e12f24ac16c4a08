// Prefill on the GPU, in one launch and without helper arrays. Two kinds of CTAs a layer:
//
// - one a request (the first `requests` of the grid): computes the regions that begin before the request's
//   first live row, so need the ring, and then stores the last rows in the ring. Nobody else touches the
//   request's ring, and a thread reads and writes the same channels of every row: its own program puts
//   every ring read before every ring write.
// - the others close the regions whose eighth row lies in a group of eight rows, from inputs only. Where
//   the step is small, a CTA takes one group (least latency). Where it is large there are as many CTAs as
//   the device holds at once, and each warp walks over groups by itself and fetches the next region into
//   shared memory while it computes the present one (most throughput).
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

constexpr int kWords = 2;  // four channels a thread of a team
constexpr int kThreads = kTeamThreads<kWords>;
constexpr int kWarps = kThreads / 32;
constexpr int kLast = kRegionTokens - 1;
constexpr int kWalkCtasPerSm = 8;  // of kThreads threads, for 128 registers a thread
// Groups a multiprocessor from which on warps walk.
constexpr int kWalkFrom = 24;
constexpr int kLaneWords = 4;  // a warp holds a row: eight channels a lane
static_assert(32 * 2 * kLaneWords == kChannels);

struct Row {
  std::int64_t slot = -1;
  std::int64_t position = 0;
  std::int64_t base = -1;

  Row() = default;
  __device__ __forceinline__ Row(const PrefillStep& step, int r)
      : slot(step.slots[r]), position(step.positions[r]), base(step.ring_bases[r]) {}
  __device__ __forceinline__ RowState state(const DeviceView& view) const {
    return view.Classify(slot, position, base);
  }
  __device__ __forceinline__ bool live(const DeviceView& view) const {
    return state(view) == RowState::kLive;
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

// The first live row of [start, end), or end; lane i brings row start + i. Warp-wide.
__device__ __forceinline__ int FirstLive(const DeviceView& view, const PrefillStep& step, int start, int end,
                                         int lane, Row row) {
  for (int r = start;;) {
    const unsigned live = __ballot_sync(kFullWarp, row.live(view));
    if (live) return r + __ffs(static_cast<int>(live)) - 1;
    r += 32;
    if (r >= end) return end;
    row = r + lane < end ? Row(step, r + lane) : Row();
  }
}

// The last live row of [start, end), or start - 1; lane i brings row end - 1 - i. Warp-wide.
__device__ __forceinline__ int LastLive(const DeviceView& view, const PrefillStep& step, int start, int end,
                                        int lane, Row row) {
  for (int r = end - 1;;) {
    const unsigned live = __ballot_sync(kFullWarp, row.live(view));
    if (live) return r - (__ffs(static_cast<int>(live)) - 1);
    r -= 32;
    if (r < start) return start - 1;
    row = r - lane >= start ? Row(step, r - lane) : Row();
  }
}

// One thread's part of a run of rows on their way from the inputs to the ring.
template <int kRows>
struct Move {
  static constexpr std::uint32_t kNowhere = 0xffffffff;
  std::uint32_t k[kRows][kWords], z[kRows][kWords];
  std::uint32_t to[kRows];  // ring row of the layer

  // Rows r, r - 1, ...; lane i brings the ring row for row r - i. Warp-wide.
  __device__ __forceinline__ void Fetch(const LayerRows& in, int r, std::uint32_t ring_row, int thread) {
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      to[t] = __shfl_sync(kFullWarp, ring_row, t);
      if (to[t] == kNowhere) continue;
      Load(k[t], in.key_row(r - t), thread);
      Load(z[t], in.z_row(r - t), thread);
    }
  }
  __device__ __forceinline__ void Put(const DeviceView& view, std::int64_t layer, int thread) const {
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      if (to[t] == kNowhere) continue;
      std::uint16_t* row = view.ring + (layer * view.ring_layer_stride + to[t]) * kRowElements;
      Store(row, k[t], thread);
      Store(row + kChannels, z[t], thread);
    }
  }
};

// `kRows` rows at a time go to the ring, the first ones fetched before the region is closed.
template <int kRows>
__device__ __forceinline__ void UpdateRequest(const DeviceView& view, const PrefillStep& step, int request,
                                              unsigned long long* skipped) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const std::int64_t layer = blockIdx.y;
  const int start = step.query_start_loc[request], end = step.query_start_loc[request + 1];
  if (!GoodRange(start, end, step.rows)) {
    if (thread == 0) CountSkipped(skipped);
    return;
  }
  const LayerRows in(step.in, layer);
  const auto row_at = [&](int r) { return start <= r && r < end ? Row(step, r) : Row(); };
  Row head = row_at(start + lane), tail = row_at(end - 1 - lane);
  const int first = FirstLive(view, step, start, end, lane, head);
  if (first == end) return;
  const int last = LastLive(view, step, start, end, lane, tail);
  if (first != start) head = row_at(first + lane);
  if (last != end - 1) tail = row_at(last - lane);

  // Positions rise by one: the last `capacity` live rows have a ring row each of their own.
  const int kept = max(first, last - static_cast<int>(view.capacity.divisor()) + 1);
  const auto ring_row = [&](int r, const Row& row) {
    if (r < kept || !row.live(view)) return Move<kRows>::kNowhere;
    const auto position = static_cast<std::uint32_t>(row.position);
    return static_cast<std::uint32_t>(row.base) + view.capacity.Remainder(position);
  };
  Move<kRows> move;
  move.Fetch(in, last, ring_row(last - lane, tail), thread);

  unsigned mask = __ballot_sync(kFullWarp, lane < kLast && Closes(head.position) && head.live(view));
  for (; mask; mask &= mask - 1) {
    const int at = __ffs(static_cast<int>(mask)) - 1;
    const std::int64_t position = __shfl_sync(kFullWarp, head.position, at);
    const RingRows ring(view, layer, __shfl_sync(kFullWarp, head.base, at), position - kLast);
    RegionPart<kWords> region;
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      const int source = first + at - kLast + t;
      const bool present = source >= first;
      Load(region.k[t], present ? in.key_row(source) : ring.row(t), thread);
      Load(region.z[t], present ? in.z_row(source) : ring.row(t) + kChannels, thread);
    }
    CloseRegion(view.summary(layer, __shfl_sync(kFullWarp, head.slot, at)), region);
    __syncthreads();  // as CloseRegion asks
  }
  move.Put(view, layer, thread);
  for (int r = last - kRows; r >= kept; r -= kRows) {
    move.Fetch(in, r, ring_row(r - lane, row_at(r - lane)), thread);
    move.Put(view, layer, thread);
  }
}

// A region whose eight rows are rows head to head + 7 of the inputs.
struct Region {
  int head = -1;  // negative: none
  std::int64_t slot = -1;
};

// What a lane knows of a group: lanes 8 to 15 hold its rows, lanes 0 to 7 the eight before them.
struct GroupRow {
  Row row;
  int start = -1;  // of the row's request, OwnerStart; lanes 8 to 15

  GroupRow() = default;
  __device__ __forceinline__ GroupRow(const PrefillStep& step, int group, int lane) {
    const std::int64_t r = (std::int64_t{group} - 1) * kRegionTokens + lane;
    if (lane >= 2 * kRegionTokens || r < 0 || r >= step.rows) return;
    row = Row(step, static_cast<int>(r));
    if (lane >= kRegionTokens) start = OwnerStart(step, static_cast<int>(r));
  }
};

// Warp-wide. Also counts the group's bad rows.
__device__ __forceinline__ Region FindRegion(const DeviceView& view, const PrefillStep& step, int group,
                                             const GroupRow& mine, int lane, unsigned long long* skipped) {
  const RowState state = mine.row.state(view);
  if (state == RowState::kBad && mine.start >= 0) CountSkipped(skipped);
  const unsigned live = __ballot_sync(kFullWarp, state == RowState::kLive);
  unsigned closing = __ballot_sync(kFullWarp, mine.start >= 0 && Closes(mine.row.position)) & live;
  for (; closing; closing &= closing - 1) {
    const int at = __ffs(static_cast<int>(closing)) - 1;
    const int head = (group - 1) * kRegionTokens + at - kLast;
    const int start = __shfl_sync(kFullWarp, mine.start, at);
    if (head < start) continue;
    // A dead head: the request's own CTA takes the region, unless a live row comes before the head.
    if (!(live >> (at - kLast) & 1)) {
      const Row before = start + lane < head ? Row(step, start + lane) : Row();
      if (FirstLive(view, step, start, head, lane, before) == head) continue;
    }
    return {head, __shfl_sync(kFullWarp, mine.row.slot, at)};
  }
  return {};
}

__device__ __forceinline__ void UpdateGroup(const DeviceView& view, const PrefillStep& step, int group,
                                            unsigned long long* skipped) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const std::int64_t layer = blockIdx.y;
  const Region region =
      FindRegion(view, step, group, GroupRow(step, group, lane), lane, thread < 32 ? skipped : nullptr);
  if (region.head < 0) return;  // alike in every warp
  const LayerRows in(step.in, layer);
  RegionPart<kWords> rows;
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    Load(rows.k[t], in.key_row(region.head + t), thread);
    Load(rows.z[t], in.z_row(region.head + t), thread);
  }
  CloseRegion(view.summary(layer, region.slot), rows);
}

// Rows head to head + 7 on their way through shared memory. A lane reads back only what it fetched itself.
struct Stage {
  uint4 key[kRegionTokens][32];
  uint4 z[kRegionTokens][32];

  __device__ __forceinline__ void Fetch(const LayerRows& in, int head, int lane) {
    const uint4* k = reinterpret_cast<const uint4*>(in.key_row(head)) + lane;
    const uint4* zz = reinterpret_cast<const uint4*>(in.z_row(head)) + lane;
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      __pipeline_memcpy_async(&key[t][lane], k, sizeof(uint4));
      __pipeline_memcpy_async(&z[t][lane], zz, sizeof(uint4));
      k = reinterpret_cast<const uint4*>(reinterpret_cast<const std::uint16_t*>(k) + in.key_stride);
      zz = reinterpret_cast<const uint4*>(reinterpret_cast<const std::uint16_t*>(zz) + in.z_stride);
    }
  }
  __device__ __forceinline__ void Read(RegionPart<kLaneWords>& rows, int lane) const {
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      const uint4 a = key[t][lane], b = z[t][lane];
      rows.k[t][0] = a.x, rows.k[t][1] = a.y, rows.k[t][2] = a.z, rows.k[t][3] = a.w;
      rows.z[t][0] = b.x, rows.z[t][1] = b.y, rows.z[t][2] = b.z, rows.z[t][3] = b.w;
    }
  }
};

// A warp's walk over groups first, first + stride, ...
__device__ __forceinline__ void WalkGroups(const DeviceView& view, const PrefillStep& step, int first,
                                           int stride, unsigned long long* skipped) {
  __shared__ Stage stages[kWarps];
  Stage& stage = stages[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t layer = blockIdx.y;
  const int groups = (step.rows - 1) / kRegionTokens + 1;
  const LayerRows in(step.in, layer);

  Region next;
  GroupRow row(step, first, lane);
  for (int ahead = first; ahead < groups + stride; ahead += stride) {
    const Region region = next;
    next = {};
    if (ahead < groups) {
      next = FindRegion(view, step, ahead, row, lane, skipped);
      row = GroupRow(step, ahead + stride, lane);
    }
    RegionPart<kLaneWords> rows;
    if (region.head >= 0) {
      __pipeline_wait_prior(0);
      stage.Read(rows, lane);
    }
    if (next.head >= 0) {
      stage.Fetch(in, next.head, lane);
      __pipeline_commit();
    }
    if (region.head >= 0) {
      RowMaxima maxima = ThreadMaxima(rows);
      maxima.ReduceWarp();
      std::uint16_t out[kLaneWords];
      Summarize(rows, maxima, out);
      StoreSummary(view.summary(layer, region.slot), out, lane);
    }
  }
}

// Ten rows are the whole ring for k = 3.
__global__ void __launch_bounds__(kThreads, 8)
    Prefill(const __grid_constant__ DeviceView view, const __grid_constant__ PrefillStep step,
            unsigned long long* skipped) {
  AwaitStream();
  const int cta = static_cast<int>(blockIdx.x) - step.requests;
  if (cta < 0) {
    UpdateRequest<10>(view, step, static_cast<int>(blockIdx.x), skipped);
  } else {
    UpdateGroup(view, step, cta, skipped);
  }
}

__global__ void __launch_bounds__(kThreads, kWalkCtasPerSm)
    PrefillWalking(const __grid_constant__ DeviceView view, const __grid_constant__ PrefillStep step,
                   unsigned long long* skipped) {
  AwaitStream();
  const int cta = static_cast<int>(blockIdx.x) - step.requests;
  if (cta < 0) {
    UpdateRequest<4>(view, step, static_cast<int>(blockIdx.x), skipped);
  } else {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    WalkGroups(view, step, cta * kWarps + warp, (static_cast<int>(gridDim.x) - step.requests) * kWarps,
               skipped);
  }
}

}  // namespace

int LaunchPrefill(const CacheView& view, const PrefillStep& step, const Launch& launch) {
  if (!Usable(view, kMinCapacity)) return cudaErrorInvalidValue;
  if (step.requests <= 0 || view.layers <= 0) return cudaSuccess;
  int device = 0, processors = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  const std::int64_t groups = (std::int64_t{step.rows} + kRegionTokens - 1) / kRegionTokens;
  const DeviceView device_view(view);
  if (groups * view.layers <= std::int64_t{kWalkFrom} * processors) {
    return LaunchGrid(Prefill, step.requests + groups, view.layers, kThreads, launch.stream, device_view,
                      step, launch.skipped);
  }
  // No more CTAs than run at once beside those of the requests.
  const std::int64_t room = std::int64_t{processors} * kWalkCtasPerSm / view.layers - step.requests;
  const std::int64_t ctas =
      std::min((groups + kWarps - 1) / kWarps, std::max<std::int64_t>(room, processors / view.layers + 1));
  return LaunchGrid(PrefillWalking, step.requests + ctas, view.layers, kThreads, launch.stream, device_view,
                    step, launch.skipped);
}

}  // namespace kvsummary::cuda
