// Submission queues as their workers see them: a real server, the real descriptor socket, entries written by
// hand. Every step of the protocol that a hostile worker can break has a test of its name.
#include "proto/update_queue.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBufferBytes = 1 << 20;

// Where the tests put things in a worker's buffer.
constexpr std::int64_t kReady = 0;
constexpr std::int64_t kDone = 64;
constexpr std::int64_t kSlots = 4096;
constexpr std::int64_t kPositions = 8192;
constexpr std::int64_t kStarts = 12288;
constexpr std::int64_t kBases = 20480;
constexpr std::int64_t kRows = 65536;

// A worker: a session, a registered buffer, a queue, and the worker's own count of entries.
struct Worker {
  explicit Worker(const std::string& address) : client(address) {
    EXPECT_EQ(ReasonOf(client.Open("worker")), "OK");
    v1::RegisterBufferResponse reply;
    EXPECT_EQ(ReasonOf(client.RegisterMemfd(kBufferBytes, &reply)), "OK");
    buffer_id = reply.buffer_id();
    const Descriptor memfd = MakeMemfd(kBufferBytes);
    EXPECT_EQ(Redeem(client.descriptor_socket, reply.ticket(), memfd.get()).reason, "OK");
    buffer =
        static_cast<char*>(mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0));
    EXPECT_EQ(ReasonOf(client.OpenQueue(&queue, &wake)), "OK");
  }
  ~Worker() {
    munmap(buffer, kBufferBytes);
    if (queue != nullptr) munmap(queue, sizeof(*queue));
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  template <typename T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(buffer + offset);
  }
  std::uint64_t Completed() const { return std::atomic_ref(queue->completed).load(); }
  std::uint64_t Counter(std::int64_t offset) const {
    return std::atomic_ref(*at<std::uint64_t>(offset)).load();
  }
  void Set(std::int64_t offset, std::uint64_t value) const {
    std::atomic_ref(*at<std::uint64_t>(offset)).store(value);
  }

  void Announce(std::uint64_t value) {
    std::atomic_ref(queue->submitted).store(value);
    if (std::atomic_ref(queue->sleeping).load() != 0) Wake();
  }
  void Wake() const { eventfd_write(wake.get(), 1); }
  std::uint64_t Submit(const QueueEntry& entry) {
    queue->entries[submitted % kUpdateQueueEntries] = entry;
    Announce(++submitted);
    return submitted;
  }
  // "OK", or the reason and the field.
  std::string Wait(std::uint64_t number) const {
    while (Completed() < number) std::this_thread::yield();
    const QueueCompletion& c = queue->completions[(number - 1) % kUpdateQueueEntries];
    if (c.number != number) return "ended";
    if (c.code == 0) return "OK";
    return *c.field == 0 ? c.reason : std::string(c.reason) + " " + c.field;
  }
  std::string Do(const QueueEntry& entry) { return Wait(Submit(entry)); }
  std::string AwaitEnd() const {
    while (Completed() != kUpdateQueueEnded) std::this_thread::yield();
    return queue->end_reason;
  }

  TestClient client;
  std::uint64_t buffer_id = 0;
  char* buffer = nullptr;
  UpdateQueueMemory* queue = nullptr;
  Descriptor wake;
  std::uint64_t submitted = 0;
};

class UpdateQueueTest : public ::testing::Test {
 protected:
  UpdateQueueTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), 64 << 20));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    Server::Options options;
    options.listen = {"unix:" + dir_ + "/s"};
    options.waits.now = [this] { return Waits::Clock::time_point(std::chrono::seconds(seconds_.load())); };
    auto server = Server::Start(options, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    worker_ = std::make_unique<Worker>(Address());
    EXPECT_EQ(ReasonOf(worker_->client.Create("shared", &shared_, false)), "OK");
    EXPECT_EQ(ReasonOf(worker_->client.Create("inline", &inline_, false)), "OK");
  }
  ~UpdateQueueTest() override {
    worker_.reset();
    server_.reset();
    std::filesystem::remove_all(dir_);
  }
  std::string Address() const { return server_->addresses()[0]; }

  std::string Snapshot(const v1::CacheInfo& info) const {
    const auto cache = *caches_->Find(info.cache().name());
    return {static_cast<const char*>(cache->memory().data()),
            static_cast<std::size_t>(cache->memory().bytes())};
  }

  static std::string RandomRows(int rows, unsigned seed) {
    std::mt19937 random(seed);
    std::string bytes(static_cast<std::size_t>(2 * rows) * kRowBytes, 0);
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      bytes[i] = static_cast<char>(random());
      bytes[i + 1] = static_cast<char>(0x3c + random() % 4);
    }
    return bytes;
  }
  // A prefill of `count` positions from 0 on, of the request in block 1 on and ring block 1: as a call on the
  // cache `inline`, and as an entry for the cache `shared` with all that it refers to in the worker's buffer.
  void PrefillInline(int count, unsigned seed) {
    v1::UpdatePrefillRequest request;
    *request.mutable_cache() = inline_.cache();
    request.mutable_layers()->set_count(2);
    for (int i = 0; i < count; ++i) {
      request.add_slots(16 + i);
      request.add_positions(i);
      request.add_ring_bases(inline_.layout().rows_per_block());
    }
    request.add_query_start_loc(0);
    request.add_query_start_loc(count);
    request.mutable_rows()->set_inline_(RandomRows(count, seed));
    grpc::ClientContext context;
    v1::UpdatePrefillResponse reply;
    EXPECT_EQ(ReasonOf(worker_->client.updates->UpdatePrefill(&context, request, &reply)), "OK");
  }
  static QueueArray ArrayOf(const Worker& worker, std::int64_t offset, std::int64_t count) {
    return {worker.buffer_id, offset, count};
  }
  QueueEntry Prefill(const Worker& worker, int count, unsigned seed) const {
    for (int i = 0; i < count; ++i) {
      worker.at<std::int64_t>(kSlots)[i] = 16 + i;
      worker.at<std::int64_t>(kPositions)[i] = i;
      worker.at<std::int64_t>(kBases)[i] = shared_.layout().rows_per_block();
    }
    worker.at<std::int32_t>(kStarts)[0] = 0;
    worker.at<std::int32_t>(kStarts)[1] = count;
    const std::string rows = RandomRows(count, seed);
    std::memcpy(worker.buffer + kRows, rows.data(), rows.size());
    QueueEntry entry;
    entry.kind = static_cast<std::uint32_t>(QueueStepKind::kPrefill);
    entry.cache_name_bytes = static_cast<std::uint32_t>(shared_.cache().name().size());
    shared_.cache().name().copy(entry.cache_name, sizeof(entry.cache_name));
    entry.cache_generation = shared_.cache().generation();
    entry.layers = 2;
    entry.rows = {worker.buffer_id, kRows, kRows + 512, kRowBytes, std::int64_t{count} * kRowBytes};
    entry.slots = ArrayOf(worker, kSlots, count);
    entry.positions = ArrayOf(worker, kPositions, count);
    entry.query_start_loc = ArrayOf(worker, kStarts, 2);
    entry.ring_bases = ArrayOf(worker, kBases, count);
    return entry;
  }
  static QueueEntry Ordered(QueueEntry entry, const Worker& worker, std::uint64_t value) {
    entry.ready = {worker.buffer_id, kReady, value};
    entry.done = {worker.buffer_id, kDone, value};
    return entry;
  }
  // Keeps the device busy until the promise is set.
  void Occupy(std::promise<void>& release) {
    ASSERT_TRUE(caches_->devices()[0]->executor().Submit([&] { release.get_future().wait(); }).ok());
  }
  // Returns when the daemon has taken what the worker submitted, as far as it takes it: it looks at every
  // queue between two entries of another one.
  void AwaitTaken() {
    Worker other(Address());
    for (int i = 0; i < 2; ++i) EXPECT_EQ(other.Do({}), "FIELD_MISSING update");
  }
  static void AwaitSleep(const Worker& worker) {
    while (std::atomic_ref(worker.queue->sleeping).load() == 0) std::this_thread::yield();
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::atomic<int> seconds_ = 1000;
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Worker> worker_;
  v1::CacheInfo shared_, inline_;
};

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
