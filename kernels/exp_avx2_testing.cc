#include "kernels/exp_avx2_testing.h"

#include "kernels/exp_avx2.h"

namespace kvsummary::avx2 {
namespace {

template <Results kResults>
void Exp(std::uint32_t first, float* out) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i a = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), lanes);
  const __m256i b = _mm256_add_epi32(a, _mm256_set1_epi32(8));
  const Pair e = Exp16<kResults>({_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)});
  _mm256_storeu_ps(out, e.a);
  _mm256_storeu_ps(out + 8, e.b);
}

}  // namespace

void AllExp(std::uint32_t first, float* out) { Exp<Results::kAll>(first, out); }
void NormalExp(std::uint32_t first, float* out) { Exp<Results::kNormal>(first, out); }
void ScaledExp(std::uint32_t first, float* out) {
  Exp<Results::kScaled>(first, out);
  for (int i = 0; i < kVector; ++i) out[i] /= kScale;
}

std::uint32_t Square(std::uint32_t x) {
  const __m256i square = Ex2Square16(_mm256_set1_epi16(static_cast<short>(x >> 1)));
  return static_cast<std::uint32_t>(_mm256_extract_epi16(square, 5)) & 0xffff;
}

}  // namespace kvsummary::avx2
