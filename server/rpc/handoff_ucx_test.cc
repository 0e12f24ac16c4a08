// Hand-offs that travel by UCX, over the loopback interface.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>

#include "server/rpc/handoff_test_fixture.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {
namespace {

// The helpers' processes: children of this one.
std::vector<pid_t> Helpers() {
  std::vector<pid_t> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream children(entry.path() / "children");
    for (pid_t pid = 0; children >> pid;) pids.push_back(pid);
  }
  return pids;
}

UcxTransport::Options UcxOptions() {
  return {.net_device = "lo",
          .binary = std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") +
                    "/server/ucx/summaryd-ucx"};
}

class HandoffUcxTest : public HandoffRpcTest {
 protected:
  void SetUp() override {
    const UcxTransport::Options ucx = UcxOptions();
    if (const auto started = UcxTransport::Start(ucx); !started.ok()) {
      GTEST_SKIP() << "UCX cannot be used here: " << started.status();
    }
    Server::Options options;
    options.ucx = ucx;
    options.pull.same_host = false;
    ASSERT_TRUE(options.peers.Allow("127.0.0.1").ok());  // where the helpers listen
    source_ = Start("source", options);
    target_ = Start("target", options);
    from_ = source_.MakeCache("from", kLarge);
    to_ = target_.MakeCache("to", kLarge);
    Fill(*from_, kLargeRequest, kLargeTokens / 8, kLargeTokens - 1);
  }
  v1::AcceptResponse MustHandOver() {
    const auto offer = MustOffer(OfferRequestOf(*from_, kLargeRequest, kLargeTokens));
    std::memset(to_->memory().data(), kUntouched, static_cast<std::size_t>(to_->memory().bytes()));
    v1::AcceptResponse reply;
    const auto status = Accept(AcceptRequestOf(offer.handoff(), *to_, kLargeRequest, kLargeTokens), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kLargeRequest, kLargeTokens));
    return reply;
  }

  std::shared_ptr<Cache> from_;
  std::shared_ptr<Cache> to_;
};

TEST_F(HandoffUcxTest, BytesAreRightAndStagingComesBack) {
  for (int i = 0; i < 3; ++i) EXPECT_EQ(MustHandOver().transport(), v1::HANDOFF_TRANSPORT_UCX);
  EXPECT_EQ(target_.Stats().ucx_bytes(), 3 * (kLargeTokens / 8 * 256 + 5 * 1024) * 4);
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

class UcxTransportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto started = UcxTransport::Start(UcxOptions());
    if (!started.ok()) GTEST_SKIP() << "UCX cannot be used here: " << started.status();
    transport_ = *std::move(started);
    const auto helpers = Helpers();
    ASSERT_EQ(helpers.size(), 1U);
    helper_ = helpers.front();
    staging_ = *AllocateStagingMemory(kChunkBytes);
    std::memset(staging_->data(), 7, kChunkBytes);
  }
  absl::StatusOr<UcxTransport::Bytes> Fetch(const UcxTransport::Place& place) {
    std::promise<absl::StatusOr<UcxTransport::Bytes>> fetched;
    transport_->Fetch(place, kChunkBytes, [&](auto bytes) { fetched.set_value(std::move(bytes)); });
    return fetched.get_future().get();
  }

  std::unique_ptr<UcxTransport> transport_;
  pid_t helper_ = 0;
  std::unique_ptr<Memory> staging_;
};

TEST_F(UcxTransportTest, FetchesAloneBringADeadHelperBack) {
  auto source = UcxHelper::Start({.binary = UcxOptions().binary, .net_device = "lo"});
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_EQ((*source)->AddStaging(staging_->descriptor(), kChunkBytes).value(), 0U);
  ASSERT_TRUE((*source)->Lend(1, 0, 0, kChunkBytes).ok());
  const UcxTransport::Place place{.peer = (*source)->address(), .token = 1};
  ASSERT_TRUE(Fetch(place).ok());
  kill(helper_, SIGKILL);
  auto fetched = Fetch(place);
  while (absl::IsUnavailable(fetched.status())) fetched = Fetch(place);  // there is a pause before a restart
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(std::memcmp(fetched->get(), staging_->data(), kChunkBytes), 0);
}

TEST_F(UcxTransportTest, NobodyWaitsForMemoryThatAHelperDoesNotTake) {
  kill(helper_, SIGSTOP);
  auto borrowed = std::async(std::launch::async, [&] { return transport_->Borrow(*staging_); });
  std::chrono::steady_clock::duration longest{};
  while (borrowed.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    const auto start = std::chrono::steady_clock::now();
    transport_->version();
    longest = std::max(longest, std::chrono::steady_clock::now() - start);
  }
  EXPECT_EQ(borrowed.get(), nullptr);
  EXPECT_LT(longest, std::chrono::seconds(2)) << "the helper is given up after five";
}

}  // namespace
}  // namespace kvsummary
