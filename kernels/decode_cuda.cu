// Decode on the GPU: one CTA a request and layer. The work is latency, not bytes, so the input row is on
// its way before the indices are looked at.
#include "kernels/launch_cuda.h"
#include "kernels/step_cuda.cuh"

namespace kvsummary::cuda {
namespace {

// From so many rows and layers on, less work counts for more than less latency.
constexpr std::int64_t kManyRows = 768;

template <int N>
__global__ void __launch_bounds__(kTeamThreads<N>)
    Decode(const __grid_constant__ DeviceView view, const __grid_constant__ DecodeStep step,
           unsigned long long* skipped) {
  AwaitStream();
  constexpr int kLast = kRegionTokens - 1;
  const int r = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t layer = blockIdx.y;
  const LayerRows in(step.in, layer);
  const std::int64_t slot = step.slots[r], position = step.positions[r], base = step.ring_bases[r];
  RegionPart<N> rows;
  Load(rows.k[kLast], in.key_row(r), thread);
  Load(rows.z[kLast], in.z_row(r), thread);

  const RowState state = view.Classify(slot, position, base);
  if (state != RowState::kLive) {
    if (state == RowState::kBad && thread == 0) CountSkipped(skipped);
    return;
  }
  if (!Closes(position)) {
    std::uint16_t* to = RingRows(view, layer, base, position).row(0);
    Store(to, rows.k[kLast], thread);
    Store(to + kChannels, rows.z[kLast], thread);
    return;
  }
  const RingRows ring(view, layer, base, position - kLast);
#pragma unroll
  for (int t = 0; t < kLast; ++t) {
    Load(rows.k[t], ring.row(t), thread);
    Load(rows.z[t], ring.row(t) + kChannels, thread);
  }
  CloseRegion(view.summary(layer, slot), rows);
}

}  // namespace

int LaunchDecode(const CacheView& view, const DecodeStep& step, const Launch& launch) {
  if (!Usable(view, kMinCapacity)) return cudaErrorInvalidValue;
  const DeviceView device_view(view);
  if (std::int64_t{step.rows} * view.layers < kManyRows) {
    return LaunchGrid(Decode<1>, step.rows, view.layers, kTeamThreads<1>, launch.stream, device_view, step,
                      launch.skipped);
  }
  return LaunchGrid(Decode<2>, step.rows, view.layers, kTeamThreads<2>, launch.stream, device_view, step,
                    launch.skipped);
}

}  // namespace kvsummary::cuda
