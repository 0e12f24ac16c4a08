#include "server/device/staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace kvsummary {
namespace {

constexpr std::int64_t kHalf = 8;

// A device that does nothing before somebody waits for it, so that what is reused too early shows.
class LazyDevice final : public Staging::Fences {
 public:
  void Queue(std::function<void()> work) { queue_.push_back({-1, std::move(work)}); }
  absl::Status Set(int half) override {
    if (!set_.ok()) return set_;
    queue_.push_back({half, nullptr});
    return absl::OkStatus();
  }
  absl::Status Await(int half) override {
    ++awaited_;
    while (!queue_.empty() && Queued(half)) {
      if (queue_.front().work) queue_.front().work();
      queue_.pop_front();
    }
    return absl::OkStatus();
  }
  void Fail(absl::Status set) { set_ = std::move(set); }
  int awaited() const { return awaited_; }
  std::size_t left() const { return queue_.size(); }

 private:
  struct Entry {
    int half;
    std::function<void()> work;
  };
  bool Queued(int half) const {
    for (const Entry& e : queue_) {
      if (e.half == half) return true;
    }
    return false;
  }
  std::deque<Entry> queue_;
  absl::Status set_;
  int awaited_ = 0;
};

class StagingTest : public ::testing::Test {
 protected:
  // Queues the copy of a text to got_, and lets its half go without waiting: as a call does that fails later.
  void Send(const std::string& text) {
    auto half = staging_.Next();
    ASSERT_TRUE(half.ok()) << half.status();
    std::memcpy(half->data(), text.data(), text.size());
    device_.Queue([this, from = half->data(), bytes = text.size()] { got_.emplace_back(from, bytes); });
  }

  char memory_[2 * kHalf] = {};
  LazyDevice device_;
  Staging staging_{memory_, kHalf, device_};
  std::vector<std::string> got_;
};

TEST_F(StagingTest, AHalfIsNotReusedWhileACopyFromItRuns) {
  std::vector<std::string> sent;
  for (char c = 'a'; c <= 'z'; ++c) sent.emplace_back(kHalf, c);
  for (const auto& text : sent) Send(text);
  EXPECT_EQ(got_.size(), sent.size() - 2);  // two are still on their way
  auto last = staging_.Next();
  ASSERT_TRUE(last.ok());
  ASSERT_TRUE(last->Await().ok());
  EXPECT_EQ(got_, sent);
}

TEST_F(StagingTest, AwaitWaitsForItsOwnWorkOnlyOnceAllOfItIsQueued) {
  auto first = staging_.Next();
  device_.Queue([this] { got_.emplace_back("first"); });
  ASSERT_TRUE(first->Queued().ok());
  auto second = staging_.Next();
  device_.Queue([this] { got_.emplace_back("second"); });
  ASSERT_TRUE(first->Await().ok());
  EXPECT_EQ(got_, std::vector<std::string>{"first"});
  ASSERT_TRUE(second->Await().ok());
  EXPECT_EQ(got_.size(), 2u);
}

TEST_F(StagingTest, AnAwaitedHalfIsHandedOutWithoutAnotherWait) {
  for (int i = 0; i < 10; ++i) {
    auto half = staging_.Next();
    ASSERT_TRUE(half.ok());
    ASSERT_TRUE(half->Await().ok());
  }
  EXPECT_EQ(device_.awaited(), 10);
}

TEST_F(StagingTest, HalvesTakeTurnsAndAreHandedOutOnce) {
  auto first = staging_.Next();
  auto second = staging_.Next();
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(second->data() - first->data(), kHalf);
  EXPECT_TRUE(absl::IsInternal(staging_.Next().status()));
}

TEST_F(StagingTest, WithoutAFenceNothingIsReused) {
  Send("a");
  device_.Fail(absl::InternalError("lost"));
  Send("b");
  EXPECT_EQ(staging_.Next().status().message(), "lost");
  EXPECT_EQ(staging_.Next().status().message(), "lost");
}

}  // namespace
}  // namespace kvsummary
