#include "kernels/summary_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace kvsummary {
namespace {

// The value of an e4m3fn code, from the definition.
double E4m3Value(int code) {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(1.0 + fraction / 8.0, exponent - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest of all finite codes of x's sign; of two equally near ones the even one.
int NearestE4m3(double x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  int best = sign;
  for (int code = sign; code <= (sign | 0x7e); ++code) {
    const double distance = std::fabs(E4m3Value(code) - x);
    const double least = std::fabs(E4m3Value(best) - x);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return best;
}

TEST(Bf16ToE4m3Test, IsTheNearestCodeForEveryInput) {
  for (int x = 0; x < 0x10000; ++x) {
    const float value = WidenBf16(static_cast<std::uint16_t>(x));
    const int want = std::isnan(value)   ? 0x7f
                     : std::isinf(value) ? (value < 0 ? 0xfe : 0x7e)
                                         : NearestE4m3(value);
    ASSERT_EQ(Bf16ToE4m3(static_cast<std::uint16_t>(x)), want) << std::hex << x;
  }
}

TEST(RoundToBf16Test, KeepsEveryBf16) {
  for (int x = 0; x < 0x10000; ++x) {
    const auto bits = static_cast<std::uint16_t>(x);
    const float value = WidenBf16(bits);
    ASSERT_EQ(RoundToBf16(value), std::isnan(value) ? 0x7fff : bits);
  }
}

TEST(RoundToBf16Test, RoundsToNearestEven) {
  for (std::uint32_t x = 0; x < 0x7f80; ++x) {  // between each finite value and the next one
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const std::uint32_t low = (sign | x) << 16;
      const std::uint32_t next = sign | (x + 1);
      ASSERT_EQ(RoundToBf16(std::bit_cast<float>(low | 1)), sign | x);
      ASSERT_EQ(RoundToBf16(std::bit_cast<float>(low | 0x7fff)), sign | x);
      ASSERT_EQ(RoundToBf16(std::bit_cast<float>(low | 0x8000)), x % 2 == 0 ? sign | x : next);
      ASSERT_EQ(RoundToBf16(std::bit_cast<float>(low | 0x8001)), next);
      ASSERT_EQ(RoundToBf16(std::bit_cast<float>(low | 0xffff)), next);
    }
  }
}

TEST(RoundToBf16Test, NanKeepsNoPayload) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_EQ(RoundToBf16(std::bit_cast<float>(bits)), 0x7fff);
  }
}

TEST(NanMaxTest, NanWins) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(NanMax(1, 2), 2);
  EXPECT_EQ(NanMax(2, 1), 2);
  EXPECT_TRUE(std::isnan(NanMax(nan, 1)));
  EXPECT_TRUE(std::isnan(NanMax(1, nan)));
}

// A region of eight rows of z and key, each set by channel.
class RegionTest : public testing::Test {
 protected:
  RegionTest() : data_(kRegionTokens * kRowElements) {
    for (int t = 0; t < kRegionTokens; ++t) {
      for (int c = 0; c < kChannels; ++c) Set(t, c, 0.0f, 1.0f);
    }
  }
  void Set(int t, int c, float z, float key) {
    data_[t * kRowElements + c] = RoundToBf16(key);
    data_[t * kRowElements + kChannels + c] = RoundToBf16(z);
  }
  std::vector<std::uint8_t> Close() const {
    RegionRows rows;
    for (int t = 0; t < kRegionTokens; ++t) {
      rows.key[t] = &data_[t * kRowElements];
      rows.z[t] = rows.key[t] + kChannels;
    }
    std::vector<std::uint8_t> out(kSummaryBytes);
    CloseRegionScalar(rows, out.data());
    return out;
  }

  std::vector<std::uint16_t> data_;
};

constexpr std::uint8_t kOne = 0x38;

TEST_F(RegionTest, EqualWeightsGiveTheMean) {
  EXPECT_EQ(Close(), std::vector<std::uint8_t>(kSummaryBytes, kOne));
}

TEST_F(RegionTest, OneNanInZSpoilsTheRegion) {
  Set(5, 77, std::numeric_limits<float>::quiet_NaN(), 1.0f);
  EXPECT_EQ(Close(), std::vector<std::uint8_t>(kSummaryBytes, 0x7f));
}

TEST_F(RegionTest, OneNanInKeySpoilsItsChannel) {
  Set(5, 77, 0.0f, std::numeric_limits<float>::quiet_NaN());
  std::vector<std::uint8_t> want(kSummaryBytes, kOne);
  want[77] = 0x7f;
  EXPECT_EQ(Close(), want);
}

TEST_F(RegionTest, InfiniteZSpoilsItsChannelAndClearsTheOthers) {
  Set(7, 77, std::numeric_limits<float>::infinity(), 1.0f);
  std::vector<std::uint8_t> want(kSummaryBytes, 0);
  want[77] = 0x7f;
  EXPECT_EQ(Close(), want);
}

TEST_F(RegionTest, UnderflowingWeightsGiveZero) {
  for (int t = 0; t < kRegionTokens; ++t) Set(t, 3, 200.0f, 1.0f);
  std::vector<std::uint8_t> want(kSummaryBytes, 0);
  want[3] = kOne;
  EXPECT_EQ(Close(), want);
}

TEST_F(RegionTest, LargeKeysSaturate) {
  for (int t = 0; t < kRegionTokens; ++t) Set(t, 3, 0.0f, -1e6f);
  std::vector<std::uint8_t> want(kSummaryBytes, kOne);
  want[3] = 0xfe;
  EXPECT_EQ(Close(), want);
}

}  // namespace
}  // namespace kvsummary
