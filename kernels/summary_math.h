// The arithmetic of a summary on the host, in its plain form: conversions and one region.
//
// Every operation is f32 and rounded by itself; the build forbids fused multiply-add where none is
// written. The vector form (update_avx2.cc) gives the same bytes.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/layout.h"

namespace kvsummary {

// The rows of a region in position order, 256 bf16 values each; any alignment of two bytes.
struct RegionRows {
  const std::uint16_t* key[kRegionTokens];
  const std::uint16_t* z[kRegionTokens];
};

// Writes the 256 bytes of a region's summary.
using CloseRegion = void (*)(const RegionRows& rows, std::uint8_t* summary);

void CloseRegionScalar(const RegionRows& rows, std::uint8_t* summary);

constexpr float WidenBf16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

// The larger of the two; NaN when either is NaN.
constexpr float NanMax(float a, float b) {
  if (a != a) return a;
  return a >= b ? a : b;
}

// Round to nearest even; NaN gives 0x7fff, as on the GPU.
constexpr std::uint16_t RoundToBf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// bf16 to e4m3fn: round to nearest even, saturating to +-448 (0x7e, 0xfe); NaN of either sign gives 0x7f.
constexpr std::uint8_t Bf16ToE4m3(std::uint16_t x) {
  constexpr std::uint32_t kFirstNormal = 0x3c80;  // 2^-6, code 0x08
  constexpr std::uint32_t kLargest = 0x7e;
  const std::uint32_t magnitude = x & 0x7fff;
  if (magnitude > 0x7f80) return 0x7f;
  const std::uint32_t sign = x >> 8 & 0x80;
  std::uint32_t code = 0;
  if (magnitude >= kFirstNormal) {
    // Of seven fraction bits keep three; the exponent bias falls from 127 to 7.
    code = ((magnitude + 7 + (magnitude >> 4 & 1)) >> 4) - (120 << 3);
    if (code > kLargest) code = kLargest;
  } else {
    // Codes 0 to 8 are multiples of 2^-9: adding 2^14 leaves them rounded in the lowest bits.
    const float shifted = WidenBf16(static_cast<std::uint16_t>(magnitude)) + 16384.0f;
    code = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(16384.0f);
  }
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace kvsummary
