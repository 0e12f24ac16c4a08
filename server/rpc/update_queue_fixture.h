// Submission queues as their workers see them: a real server, the real descriptor socket, entries written by
// hand.
#pragma once

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/update.h"
#include "proto/update_queue.h"
#include "server/rpc/server.h"
#include "server/rpc/test_buffer_layout.h"
#include "server/rpc/test_client.h"

namespace kvsummary {

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
  static QueueEntry Ordered(const QueueEntry& unordered, const Worker& worker, std::uint64_t value) {
    QueueEntry entry = unordered;
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

}  // namespace kvsummary
