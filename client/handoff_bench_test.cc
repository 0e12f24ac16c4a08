#include "client/handoff_bench.h"

#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

HandoffBenchReport Report() {
  HandoffBenchReport report;
  report.requests = 4;
  report.request_bytes = 1'000'000;
  report.transport = HandoffTransport::kSameHost;
  report.offer_seconds = {0.004, 0.002, 0.001};
  report.accept_seconds = {0.002, 0.001, 0.004};
  report.offer_us = {100, 300};
  report.accept_us = {200, 400};
  report.end_to_end_us = {300, 700};
  report.device_ns = {50'000, 50'000};
  report.raw = {{"memcpy", {0.001, 0.001, 0.5}}};
  report.missing = {"UCX's own rate: no"};
  return report;
}

TEST(HandoffBenchReportTest, RatesAreMediansOfRounds) {
  const HandoffBenchOptions options{.from = "unix:a", .to = "unix:b", .layers = 23, .concurrency = 2};
  const auto json = nlohmann::json::parse(FormatJson(Report(), options));
  EXPECT_EQ(json["transport"], "same host");
  EXPECT_DOUBLE_EQ(json["offer_gb_per_second"], 1) << "2 MB in 2 ms";
  EXPECT_DOUBLE_EQ(json["accept_gb_per_second"], 1);
  EXPECT_DOUBLE_EQ(json["end_to_end_gb_per_second"], 0.4) << "2 MB in 5 ms";
  EXPECT_DOUBLE_EQ(json["device_gb_per_second"], 20) << "of each request";
  EXPECT_EQ(json["raw"][0]["name"], "memcpy");
  EXPECT_DOUBLE_EQ(json["raw"][0]["gb_per_second"], 2);
  EXPECT_DOUBLE_EQ(json["raw"][0]["accept_ratio"], 0.5);
  EXPECT_EQ(json["end_to_end"]["p50_us"], 300);
  EXPECT_EQ(json["not_measured"][0], "UCX's own rate: no");
}

TEST(HandoffBenchReportTest, ATableTellsTheSame) {
  const HandoffBenchOptions options{.from = "unix:a", .to = "unix:b", .layers = 23, .concurrency = 2};
  const std::string table = FormatTable(Report(), options);
  EXPECT_THAT(table, HasSubstr("same host"));
  EXPECT_THAT(table, HasSubstr("memcpy, GB/s"));
  EXPECT_THAT(table, HasSubstr("not measured: UCX's own rate: no"));
  EXPECT_THAT(table, HasSubstr("0.500"));
  EXPECT_THAT(table, HasSubstr("300 / 300  (2 calls)"));
}

TEST(HandoffBenchReportTest, OfNothingThereAreNoRates) {
  EXPECT_THAT(FormatTable({}, {}), HasSubstr("0.000"));
  EXPECT_FALSE(nlohmann::json::parse(FormatJson({}, {})).is_discarded());
}

}  // namespace
}  // namespace kvsummary
