// Verify on the GPU: one CTA a request and layer. A thread keeps the same channels of every row, so the
// order of ring reads and writes is that of its own program; only the row maxima cross threads.
//
// The rows of a request are taken eight at a time, which is the same as that many steps one after another.
// Eight consecutive positions have distinct residues modulo 8: a row is held in register slot
// `position % 8`, at most one row of the eight closes a region, and of that region the slots before the
// first row's residue come from the ring.
#include "kernels/launch_cuda.h"
#include "kernels/step_cuda.cuh"

namespace kvsummary::cuda {
namespace {

constexpr int kWords = 2;  // four channels a thread
constexpr int kThreads = kTeamThreads<kWords>;

// Rows that are held before they are stored must not fall on ring rows that are still to be read.
static_assert(kMinVerifyCapacity >= kRegionTokens);

__global__ void __launch_bounds__(kThreads)
    Verify(const __grid_constant__ DeviceView view, const __grid_constant__ VerifyStep step,
           unsigned long long* skipped) {
  AwaitStream();
  const int request = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const std::int64_t layer = blockIdx.y;
  const int start = step.query_start_loc[request], end = step.query_start_loc[request + 1];
  const int seq_len = step.seq_lens[request];
  if (!GoodRange(start, end, step.rows) || (start < end && seq_len < end - start)) {
    if (thread == 0) CountSkipped(skipped);
    return;
  }
  if (start == end) return;
  const std::int64_t base = step.ring_bases[start];
  const LayerRows in(step.in, layer);

  for (int first = start; first < end; first += kRegionTokens) {
    const int count = min(end - first, kRegionTokens);
    const int position = seq_len - (end - first);  // of row `first`
    const int residue = position % kRegionTokens;
    const std::int64_t slot = lane < count ? step.slots[first + lane] : -1;  // of row first + lane
    RegionPart<kWords> rows;
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      const int i = (t - residue) & (kRegionTokens - 1);
      if (i >= count) continue;
      Load(rows.k[t], in.key_row(first + i), thread);
      Load(rows.z[t], in.z_row(first + i), thread);
    }

    const RowState state = view.Classify(slot, position + lane, base);
    if (state == RowState::kBad && thread < 32) CountSkipped(skipped);
    const unsigned live = __ballot_sync(kFullWarp, state == RowState::kLive);
    if (live == 0) continue;  // alike in every warp

    const RingRows ring(view, layer, base, position - residue);
    const auto held = [live, residue](int t) { return live >> ((t - residue) & (kRegionTokens - 1)) & 1; };
    const int closing = kRegionTokens - 1 - residue;
    if (live >> closing & 1) {
      RegionPart<kWords> region = rows;
#pragma unroll
      for (int t = 0; t < kRegionTokens; ++t) {
        if (t >= residue && held(t)) continue;
        Load(region.k[t], ring.row(t), thread);
        Load(region.z[t], ring.row(t) + kChannels, thread);
      }
      CloseRegion(view.summary(layer, __shfl_sync(kFullWarp, slot, closing)), region);
    }
    const RingRows next = ring.Next();
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      if (!held(t)) continue;
      std::uint16_t* to = t >= residue ? ring.row(t) : next.row(t);
      Store(to, rows.k[t], thread);
      Store(to + kChannels, rows.z[t], thread);
    }
    if (first + kRegionTokens < end) __syncthreads();  // as CloseRegion asks
  }
}

}  // namespace

int LaunchVerify(const CacheView& view, const VerifyStep& step, const Launch& launch) {
  if (!Usable(view, kMinVerifyCapacity)) return cudaErrorInvalidValue;
  return LaunchGrid(Verify, step.requests, view.layers, kThreads, launch.stream, DeviceView(view), step,
                    launch.skipped);
}

}  // namespace kvsummary::cuda
