#include "client/replay/replay.h"

#include <string>
#include <vector>

#include "client/replay/run_disaggregate.h"
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

absl::StatusOr<DisaggregateOptions> Disaggregated(std::vector<std::string> arguments) {
  const std::vector<Command> commands = {{"replay", "", "", ReplayFlags(), RunReplay}};
  arguments.insert(arguments.begin(), {"replay", "--trace=t", "--disaggregate"});
  const auto invocation = ParseCommandLine(commands, arguments);
  if (!invocation.ok()) return invocation.status();
  return MakeDisaggregateOptions(*invocation, Trace());
}

TEST(DisaggregateOptionsTest, TheTwoCachesDifferInAllThatMay) {
  const auto options = Disaggregated({"--concurrency=4", "--layers=2", "--k=3"});
  ASSERT_TRUE(options.ok()) << options.status();
  const CacheGeometry& a = options->prefill;
  const CacheGeometry& b = options->decode;
  EXPECT_EQ(a.block_size, 64);
  EXPECT_EQ(b.block_size, 16);
  EXPECT_EQ(a.layers, b.layers);
  EXPECT_EQ(a.block_stride, a.dense_block_stride());
  EXPECT_GT(b.block_stride, b.dense_block_stride());
  EXPECT_EQ(a.capacity, 12) << "every resume position from n - 2 to n";
  EXPECT_NE(a.capacity, b.capacity);
  EXPECT_NE(b.rows_per_layer, b.capacity);
  EXPECT_EQ(options->concurrency, 4);
  EXPECT_EQ(a.ring_blocks, 5);
  EXPECT_EQ(b.ring_blocks, 9);
  EXPECT_EQ(a.blocks, 1 + 4 * 16) << "the longest prompt has 1024 tokens";
  EXPECT_EQ(b.blocks, 1 + 8 * 65) << "the longest request has 1030";
  EXPECT_EQ(Disaggregated({"--block-size=16"})->decode.block_size, 64);
}

TEST(DisaggregateOptionsTest, NoMoreRequestsAtATimeThanFit) {
  EXPECT_EQ(Disaggregated({"--concurrency=1000"})->concurrency, 103) << "as many as there are";
  const auto options = Disaggregated({"--concurrency=8", "--cache-bytes=200KiB"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->concurrency, 1) << "for two, the decode side needs 4 * 65 blocks and has 200";
}

TEST(DisaggregateOptionsTest, BadOnesAreNamed) {
  const auto error = [](const std::vector<std::string>& arguments) {
    const auto options = Disaggregated(arguments);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << arguments[0];
    return std::string(options.status().message());
  };
  EXPECT_THAT(error({"--prefix"}), HasSubstr("--prefix"));
  EXPECT_THAT(error({"--engines=2"}), HasSubstr("--engines"));
  EXPECT_THAT(error({"--sample=3"}), HasSubstr("--sample"));
  EXPECT_THAT(error({"--k=-1"}), HasSubstr("--k=-1"));
  EXPECT_THAT(error({"--decode-device=host"}), HasSubstr("--decode-device"));
  EXPECT_THAT(error({"--decode-address=unix:s", "--summaryd=x"}), HasSubstr("--summaryd"));
  EXPECT_THAT(error({"--cache-bytes=8KiB"}), HasSubstr("the prefill cache holds 0 requests of 1024 tokens"));
  EXPECT_THAT(std::string(Options({"--layer-wise"}).status().message()), HasSubstr("without --disaggregate"));
}

TEST(DisaggregateOptionsTest, APeerIsAHostOrASocket) {
  EXPECT_EQ(PeerOf("unix:/run/s"), "unix:/run/s");
  EXPECT_EQ(PeerOf("10.1.2.3:50051"), "10.1.2.3");
  EXPECT_EQ(PeerOf("prefill.example:50051"), "prefill.example");
  EXPECT_EQ(PeerOf("[::1]:50051"), "::1");
  EXPECT_THAT(PeerOf("unix:s"), testing::EndsWith("/s"));
}

TEST(DisaggregateOptionsTest, ItsOwnDaemonPullsWithTheClientsTls) {
  const auto flags = [](std::vector<std::string> arguments) {
    const std::vector<Command> commands = {{"replay", "", "", ReplayFlags(), RunReplay}};
    arguments.insert(arguments.begin(), {"replay", "--trace=t"});
    return OwnDaemonFlags(*ParseCommandLine(commands, arguments));
  };
  EXPECT_THAT(flags({"--address=h:1"}), testing::ElementsAre("--peers=h", "--drain-timeout=1"));
  EXPECT_THAT(flags({"--address=h:1", "--tls-ca=a", "--tls-cert=c", "--tls-key=k"}),
              testing::ElementsAre("--peers=h", "--drain-timeout=1", "--tls-peer-ca=a", "--tls-cert=c",
                                   "--tls-key=k"));
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
