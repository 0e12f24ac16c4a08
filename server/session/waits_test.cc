#include "server/session/waits.h"

#include <gtest/gtest.h>

#include <future>

#include "server/error.h"

namespace kvsummary {
namespace {

class TestBuffer final : public Buffer {
 public:
  TestBuffer() : Buffer(reinterpret_cast<char*>(words_), sizeof(words_), "") {}

 private:
  std::uint64_t words_[8] = {};
};

class WaitsTest : public ::testing::Test {
 protected:
  WaitsTest()
      : session_(*sessions_.Open("a")),
        buffer_(std::make_shared<TestBuffer>()),
        waits_({.limit = std::chrono::seconds(60), .max_per_session = 3, .now = [this] {
                  return Waits::Clock::time_point(std::chrono::seconds(seconds_.load()));
                }}) {}

  struct Started {
    absl::StatusOr<std::weak_ptr<Waits::Wait>> wait;
    std::future<absl::Status> outcome;
  };
  // A wait for word `word` to reach `value`.
  Started Start(int word, std::uint64_t value, std::shared_ptr<Session> session = nullptr) {
    std::promise<absl::Status> promise;
    auto outcome = promise.get_future();
    auto done = [promise = std::move(promise)](absl::Status s) mutable { promise.set_value(std::move(s)); };
    return {waits_.Start(session != nullptr ? session : session_, At(word, value), "shared.ready",
                         std::move(done)),
            std::move(outcome)};
  }
  Counter At(int word, std::uint64_t value) {
    return *Counter::Find(buffer_, std::int64_t{8} * word, value, "shared.ready");
  }

  SessionManager sessions_;
  std::shared_ptr<Session> session_;
  std::shared_ptr<TestBuffer> buffer_;
  std::atomic<int> seconds_ = 1000;
  Waits waits_;
};

bool Waiting(const std::future<absl::Status>& outcome) {
  return outcome.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
}

TEST_F(WaitsTest, EndWhenTheCounterGetsThere) {
  auto a = Start(0, 2);
  auto b = Start(1, 1);
  At(0, 1).Set();
  At(1, 1).Set();
  EXPECT_TRUE(b.outcome.get().ok());
  EXPECT_TRUE(Waiting(a.outcome));
  At(0, 3).Set();
  EXPECT_TRUE(a.outcome.get().ok());
}

TEST_F(WaitsTest, EndAtTheLimit) {
  auto a = Start(0, 1);
  seconds_ = 1059;
  auto b = Start(1, 1);
  At(1, 1).Set();
  EXPECT_TRUE(b.outcome.get().ok());
  EXPECT_TRUE(Waiting(a.outcome));
  seconds_ = 1060;
  const auto status = a.outcome.get();
  EXPECT_EQ(RefusalReason(status), "WAIT_TIMEOUT");
  EXPECT_EQ(RefusalField(status), "shared.ready");
}

TEST_F(WaitsTest, EndWhenCancelledAndGiveTheirBufferBack) {
  auto a = Start(0, 1);
  auto b = Start(1, 1);
  waits_.Cancel(*a.wait);
  EXPECT_EQ(a.outcome.get().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Waiting(b.outcome));
  At(1, 1).Set();
  EXPECT_TRUE(b.outcome.get().ok());
  waits_.Cancel(*a.wait);  // of one that has ended
  while (buffer_.use_count() > 1) std::this_thread::yield();
}

TEST_F(WaitsTest, EndWithTheirSessionAndOnlyThose) {
  auto other = *sessions_.Open("b");
  auto a = Start(0, 1);
  auto b = Start(1, 1, other);
  sessions_.End(session_);
  EXPECT_EQ(RefusalReason(a.outcome.get()), "SESSION_ENDED");
  EXPECT_TRUE(Waiting(b.outcome));
  auto late = Start(0, 1);
  EXPECT_EQ(RefusalReason(late.outcome.get()), "SESSION_ENDED");
  At(1, 1).Set();
  EXPECT_TRUE(b.outcome.get().ok());
}

TEST_F(WaitsTest, AreBoundedForASessionAndFreeAgainWhenEnded) {
  auto other = *sessions_.Open("b");
  std::vector<Started> started;
  for (int i = 0; i < 3; ++i) started.push_back(Start(i, 1));
  auto refused = Start(3, 1);
  EXPECT_EQ(RefusalReason(refused.wait.status()), "SESSION_LIMIT");
  EXPECT_THROW(refused.outcome.get(), std::future_error);  // never called
  auto others = Start(3, 1, other);
  EXPECT_TRUE(others.wait.ok());
  At(1, 1).Set();
  EXPECT_TRUE(started[1].outcome.get().ok());
  auto again = Start(4, 1);
  EXPECT_TRUE(again.wait.ok());
  for (int word : {0, 2, 3, 4}) At(word, 1).Set();
  EXPECT_TRUE(again.outcome.get().ok());
  EXPECT_TRUE(others.outcome.get().ok());
}

TEST_F(WaitsTest, ADoneMayStartTheNext) {
  std::promise<absl::Status> second;
  ASSERT_TRUE(waits_
                  .Start(session_, At(0, 1), "f",
                         [&](const absl::Status& first) {
                           EXPECT_TRUE(first.ok());
                           EXPECT_TRUE(waits_
                                           .Start(session_, At(1, 1), "f",
                                                  [&](absl::Status s) { second.set_value(std::move(s)); })
                                           .ok());
                         })
                  .ok());
  At(1, 1).Set();
  At(0, 1).Set();
  EXPECT_TRUE(second.get_future().get().ok());
}

TEST_F(WaitsTest, WhatTheWriterWroteBeforeIsSeenAfter) {
  std::vector<int> rows(1000);
  auto a = Start(0, 1);
  std::thread writer([&] {
    for (int i = 0; i < 1000; ++i) rows[i] = i;
    At(0, 1).Set();
  });
  EXPECT_TRUE(a.outcome.get().ok());
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(rows[i], i);
  writer.join();
}

TEST(Waits, WhatStillWaitsIsCancelledAtTheEnd) {
  SessionManager sessions;
  absl::Status outcome;
  {
    Waits waits({});
    auto counter = Counter::Find(std::make_shared<TestBuffer>(), 0, 1, "f");
    ASSERT_TRUE(waits.Start(*sessions.Open("a"), *counter, "f", [&](absl::Status s) { outcome = s; }).ok());
  }
  EXPECT_EQ(outcome.code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace kvsummary
