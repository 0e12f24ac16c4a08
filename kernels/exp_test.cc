#include "kernels/exp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "kernels/exp_avx2_testing.h"

namespace kvsummary {
namespace {

using avx2::kVector;

constexpr std::uint64_t kFirstNegative = 0x80000000;  // -0
constexpr std::uint64_t kMinusInfinity = 0xff800000;
constexpr std::uint64_t kDigest = 0x42590d1b86aeea08;  // of the GPU's expf

bool HaveAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

void ScalarExp(std::uint32_t first, float* out) {
  for (int i = 0; i < kVector; ++i) out[i] = Exp(std::bit_cast<float>(first + i));
}

std::uint64_t Hash(std::uint64_t bits, float y) {
  std::uint64_t x =
      bits * 0x9E3779B97F4A7C15 ^ (std::uint64_t{std::bit_cast<std::uint32_t>(y)} * 0xC2B2AE3D27D4EB4F);
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9;
  x ^= x >> 32;
  return x;
}

// Digest of every float with bits from kFirstNegative to `last`, a multiple of kVector.
std::uint64_t Digest(std::uint64_t last, void (*exp)(std::uint32_t first, float* out)) {
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

// With sanitizers 2^31 calls take minutes and show nothing that the other tests' do not.
bool Sanitized() { return std::getenv("SANITIZED") != nullptr; }

TEST(ExpTest, EqualsTheGpuOnEveryNegativeFloat) {
  if (Sanitized()) GTEST_SKIP() << "every float: by the plain build";
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Digest(kMinusInfinity, ScalarExp) + Hash(kMinusInfinity, Exp(-infinity)), kDigest);
}

TEST(ExpTest, VectorFormEqualsTheGpuOnEveryNegativeFloat) {
  if (Sanitized()) GTEST_SKIP() << "every float: by the plain build";
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  float y[kVector];
  avx2::AllExp(static_cast<std::uint32_t>(kMinusInfinity) - (kVector - 1), y);
  EXPECT_EQ(Digest(kMinusInfinity, avx2::AllExp) + Hash(kMinusInfinity, y[kVector - 1]), kDigest);
}

TEST(ExpTest, VectorFormForNormalResultsIsTheSame) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  const std::uint64_t first = std::bit_cast<std::uint32_t>(2 * kExpOneAbove);
  const std::uint64_t last = std::bit_cast<std::uint32_t>(-87.0f);
  for (std::uint64_t b = kFirstNegative; b < last; b += b < first ? 1 << 16 : kVector) {
    float got[kVector], want[kVector];
    avx2::NormalExp(static_cast<std::uint32_t>(b), got);
    avx2::AllExp(static_cast<std::uint32_t>(b), want);
    ASSERT_EQ(std::memcmp(got, want, sizeof(got)), 0) << std::hex << b;
  }
}

TEST(ExpTest, ScaledResultsAreTheResultsScaled) {
  if (!HaveAvx2()) GTEST_SKIP() << "no AVX2";
  // Every float whose result is 0, subnormal or near it, and some others.
  const std::uint64_t first = std::bit_cast<std::uint32_t>(-80.0f);
  const std::uint64_t last = std::bit_cast<std::uint32_t>(-128.0f);
  for (std::uint64_t b = kFirstNegative; b < last; b += b < first ? 1 << 16 : kVector) {
    float got[kVector], want[kVector];
    avx2::ScaledExp(static_cast<std::uint32_t>(b), got);
    avx2::AllExp(static_cast<std::uint32_t>(b), want);
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
    ASSERT_EQ(avx2::Square(x), Ex2Square(x)) << x;
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
