// Exp (kernels/exp.h) of 16 arguments at once, the same bits. For files compiled with -mavx2 -mfma.
//
// Where the scalar form rounds down or sums 39 bits, this one takes equivalent steps that fit 32-bit lanes;
// exp_test.cc compares both over every float.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/exp.h"

namespace kvsummary::avx2 {

#define KVSUMMARY_INLINE __attribute__((always_inline)) inline

// C1 is kept less kC1Offset: it fits 16 signed bits then, and its product with x 32.
inline constexpr std::int32_t kC1Offset = 1 << 15;
struct Ex2Tables {
  std::int32_t c0[64];
  std::int32_t c1_c2[64];  // (C1 - kC1Offset) << 16 | C2
};
inline constexpr Ex2Tables kEx2Tables = [] {
  Ex2Tables t{};
  for (int s = 0; s < 64; ++s) {
    const auto c1 = static_cast<std::int32_t>(kEx2Table[s] >> 10 & 0xffff) - kC1Offset;
    t.c0[s] = static_cast<std::int32_t>(kEx2Table[s] >> 26);
    t.c1_c2[s] = static_cast<std::int32_t>(static_cast<std::uint32_t>(c1) << 16 | (kEx2Table[s] & 0x3ff));
  }
  return t;
}();

// The pair of rows R and R-1 of Ex2Square.
template <int R>
KVSUMMARY_INLINE __m256i Ex2SquarePair(__m256i y) {
  constexpr int kPair = 3 << (R - 1);
  constexpr int kBelow = (1 << (R - 1)) - (1 << (16 - R));
  const __m256i pair = _mm256_and_si256(y, _mm256_set1_epi16(static_cast<short>(kPair)));
  const __m256i below = _mm256_and_si256(y, _mm256_set1_epi16(static_cast<short>(kBelow)));
  return _mm256_mulhi_epu16(_mm256_add_epi16(below, _mm256_srli_epi16(pair, 1)), pair);
}

// Ex2Square(2 * y) of sixteen 16-bit y.
KVSUMMARY_INLINE __m256i Ex2Square16(__m256i y) {
  const __m256i last = _mm256_and_si256(y, _mm256_set1_epi16(1 << 9));
  const __m256i below = _mm256_and_si256(y, _mm256_set1_epi16(3 << 7));
  const __m256i row = _mm256_mulhi_epu16(_mm256_add_epi16(below, _mm256_srli_epi16(last, 1)), last);
  return _mm256_add_epi16(_mm256_add_epi16(Ex2SquarePair<15>(y), Ex2SquarePair<13>(y)),
                          _mm256_add_epi16(Ex2SquarePair<11>(y), row));
}

// What Exp knows of eight arguments before the square: n = 2^23 times the argument of ex2, cut to a whole
// number and complemented when negative, and k in the low bits of a word.
struct Reduced {
  __m256i n;
  __m256i k;
};

// Which results are asked for.
enum class Results {
  kNormal,  // arguments are >= -87: every result is a normal number
  kAll,
  kScaled,  // all, times kScale, so that what is subnormal by itself is handled as a normal number
};
inline constexpr int kScaleBits = 64;
inline constexpr float kScale = 0x1p64f;
// A product of scaled numbers below this is a subnormal number unscaled and must be cut to the multiples of
// 2^-149 (2^-85 scaled). Adding this number first does that: its last bit is worth as much.
inline constexpr float kScaledNormal = 0x1p-62f;

template <Results kResults>
KVSUMMARY_INLINE Reduced Reduce(__m256 a) {
  const __m256 magic = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: whole numbers in the low bits
  const __m256 c252 = _mm256_set1_ps(252.0f);
  __m256 t = _mm256_fmadd_ps(a, _mm256_set1_ps(kExpScale), _mm256_set1_ps(0.5f));
  if constexpr (kResults != Results::kNormal) t = _mm256_max_ps(t, _mm256_setzero_ps());
  // Floor of 252 t: the nearest whole number, less one where the exact remainder is negative.
  const __m256 nearest = _mm256_fmadd_ps(t, c252, magic);
  const __m256 remainder = _mm256_fmsub_ps(t, c252, _mm256_sub_ps(nearest, magic));
  const __m256i k =
      _mm256_add_epi32(_mm256_castps_si256(nearest), _mm256_srai_epi32(_mm256_castps_si256(remainder), 31));
  const __m256 z = _mm256_sub_ps(_mm256_castsi256_ps(k), _mm256_set1_ps(12582912.0f + 126.0f));
  __m256 f = _mm256_fmsub_ps(a, _mm256_set1_ps(kLog2eHigh), z);
  f = _mm256_fmadd_ps(a, _mm256_set1_ps(kLog2eLow), f);
  const __m256i q = _mm256_cvttps_epi32(_mm256_mul_ps(f, _mm256_set1_ps(8388608.0f)));
  return {_mm256_add_epi32(q, _mm256_srai_epi32(q, 31)), k};
}

// ex2 of n, as the bits of a float without the exponent's bias, from x = n & 0x1ffff and its square. As
// kC1Offset is 2^15, what the offset takes from the sum is x in the quotient.
KVSUMMARY_INLINE __m256i Ex2Unbiased(__m256i n, __m256i x, __m256i square) {
  const __m256i s = _mm256_and_si256(_mm256_srli_epi32(n, 17), _mm256_set1_epi32(63));
  const __m256i c0 = _mm256_i32gather_epi32(kEx2Tables.c0, s, 4);
  const __m256i c1_c2 = _mm256_i32gather_epi32(kEx2Tables.c1_c2, s, 4);
  __m256i sum = _mm256_mullo_epi32(_mm256_srai_epi32(c1_c2, 16), x);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(c1_c2, square));  // the upper half of `square` is 0: C2 only
  sum = _mm256_add_epi32(sum, _mm256_set1_epi32(kEx2Bias));
  const __m256i quotient = _mm256_srli_epi32(_mm256_add_epi32(c0, _mm256_srai_epi32(sum, 13)), 2);
  // The whole part of n is the exponent, x completes the significand: n without the segment's bits.
  return _mm256_add_epi32(_mm256_and_si256(n, _mm256_set1_epi32(~(63 << 17))), quotient);
}

// The product of both parts of exp: ex2 of the fraction (its bits less the bias) and 2^(k - 126).
template <Results kResults>
KVSUMMARY_INLINE __m256 Assemble(__m256i unbiased, __m256i k, __m256 live) {
  const __m256i exponent = _mm256_slli_epi32(k, 23);
  if constexpr (kResults == Results::kNormal) {
    // The significand's leading one, the biases 126 of both factors and k - 126 add up to the exponent.
    return _mm256_castsi256_ps(_mm256_add_epi32(unbiased, exponent));
  } else {
    constexpr int kBits = kResults == Results::kScaled ? 1 + kScaleBits : 1;
    const __m256 ex2 = _mm256_castsi256_ps(_mm256_add_epi32(unbiased, _mm256_set1_epi32(126 << 23)));
    const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(kBits << 23)));
    const __m256 product = _mm256_mul_ps(_mm256_and_ps(ex2, live), power);
    if constexpr (kResults == Results::kAll) return product;
    const __m256 limit = _mm256_set1_ps(kScaledNormal);
    const __m256 cut = _mm256_and_ps(limit, _mm256_cmp_ps(product, limit, _CMP_LT_OQ));
    return _mm256_sub_ps(_mm256_add_ps(product, cut), cut);
  }
}

struct Pair {
  __m256 a;
  __m256 b;
};

// Exp of 16 arguments <= 0, none of them NaN.
template <Results kResults>
KVSUMMARY_INLINE Pair Exp16(Pair v) {
  Pair live = v;
  if constexpr (kResults != Results::kNormal) {
    live.a = _mm256_cmp_ps(v.a, _mm256_set1_ps(kExpZeroBelow), _CMP_GE_OQ);
    live.b = _mm256_cmp_ps(v.b, _mm256_set1_ps(kExpZeroBelow), _CMP_GE_OQ);
    v.a = _mm256_and_ps(v.a, live.a);
    v.b = _mm256_and_ps(v.b, live.b);
  }
  const Reduced a = Reduce<kResults>(v.a);
  const Reduced b = Reduce<kResults>(v.b);
  const __m256i xa = _mm256_and_si256(a.n, _mm256_set1_epi32(0x1ffff));
  const __m256i xb = _mm256_and_si256(b.n, _mm256_set1_epi32(0x1ffff));
  const __m256i square = Ex2Square16(_mm256_packus_epi32(_mm256_srli_epi32(xa, 1), _mm256_srli_epi32(xb, 1)));
  const __m256i zero = _mm256_setzero_si256();
  return {
      Assemble<kResults>(Ex2Unbiased(a.n, xa, _mm256_unpacklo_epi16(square, zero)), a.k, live.a),
      Assemble<kResults>(Ex2Unbiased(b.n, xb, _mm256_unpackhi_epi16(square, zero)), b.k, live.b),
  };
}

}  // namespace kvsummary::avx2
