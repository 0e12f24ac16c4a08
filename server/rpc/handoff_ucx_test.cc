// Hand-offs that travel by UCX, over the loopback interface.
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "server/rpc/handoff_test_fixture.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kGeometry = {.layers = 4,
                                     .blocks = 8,
                                     .block_size = 8192,
                                     .block_stride = 0,
                                     .ring_blocks = 2,
                                     .capacity = 16,
                                     .rows_per_layer = 16,
                                     .k = 0};
constexpr std::int64_t kTokens = 6 * 8192 + 5;
const PlacedRequest kRequest = {{7, 6, 5, 4, 3, 2}, 1};

class HandoffUcxTest : public HandoffRpcTest {
 protected:
  void SetUp() override {
    const std::string binary = std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") +
                               "/server/ucx/summaryd-ucx";
    const UcxTransport::Options ucx{.net_device = "lo", .binary = binary};
    if (const auto started = UcxTransport::Start(ucx); !started.ok()) {
      GTEST_SKIP() << "UCX cannot be used here: " << started.status();
    }
    Server::Options options;
    options.ucx = ucx;
    options.pull.same_host = false;
    ASSERT_TRUE(options.peers.Allow("127.0.0.1").ok());  // where the helpers listen
    source_ = Start("source", options);
    target_ = Start("target", options);
    from_ = source_.MakeCache("from", kGeometry);
    to_ = target_.MakeCache("to", kGeometry);
    Fill(*from_, kRequest, kTokens / 8, kTokens - 1);
  }
  v1::AcceptResponse MustHandOver() {
    const auto offer = MustOffer(OfferRequestOf(*from_, kRequest, kTokens));
    std::memset(to_->memory().data(), kUntouched, static_cast<std::size_t>(to_->memory().bytes()));
    v1::AcceptResponse reply;
    const auto status = Accept(AcceptRequestOf(offer.handoff(), *to_, kRequest, kTokens), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kRequest, kTokens));
    return reply;
  }
  // The helpers' processes: children of this one.
  static std::vector<pid_t> Helpers() {
    std::vector<pid_t> pids;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream children(entry.path() / "children");
      for (pid_t pid = 0; children >> pid;) pids.push_back(pid);
    }
    return pids;
  }

  std::shared_ptr<Cache> from_;
  std::shared_ptr<Cache> to_;
};

TEST_F(HandoffUcxTest, BytesAreRightAndStagingComesBack) {
  for (int i = 0; i < 3; ++i) EXPECT_EQ(MustHandOver().transport(), v1::HANDOFF_TRANSPORT_UCX);
  EXPECT_EQ(target_.Stats().ucx_bytes(), 3 * (kTokens / 8 * 256 + 5 * 1024) * 4);
  // When it is acknowledged, and nothing is sent any more.
  while (source_.Stats().offers() + source_.Stats().staged_bytes() > 0) std::this_thread::yield();
}

TEST_F(HandoffUcxTest, WithoutItsHelperItGoesOnOverGrpc) {
  EXPECT_EQ(MustHandOver().transport(), v1::HANDOFF_TRANSPORT_UCX);
  const auto helpers = Helpers();
  EXPECT_EQ(helpers.size(), 2u);
  for (const pid_t pid : helpers) kill(pid, SIGKILL);
  EXPECT_EQ(MustHandOver().transport(), v1::HANDOFF_TRANSPORT_GRPC);
}

}  // namespace
}  // namespace kvsummary
