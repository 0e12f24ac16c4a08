// Nothing here may instantiate an inline function of a shared header out of line: the linker could choose
// this file's copy, compiled for AVX2, for callers on a CPU without it.
#include "kernels/update_avx2.h"

#include <immintrin.h>

#include <cstring>

#include "kernels/exp_avx2.h"

namespace kvsummary {
namespace {

using avx2::Exp16;
using avx2::Pair;
using avx2::Results;

// bf16 as signed 16-bit numbers of the same order (-0 below 0); its own inverse.
KVSUMMARY_INLINE __m256i Ordered(__m256i x) {
  return _mm256_xor_si256(x, _mm256_srli_epi16(_mm256_srai_epi16(x, 15), 1));
}
KVSUMMARY_INLINE float WidenOrdered(std::int32_t x) {
  const std::int32_t bits = (x ^ (x < 0 ? 0x7fff : 0)) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
constexpr std::int32_t kOrderedInfinity = 0x7f80;
constexpr std::int32_t kOrderedMinusInfinity = -0x7f81;

// The one horizontal instruction there is finds the smallest of eight unsigned numbers.
KVSUMMARY_INLINE std::int32_t Largest(__m256i x) {
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(0x7fff)));
  return static_cast<std::int16_t>(_mm_cvtsi128_si32(smallest) ^ 0x7fff);
}
KVSUMMARY_INLINE std::int32_t Smallest(__m256i x) {
  const __m128i half = _mm_min_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-0x8000)));
  return static_cast<std::int16_t>(_mm_cvtsi128_si32(smallest) ^ 0x8000);
}

KVSUMMARY_INLINE __m256i Load(const std::uint16_t* row) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
}
// Sixteen bf16, four by four: channels 0-3 and 8-11, then 4-7 and 12-15.
KVSUMMARY_INLINE Pair Widen(__m256i x) {
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x))};
}

// Rounded to bf16 and then to e4m3, one code in the low byte of each lane; Bf16ToE4m3 in vector form.
KVSUMMARY_INLINE __m256i Encode(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i odd16 = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i bf16 =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd16, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i magnitude = _mm256_and_si256(bf16, _mm256_set1_epi32(0x7fff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 4), one);
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_add_epi32(odd, _mm256_set1_epi32(7))), 4);
  const __m256i normal =
      _mm256_min_epi32(_mm256_sub_epi32(rounded, _mm256_set1_epi32(120 << 3)), _mm256_set1_epi32(0x7e));
  const __m256 shift = _mm256_set1_ps(16384.0f);
  const __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16)), shift);
  const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(shift));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c80), magnitude);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256i code = _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);
  return _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), is_nan);
}

struct Maxima {
  float running[kRegionTokens];              // M after each row
  alignas(32) float rescale[kRegionTokens];  // Exp of how far each row raised M, first row: 1
};

// Weights and products of f32 become subnormal where z lies far below M; CPUs take some 150 cycles for each
// such number. A region that cannot have them is tame; any other one is computed in numbers scaled by
// kScale, none of which is subnormal, and rounded where the unscaled number would be.
//
// Tame: no z lies more than kTameSpread below the region's largest, so that every weight is a normal
// number and den is above 0 from the first row on. Products with a small key may still be subnormal.
constexpr float kTameSpread = 80.0f;
// Largest magnitude of a key (as bf16 bits) in the scaled form: 2^58, num stays finite.
constexpr int kLargestScaledKey = (127 + 58) << 7;

// a * b of which one is scaled, rounded as the product of unscaled numbers is.
KVSUMMARY_INLINE __m256 MultiplyScaled(__m256 a, __m256 b) {
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  const __m256 limit = _mm256_set1_ps(avx2::kScaledNormal);
  const __m256 product = _mm256_mul_ps(a, b);
  const __m256 sign = _mm256_and_ps(product, sign_bit);
  const __m256 small = _mm256_cmp_ps(_mm256_andnot_ps(sign_bit, product), limit, _CMP_LT_OQ);
  const __m256 cut = _mm256_and_ps(_mm256_or_ps(limit, sign), small);
  return _mm256_or_ps(_mm256_sub_ps(_mm256_fmadd_ps(a, b, cut), cut), sign);  // a zero keeps its sign
}

// One step of the recurrence in eight channels.
template <bool kTame>
KVSUMMARY_INLINE void Accumulate(__m256 w, __m256 key, __m256 rescale, __m256& num, __m256& den) {
  if constexpr (kTame) {
    num = _mm256_add_ps(_mm256_mul_ps(num, rescale), _mm256_mul_ps(w, key));
    den = _mm256_add_ps(_mm256_mul_ps(den, rescale), w);
  } else {
    rescale = _mm256_and_ps(rescale, _mm256_cmp_ps(den, _mm256_setzero_ps(), _CMP_GT_OQ));
    num = _mm256_add_ps(MultiplyScaled(num, rescale), MultiplyScaled(w, key));
    den = _mm256_add_ps(MultiplyScaled(den, rescale), w);
  }
}

template <bool kTame>
void Summarize(const RegionRows& rows, const Maxima& maxima, std::uint8_t* summary) {
  constexpr Results kResults = kTame ? Results::kNormal : Results::kScaled;
  const __m256 floor = _mm256_set1_ps(kTame ? 1e-20f : 1e-20f * avx2::kScale);
  for (int c = 0; c < kChannels; c += 16) {
    Pair num = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    Pair den = num;
    for (int t = 0; t < kRegionTokens; ++t) {
      const __m256 max = _mm256_broadcast_ss(&maxima.running[t]);
      const __m256 rescale = _mm256_broadcast_ss(&maxima.rescale[t]);
      const Pair z = Widen(Load(rows.z[t] + c));
      const Pair key = Widen(Load(rows.key[t] + c));
      const Pair w = Exp16<kResults>({_mm256_sub_ps(z.a, max), _mm256_sub_ps(z.b, max)});
      Accumulate<kTame>(w.a, key.a, rescale, num.a, den.a);
      Accumulate<kTame>(w.b, key.b, rescale, num.b, den.b);
    }
    const __m256i a = Encode(_mm256_div_ps(num.a, _mm256_max_ps(floor, den.a)));
    const __m256i b = Encode(_mm256_div_ps(num.b, _mm256_max_ps(floor, den.b)));
    // Packing undoes the order of Widen.
    const __m256i words = _mm256_packus_epi32(a, b);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(summary + c), bytes);
  }
}

// The largest magnitude of a key, as bf16 bits; above those of infinity for NaN.
std::int32_t LargestKey(const RegionRows& rows) {
  __m256i largest = _mm256_setzero_si256();
  for (const std::uint16_t* key : rows.key) {
    for (int c = 0; c < kChannels; c += 16) {
      largest = _mm256_max_epi16(largest, _mm256_and_si256(Load(key + c), _mm256_set1_epi16(0x7fff)));
    }
  }
  return Largest(largest);
}

}  // namespace

void CloseRegionAvx2(const RegionRows& rows, std::uint8_t* summary) {
  std::int32_t running[kRegionTokens];
  __m256i low = _mm256_set1_epi16(0x7fff);
  for (int t = 0; t < kRegionTokens; ++t) {
    __m256i high = _mm256_set1_epi16(-0x8000);
    for (int c = 0; c < kChannels; c += 16) {
      const __m256i z = Ordered(Load(rows.z[t] + c));
      high = _mm256_max_epi16(high, z);
      low = _mm256_min_epi16(low, z);
    }
    const std::int32_t row = Largest(high);
    running[t] = t > 0 && running[t - 1] > row ? running[t - 1] : row;
  }
  const std::int32_t smallest = Smallest(low);
  const std::int32_t largest = running[kRegionTokens - 1];
  if (largest > kOrderedInfinity || smallest < kOrderedMinusInfinity) {
    std::memset(summary, 0x7f, kSummaryBytes);  // a NaN
    return;
  }
  // M infinite, from the first row on or at last: differences of infinities, out of the fast path.
  if (running[0] == kOrderedMinusInfinity || largest == kOrderedInfinity) {
    CloseRegionScalar(rows, summary);
    return;
  }

  Maxima maxima;
  for (int t = 0; t < kRegionTokens; ++t) maxima.running[t] = WidenOrdered(running[t]);
  maxima.rescale[0] = 0.0f;
  for (int t = 1; t < kRegionTokens; ++t) maxima.rescale[t] = maxima.running[t - 1] - maxima.running[t];
  const __m256 raised = _mm256_load_ps(maxima.rescale);
  _mm256_store_ps(maxima.rescale, Exp16<Results::kAll>({raised, raised}).a);
  if (WidenOrdered(largest) - WidenOrdered(smallest) <= kTameSpread) {
    Summarize<true>(rows, maxima, summary);
  } else if (LargestKey(rows) <= kLargestScaledKey) {
    Summarize<false>(rows, maxima, summary);
  } else {
    CloseRegionScalar(rows, summary);
  }
}

}  // namespace kvsummary
