#include "client/table.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

TEST(TableTest, ThousandsAreGrouped) {
  EXPECT_EQ(Grouped(0), "0");
  EXPECT_EQ(Grouped(999), "999");
  EXPECT_EQ(Grouped(1000), "1,000");
  EXPECT_EQ(Grouped(1234567), "1,234,567");
}

TEST(TableTest, LinesAreAligned) {
  EXPECT_EQ(TableLine("name", 1000), "  name                                       1,000\n");
  EXPECT_EQ(TableLine("name", "x").size(), TableLine("", "12345678901234567890").size());
}

TEST(TableTest, APercentileIsOneOfTheValues) {
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({7}, 0.99), 7);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({3, 1, 2}, 1), 3);
}

TEST(TableTest, NoCallsNoLatency) {
  EXPECT_EQ(LatencyLine("call", {}), "");
  EXPECT_NE(LatencyLine("call", {1500, 1500}).find("1,500 / 1,500  (2 calls)"), std::string::npos);
}

}  // namespace
}  // namespace kvsummary
