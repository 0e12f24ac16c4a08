// The exponential of the updates, bit for bit that of the GPU.
//
// The summaries' bytes are those of CUDA's expf (no -ftz, no fast math), which stands on the chip's
// ex2.approx.ftz. Both are modelled in integers here, so that a host computes the same bits: ex2 was
// measured for every argument of its grid on an H200, and a digest over expf of all negative floats
// (exp_test.cc) equals the GPU's. Arguments are <= 0, -infinity or NaN; that is all the updates need and
// all that was measured.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvsummary {

// With i the 23-bit fraction of the argument, s = i >> 17 and x = i & 0x1ffff, the 24-bit significand is
//   (C0[s] * 2^13 + C1[s] * x + C2[s] * Ex2Square(x) + kEx2Bias) >> 15.
// One word a segment s: C0 (26 bits) << 26 | C1 (16 bits) << 10 | C2 (10 bits).
inline constexpr std::uint64_t kEx2Table[64] = {
    0x800000d62e5ee, 0x8164d2966c1f5, 0x82cd8796aa9fa, 0x843a2956e9dff, 0x85aac49729a06, 0x871f62576a609,
    0x88980f17aba0f, 0x8a14d657eda14, 0x8b95c3183021d, 0x8d1ae05873a22, 0x8ea43a18b7e27, 0x9031dd58fca2f,
    0x91c3d45942634, 0x935a2c1988e38, 0x94f4f0d9cfe41, 0x96942e5a17e47, 0x9837f15a60a4d, 0x99e0469aaa254,
    0x9b8d3a5af4a58, 0x9d3eda9b3fa61, 0x9ef5331b8ba67, 0xa0b0521bd866e, 0xa270439c26273, 0xa435165c74a79,
    0xa5fed75cc3e81, 0xa7cd945d14287, 0xa9a15b5d6528f, 0xab7a3a9db7295, 0xad583f9e09e9e, 0xaf3b795e5daa5,
    0xb123f69eb22ae, 0xb311c4df07eb3, 0xb504f3df5e6bb, 0xb6fd92dfb5ec1, 0xb8fbb0600e2cb, 0xbaff5b6067ad1,
    0xbd08a460c1eda, 0xbf179aa11d2e3, 0xc12c4de1796ec, 0xc346cda1d6ef1, 0xc5672ae2352fb, 0xc78d75a294705,
    0xc9b9bea2f4f0b, 0xcbec15e356713, 0xce248ce3b8f1c, 0xd06334a41c726, 0xd2a81e648132d, 0xd4f35b64e6f36,
    0xd744fde54db41, 0xd99d16a5b5b4a, 0xdbfbb8661ef51, 0xde60f5a68935a, 0xe0cce026f4766, 0xe33f8aa76136d,
    0xe5b907e7cef77, 0xe8396b683df80, 0xeac0c828adf8d, 0xed4f31291f795, 0xefe4baa99239d, 0xf281782a05faa,
    0xf5257e2a7b3b2, 0xf7d0e0aaf17bf, 0xfa83b3eb693c9, 0xfd3e0d2be23d4,
};

inline constexpr std::uint32_t kEx2Bias = 6114;

// exp(x) is 0 for every x below the first, 1 for every x above the second.
inline constexpr float kExpZeroBelow = -104.0f;
inline constexpr float kExpOneAbove = -0x1p-25f;

// x * x / 2^19 of a 17-bit x by the chip's truncated squarer: of the folded array of partial products only
// the columns of weight 2^19 and above are summed, nothing carries in from those left out. So bit i >= 10
// adds its square 2^(2i) and its products with bits j of 18 - i <= j < i; bit 0 never counts.
//
// Two neighbouring rows are one product here: of y = x / 2, bits r and r - 1 times the kept bits below them.
// With the bits that the upper row drops masked out, the only fraction left is 1/2 and the floors of both
// rows are the floor of the product. The rows' own squares and cross term are half the square of the pair.
constexpr std::uint32_t Ex2Square(std::uint32_t x) {
  const std::uint32_t y = x >> 1;
  std::uint32_t sum = 0;
  for (int r = 15; r >= 9; r -= 2) {
    const std::uint32_t pair = y & (r > 9 ? 3u << (r - 1) : 1u << r);
    const std::uint32_t below = y & ((r > 9 ? 1u << (r - 1) : 1u << r) - (1u << (16 - r)));
    sum += ((below + (pair >> 1)) * pair) >> 16;
  }
  return sum;
}

// 24-bit significand, in [2^23, 2^24), of 2^(i * 2^-23), i < 2^23.
constexpr std::uint32_t Ex2Significand(std::uint32_t i) {
  const std::uint64_t c = kEx2Table[i >> 17];
  const std::uint32_t x = i & 0x1ffff;
  const std::uint64_t sum =
      ((c >> 26) << 13) + ((c >> 10) & 0xffff) * x + (c & 0x3ff) * Ex2Square(x) + kEx2Bias;
  return static_cast<std::uint32_t>(sum >> 15);
}

// ex2.approx.ftz.f32 of -126 <= x < 2 or NaN: cut toward zero to 23 fraction bits, a negative number then
// ones-complemented except that a magnitude below 2^-23 counts as zero.
inline float Ex2ApproxFtz(float x) {
  if (x != x) return x;
  const auto q = static_cast<std::int32_t>(x * 8388608.0f);  // exact product, truncated
  const std::int32_t n = q < 0 ? q - 1 : q;
  const std::uint32_t m = Ex2Significand(static_cast<std::uint32_t>(n) & 0x7fffff);
  return std::bit_cast<float>((static_cast<std::uint32_t>((n >> 23) + 126) << 23) + m);
}

// Constants of CUDA's expf, also for the vector form: t = 0.5 + a / (252 ln 2) saturated to [0, 1],
// k = floor(252 t), e^a = 2^(a / ln 2 - (k - 126)) * 2^(k - 126).
inline constexpr float kExpScale = 0.0057249800302088261f;
inline constexpr float kLog2eHigh = 1.4426950216293335f;
inline constexpr float kLog2eLow = 1.9259629911266175e-8f;

inline float Exp(float a) {
  if (a < kExpZeroBelow) return 0.0f;
  if (a > kExpOneAbove) return 1.0f;
  float t = std::fma(a, kExpScale, 0.5f);
  t = t > 0.0f ? t : 0.0f;                              // NaN becomes 0, as in saturation; t <= 0.5
  const auto k = static_cast<std::int32_t>(t * 252.0);  // a double holds the product exactly
  const float z = static_cast<float>(k - 126);
  float f = std::fma(a, kLog2eHigh, -z);
  f = std::fma(a, kLog2eLow, f);
  return Ex2ApproxFtz(f) * std::bit_cast<float>(static_cast<std::uint32_t>(k + 1) << 23);
}

}  // namespace kvsummary
