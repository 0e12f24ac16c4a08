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

constexpr int kWords = 1;  // two channels a thread
constexpr int kThreads = kChannels / (2 * kWords);
constexpr int kWarps = kThreads / 32;
static_assert(kThreads % 32 == 0 && kThreads * 2 * kWords == kChannels);
// Rows that are held before they are stored must not fall on ring rows that are still to be read.
static_assert(kMinVerifyCapacity >= kRegionTokens);

__global__ void __launch_bounds__(kThreads)
    Verify(const __grid_constant__ CacheView view, const __grid_constant__ VerifyStep step,
           unsigned long long* skipped) {
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
  __shared__ uint4 shared[kWarps];

  for (int first = start; first < end; first += kRegionTokens) {
    const int count = min(end - first, kRegionTokens);
    const int position = seq_len - (end - first);  // of row `first`
    const int residue = position % kRegionTokens;

    std::int64_t slot = -1;  // of row first + lane
    RowState state = RowState::kPadding;
    if (lane < count) {
      slot = step.slots[first + lane];
      state = ClassifyRow(view, slot, position + lane, base);
      if (state == RowState::kBad && thread < 32) CountSkipped(skipped);
    }
    const unsigned live = __ballot_sync(kFullWarp, state == RowState::kLive);
    if (live == 0) continue;  // alike in every warp

    const RingWindow ring(view, layer, base, position);
    std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
    bool held[kRegionTokens];
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      const int i = (t - residue) & (kRegionTokens - 1);
      held[t] = live >> i & 1;
      if (!held[t]) continue;
      Load(k[t], in.key_row(first + i), thread);
      Load(z[t], in.z_row(first + i), thread);
    }
    const int closing = kRegionTokens - 1 - residue;
    if (live >> closing & 1) {
      std::uint32_t rk[kRegionTokens][kWords], rz[kRegionTokens][kWords];
#pragma unroll
      for (int t = 0; t < kRegionTokens; ++t) {
        if (t >= residue && held[t]) {
#pragma unroll
          for (int i = 0; i < kWords; ++i) rk[t][i] = k[t][i], rz[t][i] = z[t][i];
        } else {
          Load(rk[t], ring.row(t - residue), thread);
          Load(rz[t], ring.row(t - residue) + kChannels, thread);
        }
      }
      RowMaxima maxima = ThreadMaxima(rz);
      ReduceCta(maxima, shared);
      std::uint16_t out[kWords];
      SummarizeFlat(rk, rz, maxima, out);
      const std::int64_t closing_slot = __shfl_sync(kFullWarp, slot, closing);
      StoreSummary(view.summary(layer, closing_slot), out, thread);
    }
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      if (!held[t]) continue;
      std::uint16_t* row = ring.row((t - residue) & (kRegionTokens - 1));
      Store(row, k[t], thread);
      Store(row + kChannels, z[t], thread);
    }
    if (first + kRegionTokens < end) __syncthreads();  // `shared` is used again
  }
}

}  // namespace

int LaunchVerify(const CacheView& view, const VerifyStep& step, const Launch& launch) {
  return LaunchGrid(Verify, step.requests, view.layers, kThreads, launch.stream, view, step, launch.skipped);
}

}  // namespace kvsummary::cuda
