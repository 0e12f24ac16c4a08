#include "client/units.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace kvsummary {
namespace {

TEST(ParseBytes, TakesPlainBytesAndUnits) {
  EXPECT_EQ(*ParseBytes("0"), 0);
  EXPECT_EQ(*ParseBytes("4096"), 4096);
  EXPECT_EQ(*ParseBytes("4096B"), 4096);
  EXPECT_EQ(*ParseBytes("64KiB"), 65536);
  EXPECT_EQ(*ParseBytes("64 kib"), 65536);
  EXPECT_EQ(*ParseBytes("3MiB"), 3 << 20);
  EXPECT_EQ(*ParseBytes("8GiB"), std::int64_t{8} << 30);
  EXPECT_EQ(*ParseBytes("2TiB"), std::int64_t{2} << 40);
  EXPECT_EQ(*ParseBytes("10KB"), 10'000);
  EXPECT_EQ(*ParseBytes("10MB"), 10'000'000);
  EXPECT_EQ(*ParseBytes("10GB"), 10'000'000'000);
  EXPECT_EQ(*ParseBytes("10TB"), 10'000'000'000'000);
}

TEST(ParseBytes, RefusesWhatIsNoSizeAndQuotesIt) {
  for (const char* text : {"", "GiB", "-1", "1.5GiB", "8G i B", "8XiB", "0x10", " 8", "8GiB8"}) {
    const auto bytes = ParseBytes(text);
    EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(bytes.status().message()).find('"' + std::string(text) + '"'), std::string::npos);
  }
}

TEST(ParseBytes, RefusesOverflow) {
  EXPECT_EQ(*ParseBytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_FALSE(ParseBytes("9223372036854775808").ok());
  EXPECT_FALSE(ParseBytes("8388608TiB").ok());
  EXPECT_TRUE(ParseBytes("8388607TiB").ok());
}

TEST(FormatBytes, TakesTheLargestUnitThatFits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(std::int64_t{8} << 30), "8.0 GiB");
  EXPECT_EQ(FormatBytes(std::int64_t{3000} << 40), "3000.0 TiB");
}

}  // namespace
}  // namespace kvsummary
