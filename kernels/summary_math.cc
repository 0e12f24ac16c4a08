#include "kernels/summary_math.h"

#include <limits>

#include "kernels/exp.h"

namespace kvsummary {

void CloseRegionScalar(const RegionRows& rows, std::uint8_t* summary) {
  float num[kChannels] = {};
  float den[kChannels] = {};
  float max = -std::numeric_limits<float>::infinity();
  for (int t = 0; t < kRegionTokens; ++t) {
    const float old_max = max;
    for (int c = 0; c < kChannels; ++c) max = NanMax(max, WidenBf16(rows.z[t][c]));
    const float rescale = Exp(old_max - max);
    for (int c = 0; c < kChannels; ++c) {
      const float s = den[c] > 0.0f ? rescale : 0.0f;
      const float w = Exp(WidenBf16(rows.z[t][c]) - max);
      num[c] = num[c] * s + w * WidenBf16(rows.key[t][c]);
      den[c] = den[c] * s + w;
    }
  }
  for (int c = 0; c < kChannels; ++c) {
    const float q = num[c] / NanMax(den[c], 1e-20f);
    summary[c] = Bf16ToE4m3(RoundToBf16(q));
  }
}

}  // namespace kvsummary
