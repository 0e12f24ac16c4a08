// Updates by shared memory, as their clients see them: a real server, real stubs, buffers that both sides
// see. (That a memfd becomes such a buffer is tested elsewhere.)
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"
#include "server/rpc/server.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBudget = 64 << 20;
constexpr std::int64_t kBufferBytes = 1 << 20;

// Where the tests put things in a buffer.
constexpr std::int64_t kReady = 0;
constexpr std::int64_t kDone = 64;
constexpr std::int64_t kSlots = 4096;
constexpr std::int64_t kPositions = 8192;
constexpr std::int64_t kStarts = 12288;
constexpr std::int64_t kLens = 16384;
constexpr std::int64_t kBases = 20480;
constexpr std::int64_t kRows = 65536;

std::string Details(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  std::string text;
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    if (!any.UnpackTo(&info)) continue;
    text = info.reason();
    if (info.metadata().contains("field")) text += " " + info.metadata().at("field");
  }
  return text;
}

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

class SharedPlaneTest : public ::testing::Test {
 protected:
  SharedPlaneTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), kBudget));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    Server::Options options;
    options.listen = {"unix:" + dir_ + "/s"};
    options.waits.max_per_session = 4;
    options.waits.now = [this] { return Waits::Clock::time_point(std::chrono::seconds(seconds_.load())); };
    auto server = Server::Start(options, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials());
    cache_stub_ = v1::CacheService::NewStub(channel_);
    stub_ = v1::UpdateService::NewStub(channel_);
    inline_ = Create("inline");
    shared_ = Create("shared");
    worker_ = Open("worker");
  }
  ~SharedPlaneTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  // 2 layers, 10 blocks of 16 tokens, 4 ring blocks of 2 * 12 rows (bases 24, 48, 72).
  v1::CacheInfo Create(const std::string& name, const std::string& session_id = "") {
    v1::CreateCacheRequest request;
    request.set_name(name);
    request.set_session_id(session_id);
    request.set_device("host");
    auto* g = request.mutable_geometry();
    g->set_layers(2);
    g->set_blocks(10);
    g->set_block_size(16);
    g->set_block_stride(1280);
    g->set_ring_blocks(4);
    g->set_capacity(10);
    g->set_rows_per_layer(12);
    g->set_k(3);
    grpc::ClientContext context;
    v1::CreateCacheResponse reply;
    const auto status = cache_stub_->CreateCache(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.info();
  }

  // Waits of worker_'s session, as ListSessions tells them.
  std::int64_t ListedWaits() {
    grpc::ClientContext context;
    v1::ListSessionsResponse reply;
    const auto status = v1::AdminService::NewStub(channel_)->ListSessions(&context, {}, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    for (const auto& session : reply.sessions()) {
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

  std::string Snapshot(const v1::CacheInfo& info) {
    std::string bytes;
    v1::ReadPagesRequest pages;
    *pages.mutable_cache() = info.cache();
    pages.mutable_layers()->set_count(2);
    for (int b = 0; b < 10; ++b) pages.add_blocks(b);
    grpc::ClientContext context;
    auto reader = cache_stub_->ReadPages(&context, pages);
    for (v1::ReadPagesResponse part; reader->Read(&part);) bytes += part.data();
    EXPECT_TRUE(reader->Finish().ok());
    v1::ReadRingRequest ring;
    *ring.mutable_cache() = info.cache();
    ring.mutable_layers()->set_count(2);
    for (int b = 0; b < 4; ++b) ring.add_ring_blocks(b);
    grpc::ClientContext ring_context;
    auto ring_reader = cache_stub_->ReadRing(&ring_context, ring);
    for (v1::ReadRingResponse part; ring_reader->Read(&part);) bytes += part.data();
    EXPECT_TRUE(ring_reader->Finish().ok());
    return bytes;
  }

  static std::string RandomRows(int rows, unsigned seed) {
    std::mt19937 random(seed);
    std::string bytes(static_cast<std::size_t>(2 * rows) * kRowBytes, 0);
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      bytes[i] = static_cast<char>(random());
      bytes[i + 1] = static_cast<char>(0x3c + random() % 4 + (random() % 2) * 0x80);
    }
    return bytes;
  }

  // Updates of the cache `inline`, rows and arrays in the message: request 1 in block 1 on, ring block 1.
  v1::UpdatePrefillRequest Prefill(int count, unsigned seed) const {
    v1::UpdatePrefillRequest request;
    *request.mutable_cache() = inline_.cache();
    request.mutable_layers()->set_count(2);
    for (int i = 0; i < count; ++i) {
      request.add_slots(16 + i);
      request.add_positions(i);
      request.add_ring_bases(24);
    }
    request.add_query_start_loc(0);
    request.add_query_start_loc(count);
    request.mutable_rows()->set_inline_(RandomRows(count, seed));
    return request;
  }
  v1::UpdateVerifyRequest Verify(int first, int count, unsigned seed) const {
    v1::UpdateVerifyRequest request;
    *request.mutable_cache() = inline_.cache();
    request.mutable_layers()->set_count(2);
    for (int i = 0; i < count; ++i) {
      request.add_slots(16 + first + i);
      request.add_ring_bases(24);
    }
    request.add_query_start_loc(0);
    request.add_query_start_loc(count);
    request.add_seq_lens(first + count);
    request.mutable_rows()->set_inline_(RandomRows(count, seed));
    return request;
  }
  v1::UpdateDecodeRequest Decode(int position, unsigned seed) const {
    v1::UpdateDecodeRequest request;
    *request.mutable_cache() = inline_.cache();
    request.mutable_layers()->set_count(2);
    request.add_slots(16 + position);
    request.add_positions(position);
    request.add_ring_bases(24);
    request.mutable_rows()->set_inline_(RandomRows(1, seed));
    return request;
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

  grpc::Status Send(grpc::ClientContext* context, const v1::UpdatePrefillRequest& request) {
    v1::UpdatePrefillResponse reply;
    return stub_->UpdatePrefill(context, request, &reply);
  }
  grpc::Status Send(grpc::ClientContext* context, const v1::UpdateVerifyRequest& request) {
    v1::UpdateVerifyResponse reply;
    return stub_->UpdateVerify(context, request, &reply);
  }
  grpc::Status Send(grpc::ClientContext* context, const v1::UpdateDecodeRequest& request) {
    v1::UpdateDecodeResponse reply;
    return stub_->UpdateDecode(context, request, &reply);
  }
  template <typename Request>
  grpc::Status Send(const Request& request) {
    grpc::ClientContext context;
    return Send(&context, request);
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

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::atomic<int> seconds_ = 1000;
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_stub_;
  std::unique_ptr<v1::UpdateService::Stub> stub_;
  v1::CacheInfo inline_;
  v1::CacheInfo shared_;
  Worker worker_;
};

TEST_F(SharedPlaneTest, EveryKindWritesWhatTheInlinePlaneWrites) {
  const std::string zeros = Snapshot(inline_);
  const auto both = [&](const auto& request) {
    auto status = Send(request);
    EXPECT_TRUE(status.ok()) << status.error_message();
    status = Send(Shared(request, worker_));
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
  };
  both(Prefill(21, 1));
  both(Verify(21, 4, 2));
  both(Decode(25, 3));
  for (int p = 26; p < 33; ++p) both(Decode(p, p));
  EXPECT_NE(Snapshot(shared_), zeros);
}

TEST_F(SharedPlaneTest, RowsOrArraysAloneMayBeShared) {
  ASSERT_TRUE(Send(Prefill(21, 1)).ok());
  auto rows_only = Shared(Prefill(21, 1), worker_);
  rows_only.mutable_shared()->clear_arrays();
  *rows_only.mutable_slots() = Prefill(21, 1).slots();
  *rows_only.mutable_positions() = Prefill(21, 1).positions();
  *rows_only.mutable_query_start_loc() = Prefill(21, 1).query_start_loc();
  *rows_only.mutable_ring_bases() = Prefill(21, 1).ring_bases();
  ASSERT_TRUE(Send(rows_only).ok());
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
  auto arrays_only = Shared(Verify(21, 4, 2), worker_);
  *arrays_only.mutable_rows() = Verify(21, 4, 2).rows();
  ASSERT_TRUE(Send(arrays_only).ok());
  ASSERT_TRUE(Send(Verify(21, 4, 2)).ok());
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(SharedPlaneTest, NothingIsReadBeforeReadyAndDoneComesAfterAll) {
  ASSERT_TRUE(Send(Prefill(21, 1)).ok());
  auto request = Ordered(Shared(Prefill(21, 1), worker_), worker_, 7);
  // Until it is ready, what lies there is rubbish.
  std::string rows(worker_.buffer->data() + kRows, 2 * 65536);
  std::memset(worker_.buffer->data() + kRows, 0x55, 2 * 65536);
  const std::int64_t slot = std::exchange(*worker_.buffer->at<std::int64_t>(kSlots), 3);
  worker_.buffer->Set(kReady, 6);
  auto call = SendAsync(request);
  UntilHeld(worker_, kWaiting);
  EXPECT_EQ(worker_.buffer->Get(kDone), 0u);
  std::memcpy(worker_.buffer->data() + kRows, rows.data(), rows.size());
  *worker_.buffer->at<std::int64_t>(kSlots) = slot;
  worker_.buffer->Set(kReady, 8);  // beyond is as good
  while (worker_.buffer->Get(kDone) != 7) std::this_thread::yield();
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
  EXPECT_TRUE(call.get().ok());
}

TEST_F(SharedPlaneTest, ARefusedStepLeavesDoneAlone) {
  auto request = Ordered(Shared(Prefill(21, 1), worker_), worker_, 1);
  *worker_.buffer->at<std::int64_t>(kSlots) = 3;
  worker_.buffer->Set(kReady, 1);
  EXPECT_EQ(Details(Send(request)), "NULL_BLOCK slots[0]");
  EXPECT_EQ(worker_.buffer->Get(kDone), 0u);
  EXPECT_EQ(server_->stats().refused_steps, 1);
}

TEST_F(SharedPlaneTest, ArraysThatChangeAfterTheirCheckChangeNothing) {
  ASSERT_TRUE(Send(Prefill(21, 1)).ok());
  auto request = Ordered(Shared(Prefill(21, 1), worker_), worker_, 1);
  const auto rows = OwnRows(request);
  worker_.buffer->Set(kReady, 1);
  // The device is busy, so the step is checked and queued but not yet applied.
  std::promise<void> entered;
  std::promise<void> release;
  auto& executor = caches_->devices()[0]->executor();
  ASSERT_TRUE(executor
                  .Submit([&] {
                    entered.set_value();
                    release.get_future().wait();
                  })
                  .ok());
  entered.get_future().wait();
  auto call = SendAsync(request);
  UntilHeld(rows, 1);
  for (const auto offset : {kSlots, kPositions, kBases}) {
    for (int i = 0; i < 21; ++i) worker_.buffer->at<std::int64_t>(offset)[i] = INT64_MAX - i;
  }
  worker_.buffer->at<std::int32_t>(kStarts)[1] = INT32_MAX;
  release.set_value();
  EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(SharedPlaneTest, AWaitEndsAtTheLimit) {
  auto call = SendAsync(Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  UntilHeld(worker_, kWaiting);
  while (Pending(call)) seconds_ += 60;
  const auto status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Details(status), "WAIT_TIMEOUT shared.ready");
  UntilHeld(worker_, 0);
}

TEST_F(SharedPlaneTest, AWaitEndsWithItsCall) {
  grpc::ClientContext context;
  auto call = std::async(std::launch::async,
                         [&] { return Send(&context, Ordered(Shared(Decode(0, 1), worker_), worker_, 1)); });
  UntilHeld(worker_, kWaiting);
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  UntilHeld(worker_, 0);
  grpc::ClientContext brief;
  brief.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  EXPECT_EQ(Send(&brief, Ordered(Shared(Decode(0, 1), worker_), worker_, 1)).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  UntilHeld(worker_, 0);
}

TEST_F(SharedPlaneTest, AWaitEndsWithItsSession) {
  auto call = SendAsync(Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  UntilHeld(worker_, kWaiting);
  server_->sessions().End(worker_.session);
  const auto status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Details(status), "SESSION_ENDED shared.session_id");
  while (worker_.buffer.use_count() > 1) std::this_thread::yield();
}

TEST_F(SharedPlaneTest, AStepThatIsQueuedWhenItsSessionEndsIsNotApplied) {
  const std::string before = Snapshot(shared_);
  std::promise<void> release;
  ASSERT_TRUE(caches_->devices()[0]->executor().Submit([&] { release.get_future().wait(); }).ok());
  auto request = Shared(Prefill(21, 1), worker_);
  const auto rows = OwnRows(request);
  auto call = SendAsync(request);
  UntilHeld(rows, 1);
  server_->sessions().End(worker_.session);
  EXPECT_EQ(rows.buffer.use_count(), 2);  // not taken from under the step
  release.set_value();
  EXPECT_EQ(Details(call.get()), "SESSION_ENDED shared.session_id");
  EXPECT_EQ(Snapshot(shared_), before);
  while (rows.buffer.use_count() > 1) std::this_thread::yield();
}

TEST_F(SharedPlaneTest, AWorkerThatDiesBetweenAnnouncedAndReadyStopsNobody) {
  auto dead = SendAsync(Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  UntilHeld(worker_, kWaiting);
  const auto other = Open("other");
  ASSERT_TRUE(Send(Prefill(21, 1)).ok());
  other.buffer->Set(kReady, 1);
  EXPECT_TRUE(Send(Ordered(Shared(Prefill(21, 1), other), other, 1)).ok());
  auto later = SendAsync(Ordered(Shared(Decode(21, 2), other), other, 2));
  UntilHeld(other, kWaiting);
  other.buffer->Set(kReady, 2);
  EXPECT_TRUE(later.get().ok());
  EXPECT_TRUE(Send(Decode(21, 2)).ok());
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
  server_->sessions().End(worker_.session);
  EXPECT_EQ(Details(dead.get()), "SESSION_ENDED shared.session_id");
}

TEST_F(SharedPlaneTest, WaitsOfASessionAreBounded) {
  const auto request = Ordered(Shared(Decode(0, 1), worker_), worker_, 1);
  std::vector<std::future<grpc::Status>> calls;
  for (int i = 0; i < 5; ++i) calls.push_back(SendAsync(request));
  std::size_t refused = 0;
  while (Pending(calls[refused])) refused = (refused + 1) % calls.size();
  const auto status = calls[refused].get();
  calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(refused));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Details(status), "SESSION_LIMIT shared.ready");
  worker_.buffer->Set(kReady, 1);
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  EXPECT_TRUE(Send(request).ok());
}

TEST_F(SharedPlaneTest, BadReferencesAreRefusedByNameAndChangeNothing) {
  ASSERT_TRUE(Send(Shared(Prefill(21, 1), worker_)).ok());
  const std::string before = Snapshot(shared_);
  const auto other = Open("other");
  auto device = worker_;
  AddBuffer(device, "cuda:0");
  const auto reserved = *worker_.session->ReserveBuffer();
  using Change = std::function<void(v1::UpdatePrefillRequest&)>;
  const auto rows = [](auto& r) { return r.mutable_rows()->mutable_reference(); };
  const auto arrays = [](auto& r) { return r.mutable_shared()->mutable_arrays(); };
  const std::string at = "rows.reference.";
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& r) { r.clear_shared(), *r.mutable_slots() = {}; }, "SESSION_REQUIRED shared.session_id"},
      {[](auto& r) { r.mutable_shared()->set_session_id("short"); }, "SESSION_REQUIRED shared.session_id"},
      {[](auto& r) { r.mutable_shared()->set_session_id(std::string(16, 'x')); },
       "SESSION_NOT_FOUND shared.session_id"},
      {[&](auto& r) { rows(r)->set_buffer_id(0); }, "BUFFER_NOT_FOUND " + at + "buffer_id"},
      {[&](auto& r) { rows(r)->set_buffer_id(reserved); }, "BUFFER_NOT_READY " + at + "buffer_id"},
      {[&](auto& r) { rows(r)->set_buffer_id(device.id); }, "BUFFER_DEVICE " + at + "buffer_id"},
      {[&](auto& r) { rows(r)->set_key_offset_bytes(kBufferBytes - 1024); },
       "BUFFER_RANGE " + at + "key_offset_bytes"},
      {[&](auto& r) { rows(r)->set_z_offset_bytes(-2); }, "BUFFER_RANGE " + at + "z_offset_bytes"},
      {[&](auto& r) { rows(r)->set_z_offset_bytes(kRows + 1); }, "BUFFER_RANGE " + at + "z_offset_bytes"},
      {[&](auto& r) { rows(r)->set_row_stride_bytes(0); }, "BUFFER_RANGE " + at + "row_stride_bytes"},
      {[&](auto& r) { rows(r)->set_layer_stride_bytes(std::int64_t{1} << 62); },
       "BUFFER_RANGE " + at + "key_offset_bytes"},
      {[&](auto& r) { r.mutable_layers()->set_count(1 << 30); }, "LAYERS_OUT_OF_RANGE layers"},
      {[&](auto& r) { r.mutable_layers()->set_count(-1); }, "LAYERS_OUT_OF_RANGE layers"},
      {[&](auto& r) { arrays(r)->mutable_slots()->set_count(22); }, "SIZE_MISMATCH positions"},
      {[&](auto& r) { arrays(r)->mutable_slots()->set_count(-1); }, "BUFFER_RANGE shared.arrays.slots"},
      {[&](auto& r) { arrays(r)->mutable_slots()->set_offset_bytes(kSlots + 4); },
       "BUFFER_RANGE shared.arrays.slots"},
      {[&](auto& r) { arrays(r)->mutable_positions()->set_offset_bytes(kBufferBytes - 160); },
       "BUFFER_RANGE shared.arrays.positions"},
      {[&](auto& r) { arrays(r)->mutable_ring_bases()->set_buffer_id(99); },
       "BUFFER_NOT_FOUND shared.arrays.ring_bases"},
      {[&](auto& r) { arrays(r)->mutable_query_start_loc()->set_buffer_id(device.id); },
       "BUFFER_DEVICE shared.arrays.query_start_loc"},
      {[&](auto& r) { arrays(r)->mutable_seq_lens()->set_count(1); }, "SIZE_MISMATCH shared.arrays.seq_lens"},
      {[&](auto& r) { r.add_slots(16); }, "SIZE_MISMATCH slots"},
      {[&](auto& r) { arrays(r)->clear_slots(); }, "SIZE_MISMATCH positions"},
      {[&](auto& r) { *r.mutable_shared()->mutable_ready() = At(worker_, kBufferBytes, 0); },
       "BUFFER_RANGE shared.ready"},
      {[&](auto& r) { *r.mutable_shared()->mutable_done() = At(worker_, 4, 0); }, "BUFFER_RANGE shared.done"},
      {[&](auto& r) { *r.mutable_shared()->mutable_done() = At(device, 0, 0); }, "BUFFER_DEVICE shared.done"},
  };
  for (const auto& [change, details] : cases) {
    auto request = Shared(Prefill(21, 2), worker_);
    change(request);
    EXPECT_EQ(Details(Send(request)), details);
    EXPECT_EQ(Snapshot(shared_), before) << details;
  }
  EXPECT_EQ(server_->stats().refused_steps, static_cast<std::int64_t>(cases.size()));
}

TEST_F(SharedPlaneTest, ABufferOfAnotherSessionDoesNotExist) {
  const auto other = Open("other");
  Worker second = other;  // an id that the first session has not given out
  AddBuffer(second);
  ASSERT_NE(second.id, worker_.id);
  auto request = Shared(Prefill(21, 1), second);
  request.mutable_shared()->set_session_id(worker_.session->id());
  EXPECT_EQ(Details(Send(request)), "BUFFER_NOT_FOUND shared.arrays.slots");
  *request.mutable_shared()->mutable_ready() = At(second, kReady, 0);
  EXPECT_EQ(Details(Send(request)), "BUFFER_NOT_FOUND shared.ready");
}

TEST_F(SharedPlaneTest, ACacheOfAnotherSessionIsNotUpdated) {
  const auto other = Open("other");
  const auto theirs = Create("theirs", other.session->id());
  auto request = Shared(Prefill(21, 1), worker_);
  *request.mutable_cache() = theirs.cache();
  const std::string before = Snapshot(theirs);
  EXPECT_EQ(Details(Send(request)), "CACHE_NOT_YOURS cache.name");
  EXPECT_EQ(Snapshot(theirs), before);
}

TEST_F(SharedPlaneTest, AWaitingStepHoldsBackItsStreamAndOnlyThat) {
  for (int p = 0; p < 24; ++p) ASSERT_TRUE(Send(Decode(p, p)).ok());
  grpc::ClientContext context;
  auto stream = stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  v1::StreamUpdatesResponse reply;
  const auto inline_step = [&](int p) {
    *message.mutable_decode() = Decode(p, p);
    *message.mutable_decode()->mutable_cache() = shared_.cache();
    return message;
  };
  for (int p = 0; p < 5; ++p) ASSERT_TRUE(stream->Write(inline_step(p)));
  for (int p = 0; p < 5; ++p) ASSERT_TRUE(stream->Read(&reply));
  const std::string before = Snapshot(shared_);
  *message.mutable_decode() = Ordered(Shared(Decode(5, 5), worker_), worker_, 1);
  ASSERT_TRUE(stream->Write(message));
  for (int p = 6; p < 24; ++p) ASSERT_TRUE(stream->Write(inline_step(p)));
  UntilHeld(worker_, kWaiting);
  // Other calls go on, on this cache too.
  EXPECT_EQ(Snapshot(shared_), before);
  EXPECT_EQ(worker_.buffer->Get(kDone), 0u);
  worker_.buffer->Set(kReady, 1);
  stream->WritesDone();
  int answers = 0;
  while (stream->Read(&reply)) ++answers;
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answers, 19);
  EXPECT_EQ(worker_.buffer->Get(kDone), 1u);
  EXPECT_EQ(Snapshot(shared_), Snapshot(inline_));
}

TEST_F(SharedPlaneTest, AStreamEndsAtAWaitThatTimesOutOrIsCancelled) {
  v1::StreamUpdatesRequest message;
  v1::StreamUpdatesResponse reply;
  const std::string before = Snapshot(shared_);
  {
    grpc::ClientContext context;
    auto stream = stub_->StreamUpdates(&context);
    *message.mutable_decode() = Ordered(Shared(Decode(0, 1), worker_), worker_, 1);
    ASSERT_TRUE(stream->Write(message));
    *message.mutable_decode() = Shared(Decode(1, 1), worker_);
    ASSERT_TRUE(stream->Write(message));
    UntilHeld(worker_, kWaiting);
    auto ended = std::async(std::launch::async, [&] { return !stream->Read(&reply); });
    while (Pending(ended)) seconds_ += 60;
    EXPECT_TRUE(ended.get());
    EXPECT_EQ(Details(stream->Finish()), "WAIT_TIMEOUT shared.ready");
  }
  {
    grpc::ClientContext context;
    auto stream = stub_->StreamUpdates(&context);
    *message.mutable_decode() = Ordered(Shared(Decode(0, 1), worker_), worker_, 1);
    ASSERT_TRUE(stream->Write(message));
    while (ListedWaits() != 1) std::this_thread::yield();
    context.TryCancel();
    EXPECT_FALSE(stream->Read(&reply));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    while (ListedWaits() != 0) std::this_thread::yield();
    UntilHeld(worker_, 0);
  }
  EXPECT_EQ(Snapshot(shared_), before);
}

TEST_F(SharedPlaneTest, DrainEndsAStreamThatWaits) {
  grpc::ClientContext context;
  auto stream = stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_decode() = Ordered(Shared(Decode(0, 1), worker_), worker_, 1);
  ASSERT_TRUE(stream->Write(message));
  UntilHeld(worker_, kWaiting);
  server_->Drain(std::chrono::minutes(1));  // returns long before
  v1::StreamUpdatesResponse reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "DRAINING");
}

TEST_F(SharedPlaneTest, AStepOfManyRowsIsCheckedElsewhere) {
  // More padding rows than are checked on the thread of the waits.
  v1::UpdateDecodeRequest request;
  *request.mutable_cache() = shared_.cache();
  request.mutable_layers()->set_count(1);
  constexpr int kCount = 5000;
  auto* slots = worker_.buffer->at<std::int64_t>(kRows);
  for (int i = 0; i < kCount; ++i) slots[i] = -1;
  auto* shared = request.mutable_shared();
  shared->set_session_id(worker_.session->id());
  v1::ArrayReference all;
  all.set_buffer_id(worker_.id);
  all.set_offset_bytes(kRows);
  all.set_count(kCount);
  *shared->mutable_arrays()->mutable_slots() = all;
  *shared->mutable_arrays()->mutable_positions() = all;
  *shared->mutable_arrays()->mutable_ring_bases() = all;
  auto* rows = request.mutable_rows()->mutable_reference();
  rows->set_buffer_id(worker_.id);
  rows->set_row_stride_bytes(512);
  *shared->mutable_ready() = At(worker_, kReady, 1);
  auto call = SendAsync(request);
  UntilHeld(worker_, kWaiting - 1);
  worker_.buffer->Set(kReady, 1);
  EXPECT_EQ(Details(call.get()), "BUFFER_RANGE rows.reference.key_offset_bytes");
  shared->mutable_ready()->set_value(2);
  request.mutable_rows()->set_inline_(std::string(kCount * kRowBytes, 0));
  call = SendAsync(request);
  UntilHeld(worker_, kWaiting - 1);
  worker_.buffer->Set(kReady, 2);
  EXPECT_TRUE(call.get().ok());
}

}  // namespace
}  // namespace kvsummary
