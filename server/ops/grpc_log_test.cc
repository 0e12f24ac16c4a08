#include "server/ops/grpc_log.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

TEST(LogLimitTest, SomeLinesAMinuteAndTheCountOfTheRest) {
  LogLimit limit;
  const LogLimit::Time start = LogLimit::Time() + std::chrono::hours(1);
  for (int i = 0; i < LogLimit::kBurst; ++i) EXPECT_EQ(limit.Take(start), 0);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(limit.Take(start + std::chrono::seconds(59)), std::nullopt);
  EXPECT_EQ(limit.Take(start + std::chrono::seconds(60)), 7);
  EXPECT_EQ(limit.Take(start + std::chrono::seconds(61)), 0);
}

}  // namespace
}  // namespace kvsummary
