// Submission queues: what entries do, in which order, and how queues end.
#include <future>
#include <thread>
#include <utility>

#include "server/rpc/update_queue_fixture.h"

namespace kvsummary {
namespace {

TEST_F(UpdateQueueTest, AnEntryWritesWhatACallWritesAndIsAnsweredSo) {
  PrefillInline(21, 1);
  ASSERT_EQ(worker_->Do(Ordered(Prefill(*worker_, 21, 1), *worker_, 0)), "OK");
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
  EXPECT_EQ(worker_->queue->completions[0].rows, 21);
  EXPECT_EQ(worker_->queue->completions[0].regions_closed, 2);
  EXPECT_EQ(server_->stats().prefill_steps, 2);
}

TEST_F(UpdateQueueTest, EntriesGoRoundTheRingInOrderAlsoThroughSleep) {
  for (int i = 1; i <= 300; ++i) {
    if (i % 100 == 0) AwaitSleep(*worker_);
    ASSERT_EQ(worker_->Do(Ordered(Prefill(*worker_, 9, static_cast<unsigned>(i)), *worker_, 0)), "OK") << i;
  }
  EXPECT_EQ(worker_->Completed(), 300u);
  PrefillInline(9, 300);
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, AFullRingIsTakenAtOnce) {
  for (std::uint64_t i = 0; i < kUpdateQueueEntries; ++i) {
    worker_->queue->entries[i] = Ordered(Prefill(*worker_, 9, 1), *worker_, i);
  }
  worker_->Set(kReady, kUpdateQueueEntries);
  worker_->Announce(kUpdateQueueEntries);
  EXPECT_EQ(worker_->Wait(kUpdateQueueEntries), "OK");
  EXPECT_EQ(worker_->Counter(kDone), kUpdateQueueEntries - 1);
}

TEST_F(UpdateQueueTest, NothingIsReadBeforeReadyAndDoneComesBeforeTheAnswer) {
  PrefillInline(21, 1);
  const QueueEntry entry = Ordered(Prefill(*worker_, 21, 1), *worker_, 7);
  const std::int64_t slot = std::exchange(*worker_->at<std::int64_t>(kSlots), 3);
  const std::uint64_t number = worker_->Submit(entry);
  AwaitTaken();
  EXPECT_EQ(worker_->Completed(), 0u);
  *worker_->at<std::int64_t>(kSlots) = slot;
  worker_->Set(kReady, 8);
  EXPECT_EQ(worker_->Wait(number), "OK");
  EXPECT_EQ(worker_->Counter(kDone), 7u);
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, ARefusedEntryIsCountedChangesNothingAndHoldsNobodyBack) {
  const std::string before = Snapshot(shared_);
  QueueEntry bad = Ordered(Prefill(*worker_, 21, 1), *worker_, 1);
  bad.slots.count = 20;
  worker_->Set(kReady, 2);
  EXPECT_EQ(worker_->Do(bad), "SIZE_MISMATCH positions");
  EXPECT_EQ(worker_->Counter(kDone), 0u);
  EXPECT_EQ(Snapshot(shared_), before);
  EXPECT_EQ(server_->stats().refused_steps, 1);
  PrefillInline(21, 1);
  EXPECT_EQ(worker_->Do(Ordered(Prefill(*worker_, 21, 1), *worker_, 2)), "OK");
  EXPECT_EQ(worker_->Counter(kDone), 2u);
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, AWaitHoldsBackItsQueueAndOnlyThat) {
  PrefillInline(21, 2);
  const std::uint64_t waiting = worker_->Submit(Ordered(Prefill(*worker_, 21, 2), *worker_, 1));
  const std::uint64_t behind = worker_->Submit(Ordered(Prefill(*worker_, 21, 2), *worker_, 0));
  Worker other(Address());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(other.Do(Prefill(other, 9, 1)), "OK");
  AwaitSleep(other);
  EXPECT_EQ(other.Do(Prefill(other, 9, 1)), "OK");
  EXPECT_EQ(worker_->Completed(), 0u);
  worker_->Set(kReady, 1);
  EXPECT_EQ(worker_->Wait(waiting), "OK");
  EXPECT_EQ(worker_->Wait(behind), "OK");
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, AWaitEndsAtTheLimit) {
  const std::uint64_t number = worker_->Submit(Ordered(Prefill(*worker_, 9, 1), *worker_, 1));
  while (worker_->Completed() < number) seconds_ += 60;
  EXPECT_EQ(worker_->Wait(number), "WAIT_TIMEOUT shared.ready");
  EXPECT_EQ(worker_->Counter(kDone), 0u);
}

TEST_F(UpdateQueueTest, TheEndOfTheSessionEndsItsWaitAndItsQueue) {
  worker_->Submit(Ordered(Prefill(*worker_, 9, 1), *worker_, 1));
  AwaitTaken();
  worker_->client.Close();
  EXPECT_EQ(worker_->AwaitEnd(), "SESSION_ENDED");
  EXPECT_EQ(worker_->Wait(1), "SESSION_ENDED shared.session_id");
  worker_->Announce(2);
  worker_->Wake();
  EXPECT_EQ(worker_->Wait(2), "ended");
}

TEST_F(UpdateQueueTest, AnEntryThatIsQueuedWhenItsSessionEndsIsNotApplied) {
  const std::string before = Snapshot(shared_);
  std::promise<void> release;
  Occupy(release);
  const auto session = server_->sessions().List().front();
  worker_->Submit(Prefill(*worker_, 9, 1));
  AwaitTaken();
  worker_->client.Close();
  while (!session->ended()) std::this_thread::yield();
  EXPECT_EQ(worker_->Completed(), 0u);
  release.set_value();
  EXPECT_EQ(worker_->AwaitEnd(), "SESSION_ENDED");
  EXPECT_EQ(worker_->Wait(1), "SESSION_ENDED shared.session_id");
  EXPECT_EQ(Snapshot(shared_), before);
}

TEST_F(UpdateQueueTest, DrainRefusesEntriesThatWaitAndThoseThatComeThenEndsTheQueue) {
  PrefillInline(9, 1);
  worker_->Submit(Ordered(Prefill(*worker_, 9, 1), *worker_, 1));
  worker_->Submit(Prefill(*worker_, 9, 1));
  AwaitTaken();
  const std::string before = Snapshot(shared_);
  server_->Drain(std::chrono::minutes(1));  // returns long before
  worker_->AwaitEnd();
  EXPECT_EQ(worker_->Wait(1), "DRAINING");
  const std::string second = worker_->Wait(2);
  EXPECT_TRUE(second == "DRAINING" || second == "ended") << second;
  EXPECT_EQ(Snapshot(shared_), before);
}

TEST_F(UpdateQueueTest, AServerThatEndsFinishesWhatIsOnADevice) {
  PrefillInline(21, 1);
  std::promise<void> release;
  Occupy(release);
  worker_->Submit(Prefill(*worker_, 21, 1));
  AwaitTaken();
  auto ending = std::async(std::launch::async, [&] { server_.reset(); });
  release.set_value();
  ending.get();
  EXPECT_EQ(worker_->Completed(), kUpdateQueueEnded);
}

TEST_F(UpdateQueueTest, AStepOfManyRowsIsCheckedElsewhere) {
  constexpr int kCount = 5000;
  for (int i = 0; i < kCount; ++i) worker_->at<std::int64_t>(kRows)[i] = -1;
  QueueEntry entry = Prefill(*worker_, 1, 1);
  entry.kind = static_cast<std::uint32_t>(QueueStepKind::kDecode);
  entry.query_start_loc = {};
  entry.slots = entry.positions = entry.ring_bases = ArrayOf(*worker_, kRows, kCount);
  entry.rows = {worker_->buffer_id, 0, 0, 512, 0};
  EXPECT_EQ(worker_->Do(entry), "BUFFER_RANGE rows.reference.key_offset_bytes");
}

}  // namespace
}  // namespace kvsummary
