// The vector form of a region against the plain one, where they could part: weights, sums and keys at both
// ends of the number range, zeros of either sign, maxima that rise far.
#include "kernels/update_avx2.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace kvsummary {
namespace {

class RegionAvx2Test : public testing::Test {
 protected:
  void SetUp() override {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP() << "no AVX2";
  }

  // z and key give the value of (row, channel).
  template <class Z, class Key>
  void ExpectEqual(int regions, Z z, Key key) {
    std::vector<std::uint16_t> data(kRegionTokens * kRowElements);
    RegionRows rows;
    for (int t = 0; t < kRegionTokens; ++t) {
      rows.key[t] = &data[t * kRowElements];
      rows.z[t] = rows.key[t] + kChannels;
    }
    for (int i = 0; i < regions; ++i) {
      for (int t = 0; t < kRegionTokens; ++t) {
        for (int c = 0; c < kChannels; ++c) {
          data[t * kRowElements + c] = key(t, c);
          data[t * kRowElements + kChannels + c] = RoundToBf16(z(t, c));
        }
      }
      std::vector<std::uint8_t> want(kSummaryBytes), got(kSummaryBytes);
      CloseRegionScalar(rows, want.data());
      CloseRegionAvx2(rows, got.data());
      ASSERT_EQ(got, want) << "region " << i;
    }
  }

  float Normal() { return normal_(random_); }
  std::uint16_t KeyOfExponents(int low, int high) {
    const int exponent = low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1));
    return static_cast<std::uint16_t>((random_() & 0x807f) | (127 + exponent) << 7);
  }

  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
};

TEST_F(RegionAvx2Test, OrdinaryRegions) {
  for (const float spread : {0.25f, 3.0f, 12.0f, 30.0f, 120.0f, 300.0f}) {
    ExpectEqual(
        800, [&](int, int) { return spread * Normal(); }, [&](int, int) { return RoundToBf16(Normal()); });
  }
}

TEST_F(RegionAvx2Test, KeysOfEveryMagnitude) {
  for (const float spread : {1.0f, 30.0f}) {
    for (const auto& [low, high] : {std::pair{-127, -90},
                                    {-127, 57},
                                    {-20, 58},
                                    {50, 58},
                                    {50, 59},
                                    {58, 60},
                                    {100, 127},
                                    {-127, 127}}) {
      ExpectEqual(
          200, [&](int, int) { return spread * Normal(); },
          [&, low = low, high = high](int, int) { return KeyOfExponents(low, high); });
    }
  }
}

// Weights and sums all near the smallest numbers: channel 0 lifts M far above the others.
TEST_F(RegionAvx2Test, SumsOfSubnormalNumbers) {
  for (const float depth : {80.0f, 88.0f, 95.0f, 102.0f, 104.0f}) {
    for (const auto& [low, high] : {std::pair{-127, 0}, {-2, 2}, {0, 58}}) {
      ExpectEqual(
          200, [&](int, int c) { return c == 0 ? depth : 2 * Normal(); },
          [&, low = low, high = high](int, int) { return KeyOfExponents(low, high); });
    }
  }
}

// M rises by up to 150 from row to row, so that the rescaling is subnormal or nothing, den falls to 0 and
// num does not always.
TEST_F(RegionAvx2Test, MaximaThatRise) {
  for (const float rise : {5.0f, 30.0f, 88.0f, 95.0f, 103.0f, 150.0f}) {
    for (const auto& [low, high] : {std::pair{-2, 2}, {0, 58}, {-127, 58}}) {
      std::vector<float> offset(kRegionTokens);
      ExpectEqual(
          200,
          [&](int t, int c) {
            if (c == 0) offset[t] = (t > 0 ? offset[t - 1] : 0) + (random_() % 3 == 0 ? rise : 0);
            return offset[t] + Normal() * (random_() % 4 == 0 ? 40 : 1);
          },
          [&, low = low, high = high](int, int) { return KeyOfExponents(low, high); });
    }
  }
}

TEST_F(RegionAvx2Test, ZerosOfEitherSign) {
  ExpectEqual(
      400, [&](int, int) { return 60 * Normal(); },
      [&](int, int) { return static_cast<std::uint16_t>(random_() % 3 == 0 ? 0x3f80 : random_() & 0x8000); });
}

TEST_F(RegionAvx2Test, AnyBitsAtAll) {
  const float infinity = std::numeric_limits<float>::infinity();
  ExpectEqual(
      400, [&](int, int) { return WidenBf16(static_cast<std::uint16_t>(random_())); },
      [&](int, int) { return static_cast<std::uint16_t>(random_()); });
  for (const float special : {infinity, -infinity, 3e38f, -3e38f}) {
    ExpectEqual(
        400, [&](int, int) { return random_() % 1000 == 0 ? special : Normal(); },
        [&](int, int) { return random_() % 500 == 0 ? KeyOfExponents(-127, 128) : RoundToBf16(Normal()); });
  }
}

TEST_F(RegionAvx2Test, RowsOfMinusInfinity) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (unsigned mask = 0; mask < 256; ++mask) {
    ExpectEqual(
        1, [&](int t, int) { return mask >> t & 1 ? -infinity : 0.1f * Normal(); },
        [&](int, int) { return RoundToBf16(Normal()); });
  }
}

}  // namespace
}  // namespace kvsummary
