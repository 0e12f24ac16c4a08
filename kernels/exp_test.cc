#include "kernels/exp.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "kernels/exp_avx2.h"

namespace kvsummary {
namespace {

constexpr std::uint64_t kFirstNegative = 0x80000000;  // -0
constexpr std::uint64_t kMinusInfinity = 0xff800000;
constexpr std::uint64_t kDigest = 0x42590d1b86aeea08;  // of the GPU's expf
constexpr int kVector = 16;

bool HaveAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

struct ScalarExp {
  void operator()(std::uint32_t first, float* out) const {
    for (int i = 0; i < kVector; ++i) out[i] = Exp(std::bit_cast<float>(first + i));
  }
};

template <avx2::Results kResults>
struct Avx2Exp {
  void operator()(std::uint32_t first, float* out) const {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i a = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), lanes);
    const __m256i b = _mm256_add_epi32(a, _mm256_set1_epi32(8));
    const avx2::Pair e = avx2::Exp16<kResults>({_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)});
    _mm256_storeu_ps(out, e.a);
    _mm256_storeu_ps(out + 8, e.b);
  }
};

std::uint64_t Hash(std::uint64_t bits, float y) {
  std::uint64_t x =
      bits * 0x9E3779B97F4A7C15 ^ (std::uint64_t{std::bit_cast<std::uint32_t>(y)} * 0xC2B2AE3D27D4EB4F);
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9;
  x ^= x >> 32;
  return x;
}

// Digest of every float with bits from kFirstNegative to `last`, a multiple of kVector.
template <class F>
std::uint64_t Digest(std::uint64_t last, F exp) {
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::uint64_t> sums(threads);
  std::vector<std::thread> pool;
  for (unsigned p = 0; p < threads; ++p) {
    pool.emplace_back([p, threads, last, exp, &sum = sums[p]] {
      constexpr std::uint64_t kRun = 1 << 16;
      std::uint64_t local = 0;
      for (std::uint64_t run = kFirstNegative + p * kRun; run < last; run += threads * kRun) {
        for (std::uint64_t b = run; b < std::min(run + kRun, last); b += kVector) {
          float y[kVector];
          exp(static_cast<std::uint32_t>(b), y);
          for (int i = 0; i < kVector; ++i) local += Hash(b + i, y[i]);
        }
      }
      sum = local;
    });
  }
  std::uint64_t digest = 0;
  for (unsigned p = 0; p < threads; ++p) {
    pool[p].join();
    digest += sums[p];
  }
  return digest;
}

TEST(ExpTest, EqualsTheGpuOnEveryNegativeFloat) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Digest(kMinusInfinity, ScalarExp()) + Hash(kMinusInfinity, Exp(-infinity)), kDigest);
}

TEST(ExpTest, VectorFormEqualsTheGpuOnEveryNegativeFloat) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  float y[kVector];
  Avx2Exp<avx2::Results::kAll>()(static_cast<std::uint32_t>(kMinusInfinity) - (kVector - 1), y);
  EXPECT_EQ(Digest(kMinusInfinity, Avx2Exp<avx2::Results::kAll>()) + Hash(kMinusInfinity, y[kVector - 1]),
            kDigest);
}

TEST(ExpTest, VectorFormForNormalResultsIsTheSame) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  const std::uint64_t first = std::bit_cast<std::uint32_t>(2 * kExpOneAbove);
  const std::uint64_t last = std::bit_cast<std::uint32_t>(-87.0f);
  for (std::uint64_t b = kFirstNegative; b < last; b += b < first ? 1 << 16 : kVector) {
    float got[kVector], want[kVector];
    Avx2Exp<avx2::Results::kNormal>()(static_cast<std::uint32_t>(b), got);
    Avx2Exp<avx2::Results::kAll>()(static_cast<std::uint32_t>(b), want);
    ASSERT_EQ(std::memcmp(got, want, sizeof(got)), 0) << std::hex << b;
  }
}

TEST(ExpTest, ScaledResultsAreTheResultsScaled) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  const auto unscaled = [](std::uint32_t first, float* out) {
    Avx2Exp<avx2::Results::kScaled>()(first, out);
    for (int i = 0; i < kVector; ++i) out[i] /= avx2::kScale;
  };
  // Every float whose result is 0, subnormal or near it, and some others.
  const std::uint64_t first = std::bit_cast<std::uint32_t>(-80.0f);
  const std::uint64_t last = std::bit_cast<std::uint32_t>(-128.0f);
  for (std::uint64_t b = kFirstNegative; b < last; b += b < first ? 1 << 16 : kVector) {
    float got[kVector], want[kVector];
    unscaled(static_cast<std::uint32_t>(b), got);
    Avx2Exp<avx2::Results::kAll>()(static_cast<std::uint32_t>(b), want);
    ASSERT_EQ(std::memcmp(got, want, sizeof(got)), 0) << std::hex << b;
  }
}

// The squarer by its definition, row by row.
std::uint32_t SquareByRows(std::uint32_t x) {
  std::uint32_t sum = 0;
  for (int i = 10; i < 17; ++i) {
    if ((x >> i & 1) == 0) continue;
    sum += 1u << (2 * i - 19);
    for (int j = 18 - i; j < i; ++j) sum += (x >> j & 1) << (i + j - 18);
  }
  return sum;
}

TEST(ExpTest, SquarerDropsTheLowColumns) {
  for (std::uint32_t x = 0; x < 1u << 17; ++x) ASSERT_EQ(Ex2Square(x), SquareByRows(x)) << x;
}

TEST(ExpTest, SquarerOfSixteenLanesIsTheSame) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  for (std::uint32_t x = 0; x < 1u << 17; ++x) {
    const __m256i square = avx2::Ex2Square16(_mm256_set1_epi16(static_cast<short>(x >> 1)));
    ASSERT_EQ(static_cast<std::uint32_t>(_mm256_extract_epi16(square, 5)) & 0xffff, Ex2Square(x)) << x;
  }
}

TEST(ExpTest, EndsOfTheRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(0.0f)), 0x3f800000u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(-0.0f)), 0x3f800000u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(-std::numeric_limits<float>::denorm_min())), 0x3f800000u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(-infinity)), 0u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(kExpZeroBelow)), 0u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(Exp(-103.9f)), 1u);
  const float nan = Exp(std::numeric_limits<float>::quiet_NaN());
  EXPECT_NE(nan, nan);
}

}  // namespace
}  // namespace kvsummary
