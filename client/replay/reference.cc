#include "client/replay/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/exp.h"

namespace kvsummary {
namespace {

float Widen(std::uint16_t bf16) { return std::bit_cast<float>(std::uint32_t{bf16} << 16); }

// To nearest even. A NaN stays one.
std::uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  const std::uint32_t kept = bits >> 16;
  const std::uint32_t dropped = bits & 0xffff;
  const bool up = dropped > 0x8000 || (dropped == 0x8000 && (kept & 1) != 0);
  return static_cast<std::uint16_t>(kept + (up ? 1 : 0));
}

float MaxOrNan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  return a > b ? a : b;
}

std::vector<std::uint8_t> MakeE4m3Table() {
  std::vector<std::uint8_t> table(1 << 16);
  for (std::uint32_t bf16 = 0; bf16 < table.size(); ++bf16) {
    table[bf16] = ReferenceE4m3(static_cast<std::uint16_t>(bf16));
  }
  return table;
}

}  // namespace

std::uint8_t ReferenceE4m3(std::uint16_t bf16) {
  const double value = Widen(bf16);
  if (std::isnan(value)) return 0x7f;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 464) return sign | 0x7e;  // halfway from 448 to the 480 that does not exist
  // Three fraction bits below the leading one, whose exponent is at least -6.
  int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -6) : -6;
  auto eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  if (eighths == 16) {
    eighths = 8;
    ++exponent;
  }
  if (eighths < 8) return static_cast<std::uint8_t>(sign | eighths);  // subnormal: exponent is -6
  return static_cast<std::uint8_t>(sign | (exponent + 7) << 3 | (eighths - 8));
}

std::array<std::uint8_t, kSummaryBytes> ReferenceSummary(
    std::span<const std::uint16_t, kRegionElements> rows) {
  static const std::vector<std::uint8_t> kE4m3 = MakeE4m3Table();
  std::array<float, kChannels> num{};
  std::array<float, kChannels> den{};
  float max = -std::numeric_limits<float>::infinity();
  for (int row = 0; row < kRegionTokens; ++row) {
    const auto key = rows.subspan(static_cast<std::size_t>(row) * kRowElements, kChannels);
    const auto z = rows.subspan(static_cast<std::size_t>(row) * kRowElements + kChannels, kChannels);
    float next_max = max;
    for (const std::uint16_t value : z) next_max = MaxOrNan(next_max, Widen(value));
    const float rescale = Exp(max - next_max);
    for (std::size_t c = 0; c < kChannels; ++c) {
      const float scale = den[c] > 0 ? rescale : 0.0F;
      const float weight = Exp(Widen(z[c]) - next_max);
      num[c] = num[c] * scale + weight * Widen(key[c]);
      den[c] = den[c] * scale + weight;
    }
    max = next_max;
  }
  std::array<std::uint8_t, kSummaryBytes> summary;
  for (std::size_t c = 0; c < kChannels; ++c) {
    summary[c] = kE4m3[ToBf16(num[c] / MaxOrNan(den[c], 1e-20F))];
  }
  return summary;
}

}  // namespace kvsummary
