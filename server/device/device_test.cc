#include "server/device/device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "server/error.h"

namespace kvsummary {
namespace {

TEST(Executor, RunsInOrderOnOneThread) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    Executor executor("test");
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(executor
                      .Submit([&, i] {
                        order.push_back(i);
                        threads.push_back(std::this_thread::get_id());
                      })
                      .ok());
    }
  }  // runs what is queued
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
  for (const auto& id : threads) EXPECT_EQ(id, threads[0]);
}

TEST(Executor, RefusesBeyondItsBoundAndFreesWhatItRefuses) {
  std::promise<void> entered;
  std::promise<void> release;
  Executor executor("test", {.works = 2});
  ASSERT_TRUE(executor
                  .Submit([&] {
                    entered.set_value();
                    release.get_future().wait();
                  })
                  .ok());
  entered.get_future().wait();
  int ran = 0;
  EXPECT_TRUE(executor.Submit([&] { ++ran; }).ok());
  EXPECT_TRUE(executor.Submit([&] { ++ran; }).ok());
  auto held = std::make_shared<int>(0);
  const auto refused = executor.Submit([held] {});
  EXPECT_EQ(RefusalReason(refused), "QUEUE_FULL");
  EXPECT_EQ(held.use_count(), 1);
  executor.SubmitFree([&] { ++ran; });
  release.set_value();
  executor.Stop();
  EXPECT_EQ(ran, 3);
}

TEST(Executor, RefusesMoreBytesThanItsBound) {
  std::promise<void> entered;
  std::promise<void> release;
  Executor executor("test", {.bytes = 100});
  ASSERT_TRUE(executor
                  .Submit(
                      [&] {
                        entered.set_value();
                        release.get_future().wait();
                      },
                      60)
                  .ok());
  entered.get_future().wait();
  EXPECT_EQ(RefusalReason(executor.Submit([] {}, 41)), "QUEUE_FULL");  // what runs still counts
  EXPECT_TRUE(executor.Submit([] {}, 40).ok());
  EXPECT_EQ(RefusalReason(executor.Submit([] {}, 1)), "QUEUE_FULL");
  std::promise<void> idle;
  executor.SubmitFree([&] { idle.set_value(); });
  release.set_value();
  idle.get_future().wait();
  EXPECT_TRUE(executor.Submit([] {}, 100).ok());
}

TEST(Executor, ThatPollsRunsWhatComesMeanwhileAndLater) {
  Executor executor("test", {.poll = std::chrono::microseconds(50)});
  for (int i = 0; i < 1000; ++i) {
    std::promise<void> done;
    ASSERT_TRUE(executor.Submit([&] { done.set_value(); }).ok());
    done.get_future().wait();
    if (i % 100 == 0) std::this_thread::yield();
  }
  executor.Stop();
}

TEST(Executor, FreesAClosureBeforeTheNextRuns) {
  auto held = std::make_shared<int>(0);
  long uses = 0;
  Executor executor("test");
  std::promise<void> ready;
  ASSERT_TRUE(executor.Submit([&] { ready.get_future().wait(); }).ok());
  ASSERT_TRUE(executor.Submit([held] {}).ok());
  ASSERT_TRUE(executor.Submit([&] { uses = held.use_count(); }).ok());
  ready.set_value();
  executor.Stop();
  EXPECT_EQ(uses, 1);
}

// A device that can be told to fail.
class FaultyDevice final : public Device {
 public:
  explicit FaultyDevice(absl::Status open) : Device("faulty:0", 1 << 20), open_(std::move(open)) {}
  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    return AllocateHostMemory(bytes);
  }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return Broken("lost"); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }
  int opened() const { return opened_; }

 private:
  absl::Status DoOpen() override {
    ++opened_;
    return open_;
  }
  absl::Status open_;
  int opened_ = 0;
};

TEST(Device, OpensOnceAndRemembersWhyItCannotBeUsed) {
  FaultyDevice device(Refuse(Reason::EXPF_MISMATCH, "device", "differs"));
  EXPECT_TRUE(device.health().ok());
  EXPECT_EQ(RefusalReason(device.Open()), "EXPF_MISMATCH");
  EXPECT_EQ(RefusalReason(device.Open()), "EXPF_MISMATCH");
  EXPECT_EQ(RefusalReason(device.health()), "EXPF_MISMATCH");
  EXPECT_EQ(device.opened(), 1);
}

TEST(Device, TellsOnceThatItIsBroken) {
  FaultyDevice device(absl::OkStatus());
  int told = 0;
  device.set_on_broken([&] { ++told; });
  ASSERT_TRUE(device.Open().ok());
  EXPECT_EQ(RefusalReason(device.Apply({}, DecodeStep{}, RowsIn::kHost)), "DEVICE_FAILED");
  EXPECT_EQ(RefusalReason(device.Apply({}, DecodeStep{}, RowsIn::kHost)), "DEVICE_FAILED");
  EXPECT_EQ(told, 1);
  EXPECT_EQ(RefusalReason(device.health()), "DEVICE_FAILED");
  device.set_on_broken([&] { ++told; });  // late: told at once
  EXPECT_EQ(told, 2);
}

TEST(HostDevice, CopiesPiecesInOrder) {
  auto device = MakeHostDevice(ScalarKernels(), 1 << 20);
  auto memory = device->Allocate(64, MemoryKind::kMemfd);
  ASSERT_TRUE(memory.ok());
  const std::vector<Piece> pieces = {{40, 3}, {8, 2}};
  ASSERT_TRUE(device->CopyIn(**memory, pieces, "abcde").ok());
  std::string out(5, 0);
  ASSERT_TRUE(device->CopyOut(**memory, pieces, out.data()).ok());
  EXPECT_EQ(out, "abcde");
  EXPECT_EQ(std::string(static_cast<const char*>((*memory)->data()) + 40, 4), std::string("abc\0", 4));
}

}  // namespace
}  // namespace kvsummary
