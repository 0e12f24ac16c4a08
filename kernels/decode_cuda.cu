// Decode on the GPU: one CTA a request and layer. The work is latency, not bytes, so everything that does
// not depend on the row's indices is loaded before they are looked at.
#include "kernels/launch_cuda.h"
#include "kernels/step_cuda.cuh"

namespace kvsummary::cuda {
namespace {

constexpr int kWords = 1;  // two channels a thread
constexpr int kThreads = kChannels / (2 * kWords);
constexpr int kWarps = kThreads / 32;
static_assert(kThreads % 32 == 0 && kThreads * 2 * kWords == kChannels);

__global__ void __launch_bounds__(kThreads)
    Decode(const __grid_constant__ CacheView view, const __grid_constant__ DecodeStep step,
           unsigned long long* skipped) {
  const int r = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t layer = blockIdx.y;
  const LayerRows in(step.in, layer);
  const std::int64_t slot = step.slots[r], position = step.positions[r], base = step.ring_bases[r];
  std::uint32_t k[kRegionTokens][kWords], z[kRegionTokens][kWords];
  Load(k[7], in.key_row(r), thread);
  Load(z[7], in.z_row(r), thread);

  const RowState state = ClassifyRow(view, slot, position, base);
  if (state != RowState::kLive) {
    if (state == RowState::kBad && thread == 0) CountSkipped(skipped);
    return;
  }
  const RingWindow ring(view, layer, base, position);
  if (position % kRegionTokens != kRegionTokens - 1) {
    Store(ring.row(0), k[7], thread);
    Store(ring.row(0) + kChannels, z[7], thread);
    return;
  }
#pragma unroll
  for (int t = 0; t < kRegionTokens - 1; ++t) {
    Load(k[t], ring.row(t - 7), thread);
    Load(z[t], ring.row(t - 7) + kChannels, thread);
  }
  __shared__ uint4 shared[kWarps];
  RowMaxima maxima = ThreadMaxima(z);
  ReduceCta(maxima, shared);
  std::uint16_t out[kWords];
  SummarizeFlat(k, z, maxima, out);
  StoreSummary(view.summary(layer, slot), out, thread);
}

}  // namespace

int LaunchDecode(const CacheView& view, const DecodeStep& step, const Launch& launch) {
  return LaunchGrid(Decode, step.rows, view.layers, kThreads, launch.stream, view, step, launch.skipped);
}

}  // namespace kvsummary::cuda
