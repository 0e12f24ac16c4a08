#include "client/replay/reference.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using Region = std::array<std::uint16_t, kRegionElements>;

std::uint16_t Bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

Region Uniform(float key, float z) {
  Region region;
  for (std::size_t i = 0; i < region.size(); ++i) {
    region[i] = Bf16(i % kRowElements < kChannels ? key : z);
  }
  return region;
}

std::uint16_t& Z(Region& region, int row, int channel) {
  return region[static_cast<std::size_t>(row * kRowElements + kChannels + channel)];
}

double E4m3Value(int code) {
  const int exponent = code >> 3 & 15;
  const double fraction = (code & 7) / 8.0;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(ReferenceTest, EqualWeightsGiveTheMeanOfKeys) {
  Region region = Uniform(0, 3);
  for (int row = 0; row < kRegionTokens; ++row) {
    for (int c = 0; c < kChannels; ++c) {
      region[static_cast<std::size_t>(row * kRowElements + c)] = Bf16(static_cast<float>(row + 1));
    }
  }
  for (const std::uint8_t byte : ReferenceSummary(region)) EXPECT_EQ(byte, 0x49);  // 4.5
}

TEST(ReferenceTest, ADominantRowGivesItsKey) {
  Region region = Uniform(1, 0);
  for (int c = 0; c < kChannels; ++c) {
    region[static_cast<std::size_t>(5 * kRowElements + c)] = Bf16(-3);
    Z(region, 5, c) = Bf16(100);
  }
  for (const std::uint8_t byte : ReferenceSummary(region)) EXPECT_EQ(byte, 0xc4);  // -3
}

TEST(ReferenceTest, OneNanInZSpoilsEveryChannel) {
  for (const float sign : {1.0F, -1.0F}) {
    Region region = Uniform(1, 0);
    Z(region, 2, 9) = Bf16(std::copysign(std::numeric_limits<float>::quiet_NaN(), sign));
    for (const std::uint8_t byte : ReferenceSummary(region)) EXPECT_EQ(byte, 0x7f);
  }
}

TEST(ReferenceTest, OneNanInAKeySpoilsItsChannel) {
  Region region = Uniform(1, 0);
  region[9] = 0x7fc0;
  const auto summary = ReferenceSummary(region);
  for (std::size_t c = 0; c < kChannels; ++c) EXPECT_EQ(summary[c], c == 9 ? 0x7f : 0x38);
}

TEST(ReferenceTest, InfiniteZGivesNanThereAndZeroElsewhere) {
  Region region = Uniform(1, 0);
  Z(region, 2, 9) = Bf16(std::numeric_limits<float>::infinity());
  const auto summary = ReferenceSummary(region);
  for (std::size_t c = 0; c < kChannels; ++c) {
    if (c == 9) {
      EXPECT_EQ(summary[c], 0x7f);
    } else {
      EXPECT_EQ(summary[c] & 0x7f, 0);
    }
  }
}

TEST(ReferenceTest, UnderflownWeightsGiveZero) {
  Region region = Uniform(1, -200);
  Z(region, 7, 9) = Bf16(0);
  const auto summary = ReferenceSummary(region);
  for (std::size_t c = 0; c < kChannels; ++c) EXPECT_EQ(summary[c], c == 9 ? 0x38 : 0);
}

// Every bf16 value goes to the nearest code, of two equally near ones to the even one.
TEST(ReferenceTest, E4m3IsTheNearest) {
  for (std::uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const double value = std::bit_cast<float>(bits << 16);
    const int code = ReferenceE4m3(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      ASSERT_EQ(code, 0x7f);
      continue;
    }
    ASSERT_EQ(code & 0x80, std::signbit(value) ? 0x80 : 0) << bits;
    if (std::fabs(value) >= 448) {
      ASSERT_EQ(code & 0x7f, 0x7e);
      continue;
    }
    const double error = std::fabs(E4m3Value(code) - value);
    for (const int other : {code - 1, code + 1}) {
      if ((other & 0x80) != (code & 0x80) || (other & 0x7f) == 0x7f || other < 0) continue;
      const double other_error = std::fabs(E4m3Value(other) - value);
      ASSERT_TRUE(error < other_error || (error == other_error && (code & 1) == 0)) << bits;
    }
  }
}

}  // namespace
}  // namespace kvsummary
