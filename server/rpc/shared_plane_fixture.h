// Workers that update a cache by shared memory, and the same updates by messages. Their buffers are memory
// that both sides see; that a memfd becomes such a buffer is tested elsewhere.
#pragma once

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "server/rpc/server_fixture.h"
#include "server/rpc/test_buffer_layout.h"
#include "server/session/session.h"

namespace kvsummary {

class TestBuffer final : public Buffer {
 public:
  explicit TestBuffer(std::string device = "")
      : TestBuffer(new std::uint64_t[kBufferBytes / 8](), std::move(device)) {}
  ~TestBuffer() override { delete[] words_; }

  template <typename T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(data() + offset);
  }
  void Set(std::int64_t offset, std::uint64_t value) const {
    std::atomic_ref<std::uint64_t>(*at<std::uint64_t>(offset)).store(value, std::memory_order_release);
  }
  std::uint64_t Get(std::int64_t offset) const {
    return std::atomic_ref<std::uint64_t>(*at<std::uint64_t>(offset)).load(std::memory_order_acquire);
  }

 private:
  TestBuffer(std::uint64_t* words, std::string device)
      : Buffer(reinterpret_cast<char*>(words), kBufferBytes, std::move(device)), words_(words) {}
  std::uint64_t* const words_;
};

// A session with one buffer.
struct Worker {
  std::shared_ptr<Session> session;
  std::uint64_t id = 0;
  std::shared_ptr<TestBuffer> buffer;
};

class SharedPlaneTest : public ServerTest {
 protected:
  SharedPlaneTest() : inline_(MustCreate("inline")), shared_(MustCreate("shared")), worker_(Open("worker")) {}

  v1::CacheInfo CreateOwned(const std::string& name, const Worker& owner) {
    auto request = TestClient::CacheRequest(name);
    request.set_session_id(owner.session->id());
    v1::CacheInfo info;
    const auto status = Create(request, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }

  // Waits of worker_'s session, as ListSessions tells them.
  std::int64_t ListedWaits() {
    const v1::ListSessionsResponse list = client_->ListSessions();
    for (const auto& session : list.sessions()) {
      if (session.number() == worker_.session->number()) return session.waits();
    }
    return -1;
  }

  Worker Open(const std::string& name, const std::string& device = "") {
    Worker worker;
    worker.session = *server_->sessions().Open(name);
    AddBuffer(worker, device);
    return worker;
  }
  static void AddBuffer(Worker& worker, const std::string& device = "") {
    worker.buffer = std::make_shared<TestBuffer>(device);
    worker.id = *worker.session->ReserveBuffer();
    EXPECT_TRUE(worker.session->FillBuffer(worker.id, worker.buffer).ok());
  }

  // Updates of the cache `inline`, rows and arrays in the message.
  v1::UpdatePrefillRequest Prefill(int count, unsigned seed) const { return PrefillOf(inline_, count, seed); }
  v1::UpdateVerifyRequest Verify(int first, int count, unsigned seed) const {
    return VerifyOf(inline_, first, count, seed);
  }
  v1::UpdateDecodeRequest Decode(int position, unsigned seed) const {
    return DecodeOf(inline_, position, seed);
  }

  template <typename Field>
  static void Move(const Worker& worker, std::int64_t offset, Field* field, v1::ArrayReference* reference) {
    std::memcpy(worker.buffer->data() + offset, field->data(),
                static_cast<std::size_t>(field->size()) * sizeof((*field)[0]));
    reference->set_buffer_id(worker.id);
    reference->set_offset_bytes(offset);
    reference->set_count(field->size());
    field->Clear();
  }

  // The same update of the cache `shared`, with all of it in the worker's buffer: rows of 1536 bytes with z
  // before key, layers 65,536 bytes apart.
  template <typename Request>
  Request Shared(Request request, const Worker& worker) const {
    *request.mutable_cache() = shared_.cache();
    const std::string rows = request.rows().inline_();
    const auto count = static_cast<std::int64_t>(rows.size()) / (2 * kRowBytes);
    auto* reference = request.mutable_rows()->mutable_reference();
    reference->set_buffer_id(worker.id);
    reference->set_key_offset_bytes(kRows + 1024);
    reference->set_z_offset_bytes(kRows);
    reference->set_row_stride_bytes(1536);
    reference->set_layer_stride_bytes(65536);
    for (std::int64_t l = 0; l < 2; ++l) {
      for (std::int64_t r = 0; r < count; ++r) {
        char* to = worker.buffer->data() + kRows + l * 65536 + r * 1536;
        const char* from = rows.data() + (l * count + r) * kRowBytes;
        std::memcpy(to + 1024, from, 512);
        std::memcpy(to, from + 512, 512);
      }
    }
    auto* shared = request.mutable_shared();
    shared->set_session_id(worker.session->id());
    auto* arrays = shared->mutable_arrays();
    Move(worker, kSlots, request.mutable_slots(), arrays->mutable_slots());
    Move(worker, kBases, request.mutable_ring_bases(), arrays->mutable_ring_bases());
    if constexpr (requires { request.positions(); }) {
      Move(worker, kPositions, request.mutable_positions(), arrays->mutable_positions());
    }
    if constexpr (requires { request.query_start_loc(); }) {
      Move(worker, kStarts, request.mutable_query_start_loc(), arrays->mutable_query_start_loc());
    }
    if constexpr (requires { request.seq_lens(); }) {
      Move(worker, kLens, request.mutable_seq_lens(), arrays->mutable_seq_lens());
    }
    return request;
  }
  static v1::CounterValue At(const Worker& worker, std::int64_t offset, std::uint64_t value) {
    v1::CounterValue counter;
    counter.set_buffer_id(worker.id);
    counter.set_offset_bytes(offset);
    counter.set_value(value);
    return counter;
  }
  template <typename Request>
  Request Ordered(Request request, const Worker& worker, std::uint64_t value) const {
    *request.mutable_shared()->mutable_ready() = At(worker, kReady, value);
    *request.mutable_shared()->mutable_done() = At(worker, kDone, value);
    return request;
  }

  template <typename Request>
  std::future<grpc::Status> SendAsync(const Request& request) {
    return std::async(std::launch::async, [this, request] { return Send(request); });
  }

  template <typename T>
  static bool Pending(const std::future<T>& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
  }

  // Returns once the daemon holds the worker's buffer so many times, beside its session. What waits holds it
  // for its ready counter, its done counter, and for the wait.
  static constexpr long kWaiting = 3;
  static void UntilHeld(const Worker& worker, long times) {
    while (worker.buffer.use_count() != 2 + times) std::this_thread::yield();
  }

  // Moves a shared step's rows to a buffer of their own: once the daemon holds that, it has copied the
  // arrays.
  template <typename Request>
  Worker OwnRows(Request& request) {
    Worker rows = worker_;
    AddBuffer(rows);
    std::memcpy(rows.buffer->data(), worker_.buffer->data(), kBufferBytes);
    request.mutable_rows()->mutable_reference()->set_buffer_id(rows.id);
    return rows;
  }

  const v1::CacheInfo inline_;
  const v1::CacheInfo shared_;
  Worker worker_;
};

}  // namespace kvsummary
