#include "client/replay/replay.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

TEST(ReplayFlagsTest, HaveDefaults) {
  const auto options = ParseReplayFlags({"--trace=t.jsonl"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->trace, "t.jsonl");
  EXPECT_EQ(options->requests, 0);
  EXPECT_EQ(options->block_size, 64);
  EXPECT_EQ(options->k, 0);
  EXPECT_FALSE(options->json);
}

TEST(ReplayFlagsTest, TakeBothForms) {
  const auto options = ParseReplayFlags({"--trace", "t", "--requests=5", "--layers", "23", "--json", "--k=3",
                                         "--cache-bytes=8GiB", "--seed=18446744073709551615"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->requests, 5);
  EXPECT_EQ(options->layers, 23);
  EXPECT_EQ(options->k, 3);
  EXPECT_EQ(options->cache_bytes, std::int64_t{8} << 30);
  EXPECT_EQ(options->seed, 18446744073709551615U);
  EXPECT_TRUE(options->json);
}

TEST(ReplayFlagsTest, BadOnesAreNamed) {
  const auto error = [](const std::vector<std::string>& args) {
    const auto options = ParseReplayFlags(args);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(options.status().message());
  };
  EXPECT_THAT(error({}), HasSubstr("--trace"));
  EXPECT_THAT(error({"--trace=t", "--requests=0"}), HasSubstr("--requests is '0'"));
  EXPECT_THAT(error({"--trace=t", "--k=3x"}), HasSubstr("--k is '3x'"));
  EXPECT_THAT(error({"--trace=t", "--layers=99999999999"}), HasSubstr("--layers is '99999999999'"));
  EXPECT_THAT(error({"--trace=t", "--cache-bytes=much"}), HasSubstr("--cache-bytes"));
  EXPECT_THAT(error({"--trace=t", "--speed=9"}), HasSubstr("no flag --speed"));
  EXPECT_THAT(error({"--trace=t", "--layers"}), HasSubstr("--layers has no value"));
  EXPECT_THAT(error({"--trace=t", "x"}), HasSubstr("'x'"));
}

}  // namespace
}  // namespace kvsummary
