// Workers that break the protocol of submission queues, each step of it by name: they hurt themselves alone.
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "server/rpc/update_queue_fixture.h"

namespace kvsummary {
namespace {

TEST_F(UpdateQueueTest, BadEntriesAreRefusedAsCallsAre) {
  Worker other(Address());
  v1::CacheInfo theirs;
  ASSERT_EQ(ReasonOf(other.client.Create("theirs", &theirs)), "OK");
  using Change = std::function<void(QueueEntry&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& e) { e.kind = 0; }, "FIELD_MISSING update"},
      {[](auto& e) { e.kind = 4; }, "FIELD_MISSING update"},
      {[](auto& e) { e.cache_name_bytes = 129; }, "NAME_INVALID cache.name"},
      {[](auto& e) { e.cache_name_bytes = 0; }, "CACHE_NOT_FOUND cache.name"},
      {[](auto& e) { e.cache_generation = 1; }, "GENERATION_STALE cache.generation"},
      {[&](auto& e) {
         e.cache_name_bytes = 6;
         std::memcpy(e.cache_name, "theirs", 6);
         e.cache_generation = theirs.cache().generation();
       },
       "CACHE_NOT_YOURS cache.name"},
      {[](auto& e) { e.layers = 0; }, "LAYERS_OUT_OF_RANGE layers"},
      {[](auto& e) { e.first_layer = 2; }, "LAYERS_OUT_OF_RANGE layers"},
      {[](auto& e) { e.rows.buffer_id = 0; }, "BUFFER_NOT_FOUND rows.reference.buffer_id"},
      {[](auto& e) { e.rows.row_stride_bytes = 0; }, "BUFFER_RANGE rows.reference.row_stride_bytes"},
      {[](auto& e) { e.rows.key_offset_bytes = kBufferBytes; },
       "BUFFER_RANGE rows.reference.key_offset_bytes"},
      {[](auto& e) { e.rows.layer_stride_bytes = std::int64_t{1} << 62; },
       "BUFFER_RANGE rows.reference.key_offset_bytes"},
      {[](auto& e) { e.slots.buffer_id = 99; }, "BUFFER_NOT_FOUND shared.arrays.slots"},
      {[](auto& e) { e.slots.count = -1; }, "BUFFER_RANGE shared.arrays.slots"},
      {[](auto& e) { e.positions = {}; }, "SIZE_MISMATCH positions"},
      {[](auto& e) { e.seq_lens = e.query_start_loc; }, "SIZE_MISMATCH shared.arrays.seq_lens"},
      {[](auto& e) { e.query_start_loc.count = 1 << 22; }, "BUFFER_RANGE shared.arrays.query_start_loc"},
      {[](auto& e) {
         e.ready = {e.slots.buffer_id, kBufferBytes, 0};
       },
       "BUFFER_RANGE shared.ready"},
      {[](auto& e) {
         e.done = {e.slots.buffer_id, 4, 0};
       },
       "BUFFER_RANGE shared.done"},
  };
  const std::string before = Snapshot(shared_);
  for (const auto& [change, answer] : cases) {
    QueueEntry entry = Prefill(*worker_, 21, 1);
    change(entry);
    EXPECT_EQ(worker_->Do(entry), answer);
  }
  EXPECT_EQ(Snapshot(shared_), before);
  EXPECT_EQ(server_->stats().refused_steps, static_cast<std::int64_t>(cases.size()));
}

TEST_F(UpdateQueueTest, AnEntryRewrittenAfterItWasTakenChangesNothing) {
  PrefillInline(21, 1);
  std::promise<void> release;
  Occupy(release);
  const std::uint64_t number = worker_->Submit(Prefill(*worker_, 21, 1));
  AwaitTaken();
  std::memset(static_cast<void*>(&worker_->queue->entries[0]), 0xff, sizeof(QueueEntry));
  for (const auto offset : {kSlots, kPositions, kBases}) std::memset(worker_->buffer + offset, 0x7f, 21 * 8);
  release.set_value();
  EXPECT_EQ(worker_->Wait(number), "OK");
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, EntriesRewrittenAllTheTimeNeverLeaveTheCache) {
  const std::string inline_before = Snapshot(inline_);
  std::atomic<bool> stop = false;
  const QueueEntry good = Prefill(*worker_, 21, 1);
  std::thread rewriter([&] {
    std::mt19937 random(1);
    while (!stop) {
      for (auto& entry : worker_->queue->entries) {
        auto* words = reinterpret_cast<std::uint32_t*>(&entry);
        std::atomic_ref(words[random() % (sizeof(entry) / 4)]).store(static_cast<std::uint32_t>(random()));
      }
    }
  });
  for (int i = 0; i < 2000; ++i) {
    worker_->queue->entries[worker_->submitted % kUpdateQueueEntries] = good;
    worker_->Announce(++worker_->submitted);
    while (worker_->Completed() < worker_->submitted) {
      worker_->Set(kReady, ~std::uint64_t{0});
      seconds_ += 60;  // a counter that is never reached
      std::this_thread::yield();
    }
  }
  stop = true;
  rewriter.join();
  EXPECT_EQ(Snapshot(inline_), inline_before);
  EXPECT_EQ(worker_->Do(good), "OK");
}

TEST_F(UpdateQueueTest, ACountThatFallsEndsTheQueueAndOnlyThat) {
  Worker other(Address());
  ASSERT_EQ(worker_->Do(Prefill(*worker_, 9, 1)), "OK");
  worker_->Announce(0);
  EXPECT_EQ(worker_->AwaitEnd(), "QUEUE_BROKEN");
  EXPECT_EQ(other.Do(Prefill(other, 9, 1)), "OK");
  EXPECT_EQ(server_->sessions().List().size(), 2u);
}

TEST_F(UpdateQueueTest, AnOverfilledRingEndsTheQueue) {
  worker_->Announce(kUpdateQueueEntries + 1);
  EXPECT_EQ(worker_->AwaitEnd(), "QUEUE_BROKEN");
  EXPECT_EQ(worker_->queue->end_code, static_cast<std::uint32_t>(absl::StatusCode::kAborted));
  EXPECT_EQ(worker_->Wait(1), "ended");
}

TEST_F(UpdateQueueTest, TheDaemonReadsNoneOfItsOwnCounts) {
  PrefillInline(21, 1);
  std::atomic_ref(worker_->queue->completed).store(1000);
  worker_->queue->magic = 0;
  std::atomic_ref(worker_->queue->sleeping).store(77);
  worker_->Submit(Prefill(*worker_, 21, 1));
  while (worker_->Completed() != 1) std::this_thread::yield();
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(UpdateQueueTest, AWorkerThatReadsTheEventfdOrMakesItBlockStopsNobody) {
  Worker other(Address());
  fcntl(worker_->wake.get(), F_SETFL, 0);
  for (int i = 0; i < 100; ++i) {
    worker_->Wake();
    eventfd_t value = 0;
    eventfd_read(worker_->wake.get(), &value);
  }
  AwaitSleep(other);
  EXPECT_EQ(other.Do(Prefill(other, 9, 1)), "OK");
  AwaitSleep(*worker_);
  EXPECT_EQ(worker_->Do(Prefill(*worker_, 9, 1)), "OK");
}

TEST_F(UpdateQueueTest, QueuesOfASessionAreBounded) {
  for (int i = 1; i < 4; ++i) {
    UpdateQueueMemory* queue = nullptr;
    Descriptor wake;
    EXPECT_EQ(ReasonOf(worker_->client.OpenQueue(&queue, &wake)), "OK");
    munmap(queue, sizeof(*queue));
  }
  UpdateQueueMemory* queue = nullptr;
  Descriptor wake;
  EXPECT_EQ(ReasonOf(worker_->client.OpenQueue(&queue, &wake)), "SESSION_LIMIT");
  TestClient nobody(Address());
  nobody.session_id = std::string(16, 'x');
  EXPECT_EQ(ReasonOf(nobody.OpenQueue(&queue, &wake)), "SESSION_NOT_FOUND");
}

TEST_F(UpdateQueueTest, TheMemoryCanNeitherShrinkNorGrow) {
  v1::OpenQueueRequest request;
  request.set_session_id(worker_->client.session_id);
  v1::OpenQueueResponse reply;
  grpc::ClientContext context;
  ASSERT_TRUE(worker_->client.updates->OpenQueue(&context, request, &reply).ok());
  const auto self = PidfdOf(getpid());
  const auto memory = Redeem(worker_->client.descriptor_socket, reply.memory_ticket(), self.get());
  ASSERT_EQ(memory.reason, "OK");
  EXPECT_EQ(memory.size_bytes, kUpdateQueueBytes);
  EXPECT_NE(ftruncate(memory.descriptor.get(), 0), 0);
  EXPECT_NE(ftruncate(memory.descriptor.get(), 1 << 20), 0);
  EXPECT_EQ(Redeem(worker_->client.descriptor_socket, reply.memory_ticket(), self.get()).reason,
            "TICKET_UNKNOWN");
}

}  // namespace
}  // namespace kvsummary
