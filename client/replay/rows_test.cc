#include "client/replay/rows.h"

#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using Row = std::array<std::uint16_t, kRowElements>;

Row Make(std::uint64_t seed, RowKey key, std::int32_t layer) {
  Row row;
  FillRow(seed, key, layer, row.data());
  return row;
}

float Value(std::uint16_t bf16) { return std::bit_cast<float>(std::uint32_t{bf16} << 16); }

const TraceRequest kA{0, 600, 10, {5, 6}};
const TraceRequest kB{0, 700, 10, {5, 7}};

TEST(RowsTest, AreAFunctionOfSeedKeyAndLayer) {
  const RowKey key = TokenRow(kA, 0, 3);
  EXPECT_EQ(Make(1, key, 2), Make(1, key, 2));
  EXPECT_NE(Make(1, key, 2), Make(2, key, 2));
  EXPECT_NE(Make(1, key, 2), Make(1, key, 3));
  EXPECT_NE(Make(1, key, 2), Make(1, TokenRow(kA, 0, 4), 2));
}

// Values recorded once: two builds, or two machines, must agree on them.
TEST(RowsTest, AreTheSameEverywhere) {
  const Row row = Make(1, TokenRow(kA, 0, 3), 2);
  std::uint64_t digest = 0;
  for (const std::uint16_t value : row) digest = MixBits(digest, value, 0, 0);
  EXPECT_EQ(digest, 7579249702575582275U);
}

TEST(RowsTest, EqualPrefixesGiveEqualRows) {
  EXPECT_EQ(TokenRow(kA, 0, 511), TokenRow(kB, 1, 511));
  EXPECT_FALSE(TokenRow(kA, 0, 512) == TokenRow(kB, 1, 512));
}

TEST(RowsTest, OutputsAndDraftsAreARequestsOwn) {
  EXPECT_FALSE(TokenRow(kA, 0, 600) == TokenRow(kA, 1, 600));
  EXPECT_FALSE(TokenRow(kA, 0, 600) == TokenRow(kA, 0, 601));
  EXPECT_FALSE(WrongDraftRow(0, 600, 0) == TokenRow(kA, 0, 600));
  EXPECT_FALSE(WrongDraftRow(0, 600, 0) == WrongDraftRow(0, 600, 1));
  EXPECT_FALSE(WrongDraftRow(0, 600, 0) == WrongDraftRow(0, 601, 0));
}

TEST(RowsTest, ValuesAreFiniteAndDiverse) {
  std::set<std::uint16_t> keys;
  std::set<float> row_maxima;
  int negative = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const Row row = Make(1, {4, i}, 0);
    float row_max = -INFINITY;
    for (int c = 0; c < kChannels; ++c) {
      const float key = Value(row[static_cast<std::size_t>(c)]);
      const float z = Value(row[static_cast<std::size_t>(kChannels + c)]);
      ASSERT_LT(std::fabs(key), 4);
      ASSERT_LT(std::fabs(z), 128);
      keys.insert(row[static_cast<std::size_t>(c)]);
      row_max = std::max(row_max, z);
      negative += z < 0 ? 1 : 0;
    }
    row_maxima.insert(row_max);
  }
  EXPECT_EQ(keys.size(), 1024U) << "both signs, four exponents, 128 fractions";
  EXPECT_GT(row_maxima.size(), 20U);
  EXPECT_NEAR(negative, 200 * kChannels / 2, 1000);
}

}  // namespace
}  // namespace kvsummary
