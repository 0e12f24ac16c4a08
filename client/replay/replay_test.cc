#include "client/replay/replay.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

// 3 requests of 10 rows and 100 requests of 1,030.
std::vector<TraceRequest> Trace() {
  std::vector<TraceRequest> trace(3, {0, 8, 3, {0}});
  trace.resize(103, {0, 1024, 7, {0, 1}});
  return trace;
}

absl::StatusOr<EngineOptions> Options(std::vector<std::string> arguments) {
  const std::vector<Command> commands = {{"replay", "", "", ReplayFlags(), RunReplay}};
  arguments.insert(arguments.begin(), {"replay", "--trace=t"});
  const auto invocation = ParseCommandLine(commands, arguments);
  if (!invocation.ok()) return invocation.status();
  return ReplayOptions(*invocation, Trace());
}

TEST(ReplayOptionsTest, HaveDefaults) {
  const auto options = Options({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->geometry.layers, 1);
  EXPECT_EQ(options->geometry.block_size, 64);
  EXPECT_EQ(options->geometry.block_stride, 2048);
  EXPECT_EQ(options->geometry.blocks, 1 + 3 + 100 * 17) << "no more than the requests can fill";
  EXPECT_EQ(options->geometry.k, 0);
  EXPECT_EQ(options->geometry.capacity, 8);
  EXPECT_EQ(options->geometry.ring_blocks, 65);
  EXPECT_EQ(options->concurrency, 64);
  EXPECT_EQ(options->sampled_requests, 8);
}

TEST(ReplayOptionsTest, SizesTheCache) {
  EXPECT_EQ(Options({"--cache-bytes=1MiB"})->geometry.blocks, 512);
  EXPECT_EQ(Options({"--cache-bytes=1MiB", "--layers=2"})->geometry.blocks, 256);
  EXPECT_EQ(Options({"--blocks=9999"})->geometry.blocks, 9999);
}

TEST(ReplayOptionsTest, RingsHoldTheDrafts) {
  const auto options = Options({"--k=3"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->geometry.k, 3);
  EXPECT_EQ(options->geometry.capacity, 10);
  EXPECT_EQ(Options({"--k=1"})->geometry.capacity, 8);
}

TEST(ReplayOptionsTest, SamplesNoMoreThanThereIs) {
  EXPECT_EQ(Options({"--sample=0"})->sampled_requests, 0);
  EXPECT_EQ(Options({"--sample=1000"})->sampled_requests, 103);
}

TEST(ReplayOptionsTest, BadOnesAreNamed) {
  const auto error = [](const std::vector<std::string>& arguments) {
    const auto options = Options(arguments);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << arguments[0];
    return std::string(options.status().message());
  };
  EXPECT_THAT(error({"--requests=-1"}), HasSubstr("--requests=-1"));
  EXPECT_THAT(error({"--k=-1"}), HasSubstr("--k=-1"));
  EXPECT_THAT(error({"--layers=0"}), HasSubstr("--layers=0"));
  EXPECT_THAT(error({"--concurrency=0"}), HasSubstr("--concurrency=0"));
  EXPECT_THAT(error({"--block-size=0"}), HasSubstr("--block-size=0"));
  EXPECT_THAT(error({"--block-size=96"}), HasSubstr("block size is 96"));
  EXPECT_THAT(error({"--cache-bytes=1KiB"}), HasSubstr("--cache-bytes=1KiB"));
  EXPECT_THAT(error({"--blocks=1"}), HasSubstr("--blocks=1"));
  EXPECT_THAT(error({"--engines=0"}), HasSubstr("--engines=0"));
  EXPECT_THAT(error({"--restart-engine-every=-1"}), HasSubstr("--restart-engine-every=-1"));
  EXPECT_THAT(error({"--publish-output"}), HasSubstr("without --prefix"));
  EXPECT_THAT(error({"--cache-bytes=8KiB"}), HasSubstr("request 3 needs 17 blocks"));
}

}  // namespace
}  // namespace kvsummary
