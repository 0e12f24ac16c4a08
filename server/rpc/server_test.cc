// The server as its clients see it: a real one on a Unix socket, through real stubs.
#include "server/rpc/server.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/update.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBudget = 64 << 20;

// Reason and field of a refusal's details, as "REASON field".
std::string Details(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  EXPECT_EQ(details.code(), status.error_code());
  std::string reason;
  std::string field;
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::QuotaFailure quota;
    if (any.UnpackTo(&info)) {
      EXPECT_EQ(info.domain(), "kvsummary");
      reason = info.reason();
    }
    if (any.UnpackTo(&bad)) field = " " + bad.field_violations(0).field();
    if (any.UnpackTo(&quota)) field = " quota " + quota.violations(0).subject();
  }
  return reason + field;
}

// The host, until it is told to break.
class BreakableDevice final : public Device {
 public:
  BreakableDevice() : Device("test:0", kBudget) {}
  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    return AllocateHostMemory(bytes);
  }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return Broken("fell off the bus"); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }

 private:
  absl::Status DoOpen() override { return absl::OkStatus(); }
};

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), kBudget));
    devices.push_back(std::make_unique<BreakableDevice>());
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    auto server = Server::Start({.listen = {"unix:" + dir_ + "/s"}}, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    channel_ =
        grpc::CreateCustomChannel(server_->addresses()[0], grpc::InsecureChannelCredentials(), arguments);
    cache_stub_ = v1::CacheService::NewStub(channel_);
    update_stub_ = v1::UpdateService::NewStub(channel_);
    admin_stub_ = v1::AdminService::NewStub(channel_);
  }
  ~ServerTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  static v1::CreateCacheRequest Request(const std::string& name) {
    v1::CreateCacheRequest request;
    request.set_name(name);
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
    return request;
  }

  grpc::Status Create(const v1::CreateCacheRequest& request, v1::CacheInfo* info = nullptr) {
    grpc::ClientContext context;
    v1::CreateCacheResponse reply;
    const auto status = cache_stub_->CreateCache(&context, request, &reply);
    if (info != nullptr) *info = reply.info();
    return status;
  }
  v1::CacheInfo MustCreate(const std::string& name) {
    v1::CacheInfo info;
    const auto status = Create(Request(name), &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }
  grpc::Status Delete(const v1::CacheRef& cache) {
    grpc::ClientContext context;
    v1::DeleteCacheRequest request;
    *request.mutable_cache() = cache;
    v1::DeleteCacheResponse reply;
    return cache_stub_->DeleteCache(&context, request, &reply);
  }

  // Everything in the cache: all pages, then all tails.
  std::string Snapshot(const v1::CacheInfo& info) {
    std::string bytes;
    v1::ReadPagesRequest pages;
    *pages.mutable_cache() = info.cache();
    pages.mutable_layers()->set_count(info.geometry().layers());
    for (int b = 0; b < info.geometry().blocks(); ++b) pages.add_blocks(b);
    grpc::ClientContext context;
    auto reader = cache_stub_->ReadPages(&context, pages);
    for (v1::ReadPagesResponse part; reader->Read(&part);) bytes += part.data();
    EXPECT_TRUE(reader->Finish().ok());
    v1::ReadRingRequest ring;
    *ring.mutable_cache() = info.cache();
    ring.mutable_layers()->set_count(info.geometry().layers());
    for (int b = 0; b < info.geometry().ring_blocks(); ++b) ring.add_ring_blocks(b);
    grpc::ClientContext ring_context;
    auto ring_reader = cache_stub_->ReadRing(&ring_context, ring);
    for (v1::ReadRingResponse part; ring_reader->Read(&part);) bytes += part.data();
    EXPECT_TRUE(ring_reader->Finish().ok());
    return bytes;
  }

  static std::string RandomRows(int layers, int rows, unsigned seed) {
    std::mt19937 random(seed);
    std::string bytes(static_cast<std::size_t>(layers) * rows * kRowBytes, 0);
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      bytes[i] = static_cast<char>(random());
      bytes[i + 1] = static_cast<char>(0x3c + random() % 4 + (random() % 2) * 0x80);
    }
    return bytes;
  }

  // A chunk of `count` rows from position 0, in block 1 on, ring block 1.
  static v1::UpdatePrefillRequest Prefill(const v1::CacheInfo& info, int count, unsigned seed) {
    v1::UpdatePrefillRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    for (int i = 0; i < count; ++i) {
      request.add_slots(16 + i);
      request.add_positions(i);
      request.add_ring_bases(24);
    }
    request.add_query_start_loc(0);
    request.add_query_start_loc(count);
    request.mutable_rows()->set_inline_(RandomRows(2, count, seed));
    return request;
  }
  static v1::UpdateDecodeRequest Decode(const v1::CacheInfo& info, int position, unsigned seed) {
    v1::UpdateDecodeRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    request.add_slots(16 + position);
    request.add_positions(position);
    request.add_ring_bases(24);
    request.mutable_rows()->set_inline_(RandomRows(2, 1, seed));
    return request;
  }

  grpc::Status Send(const v1::UpdatePrefillRequest& request, v1::UpdateResult* result = nullptr) {
    grpc::ClientContext context;
    v1::UpdatePrefillResponse reply;
    const auto status = update_stub_->UpdatePrefill(&context, request, &reply);
    if (result != nullptr) *result = reply.result();
    return status;
  }
  grpc::Status Send(const v1::UpdateDecodeRequest& request) {
    grpc::ClientContext context;
    v1::UpdateDecodeResponse reply;
    return update_stub_->UpdateDecode(&context, request, &reply);
  }

  // The raw answer of a method that takes an empty request.
  grpc::Status CallEmpty(const std::string& method, std::string* reply) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    const grpc::Slice empty;
    const grpc::ByteBuffer request(&empty, 1);
    grpc::ByteBuffer buffer;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, method, grpc::StubOptions(), &request, &buffer,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    auto status = done.get_future().get();
    std::vector<grpc::Slice> slices;
    if (status.ok() && buffer.Dump(&slices).ok()) {
      for (const auto& slice : slices)
        reply->append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return status;
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_stub_;
  std::unique_ptr<v1::UpdateService::Stub> update_stub_;
  std::unique_ptr<v1::AdminService::Stub> admin_stub_;
};

TEST_F(ServerTest, CreateAnswersTheLayout) {
  const auto info = MustCreate("a");
  EXPECT_EQ(info.device(), "host");
  EXPECT_GE(info.cache().generation(), 1000u);
  EXPECT_EQ(info.layout().rows_per_block(), 24);
  // Pages take 10 * 1280 = 12,800 bytes, rings start at the next 4,096 and take 4 * 24 rows.
  EXPECT_EQ(info.layout().total_bytes(), 16384 + 4 * 24 * 1024);
  ASSERT_EQ(info.layout().views_size(), 4);
  const auto& summaries = info.layout().views(2);
  EXPECT_EQ(summaries.kind(), v1::VIEW_KIND_SUMMARY);
  EXPECT_EQ(summaries.layer(), 1);
  EXPECT_EQ(summaries.offset_bytes(), 512);
  EXPECT_EQ(summaries.block_stride_bytes(), 1280);
  EXPECT_EQ(summaries.bytes_per_block(), 512);
  const auto& ring = info.layout().views(3);
  EXPECT_EQ(ring.kind(), v1::VIEW_KIND_RING);
  EXPECT_EQ(ring.offset_bytes(), 16384 + 12 * 1024);
  EXPECT_EQ(ring.block_stride_bytes(), 24 * 1024);
  EXPECT_EQ(ring.bytes_per_block(), 12 * 1024);
}

TEST_F(ServerTest, CreateRefusals) {
  MustCreate("a");
  auto request = Request("a");
  auto status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Details(status), "CACHE_EXISTS name");
  request = Request("b");
  request.set_device("cuda:99");
  status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Details(status), "DEVICE_NOT_FOUND device");
  request = Request("");
  EXPECT_EQ(Details(Create(request)), "NAME_INVALID name");
  request = Request("b");
  request.mutable_geometry()->set_capacity(9);
  EXPECT_EQ(Details(Create(request)), "CAPACITY_TOO_SMALL geometry.capacity");
  request = Request("b");
  request.mutable_geometry()->set_block_stride(8 << 20);
  const std::int64_t used = caches_->devices()[0]->budget().used_bytes();
  status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Details(status), "MEMORY_BUDGET_EXCEEDED quota memory");
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), used);
  EXPECT_TRUE(Create(Request("b")).ok());  // the name was not kept
}

TEST_F(ServerTest, ConcurrentCreatesOfOneNameMakeOneCache) {
  std::vector<std::future<grpc::Status>> calls;
  for (int i = 0; i < 8; ++i)
    calls.push_back(std::async(std::launch::async, [&] { return Create(Request("a")); }));
  int made = 0;
  for (auto& call : calls) {
    const auto status = call.get();
    made += status.ok();
    if (!status.ok()) {
      EXPECT_EQ(Details(status), "CACHE_EXISTS name");
    }
  }
  EXPECT_EQ(made, 1);
}

TEST_F(ServerTest, DeleteFreesAndANewLifeHasAHigherGeneration) {
  const auto first = MustCreate("a");
  EXPECT_GT(caches_->devices()[0]->budget().used_bytes(), 0);
  EXPECT_TRUE(Delete(first.cache()).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  EXPECT_EQ(Details(Delete(first.cache())), "CACHE_NOT_FOUND cache.name");
  const auto second = MustCreate("a");
  EXPECT_GT(second.cache().generation(), first.cache().generation());
  auto status = Delete(first.cache());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Details(status), "GENERATION_STALE cache.generation");
  EXPECT_EQ(Details(Send(Decode(first, 0, 1))), "GENERATION_STALE cache.generation");
  EXPECT_TRUE(Send(Decode(second, 0, 1)).ok());
}

TEST_F(ServerTest, GetAndList) {
  MustCreate("b");
  const auto a = MustCreate("a");
  grpc::ClientContext context;
  v1::ListCachesResponse list;
  ASSERT_TRUE(cache_stub_->ListCaches(&context, {}, &list).ok());
  ASSERT_EQ(list.caches_size(), 2);
  EXPECT_EQ(list.caches(0).SerializeAsString(), a.SerializeAsString());
  EXPECT_EQ(list.caches(1).cache().name(), "b");
  grpc::ClientContext get_context;
  v1::GetCacheRequest get;
  get.set_name("a");
  v1::GetCacheResponse got;
  ASSERT_TRUE(cache_stub_->GetCache(&get_context, get, &got).ok());
  EXPECT_EQ(got.info().SerializeAsString(), a.SerializeAsString());
  grpc::ClientContext none_context;
  get.set_name("c");
  EXPECT_EQ(Details(cache_stub_->GetCache(&none_context, get, &got)), "CACHE_NOT_FOUND cache.name");
}

TEST_F(ServerTest, ACachesFirstBytesAreZero) {
  const auto info = MustCreate("a");
  const std::string bytes = Snapshot(info);
  EXPECT_EQ(bytes.size(), 10u * 2 * 512 + 4 * 2 * 10 * 1024);
  EXPECT_EQ(bytes, std::string(bytes.size(), 0));
}

TEST_F(ServerTest, UpdatesWriteWhatTheKernelsWrite) {
  const auto info = MustCreate("a");
  const auto request = Prefill(info, 21, 7);
  v1::UpdateResult result;
  ASSERT_TRUE(Send(request, &result).ok());
  EXPECT_EQ(result.rows(), 21);
  EXPECT_EQ(result.regions_closed(), 2);
  ASSERT_TRUE(Send(Decode(info, 21, 8)).ok());
  ASSERT_TRUE(Send(Decode(info, 22, 9)).ok());
  ASSERT_TRUE(Send(Decode(info, 23, 10)).ok());

  // The same by the scalar kernels on memory of our own.
  const CacheGeometry g = {.layers = 2,
                           .blocks = 10,
                           .block_size = 16,
                           .block_stride = 1280,
                           .ring_blocks = 4,
                           .capacity = 10,
                           .rows_per_layer = 12,
                           .k = 3};
  std::vector<std::uint64_t> memory(static_cast<std::size_t>(g.total_bytes()) / 8);
  const auto view = MakeView(g, memory.data(), {0, 2});
  PrefillStep prefill;
  prefill.rows = 21;
  prefill.requests = 1;
  prefill.in = PackedRows(request.rows().inline_().data(), 21);
  prefill.slots = request.slots().data();
  prefill.positions = request.positions().data();
  prefill.query_start_loc = request.query_start_loc().data();
  prefill.ring_bases = request.ring_bases().data();
  ScalarKernels().Prefill(view, prefill, {});
  for (int i = 0; i < 3; ++i) {
    const auto decode = Decode(info, 21 + i, 8 + i);
    DecodeStep step;
    step.rows = 1;
    step.in = PackedRows(decode.rows().inline_().data(), 1);
    step.slots = decode.slots().data();
    step.positions = decode.positions().data();
    step.ring_bases = decode.ring_bases().data();
    ScalarKernels().Decode(view, step, {});
  }
  const char* base = reinterpret_cast<const char*>(memory.data());
  std::string want;
  for (int b = 0; b < 10; ++b) want.append(base + g.page_offset(b, 0), 1024);
  for (int b = 0; b < 4; ++b) {
    for (int l = 0; l < 2; ++l) want.append(base + g.ring_row_offset(b, l, 0), 10 * kRowBytes);
  }
  EXPECT_EQ(Snapshot(info), want);
  EXPECT_NE(want, std::string(want.size(), 0));
}

TEST_F(ServerTest, ARefusedUpdateChangesNothing) {
  const auto info = MustCreate("a");
  ASSERT_TRUE(Send(Prefill(info, 21, 1)).ok());
  const std::string before = Snapshot(info);
  using Change = std::function<void(v1::UpdatePrefillRequest&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& r) { r.mutable_cache()->set_name("b"); }, "CACHE_NOT_FOUND cache.name"},
      {[](auto& r) { r.clear_cache(); }, "CACHE_NOT_FOUND cache.name"},
      {[](auto& r) { r.mutable_cache()->set_generation(0); }, "GENERATION_STALE cache.generation"},
      {[](auto& r) { r.clear_layers(); }, "LAYERS_OUT_OF_RANGE layers"},
      {[](auto& r) { r.set_slots(15, 999); }, "SLOT_OUT_OF_RANGE slots[15]"},
      {[](auto& r) { r.set_slots(15, 15); }, "NULL_BLOCK slots[15]"},
      {[](auto& r) { r.set_ring_bases(0, 25); }, "RING_BASE_MISALIGNED ring_bases[0]"},
      {[](auto& r) { r.set_positions(15, 99); }, "SLOT_POSITION_MISMATCH slots[15]"},
      {[](auto& r) { r.set_query_start_loc(1, 15); }, "QUERY_START_LOC_INVALID query_start_loc[1]"},
      {[](auto& r) { r.mutable_rows()->mutable_inline_()->pop_back(); }, "SIZE_MISMATCH rows.inline"},
      {[](auto& r) { r.clear_rows(); }, "SIZE_MISMATCH rows.inline"},
  };
  for (const auto& [change, details] : cases) {
    auto request = Prefill(info, 16, 2);
    change(request);
    EXPECT_EQ(Details(Send(request)), details);
    EXPECT_EQ(Snapshot(info), before) << details;
  }
  EXPECT_EQ(server_->stats().refused_steps, static_cast<std::int64_t>(cases.size()));
  EXPECT_EQ(server_->stats().prefill_steps, 1);
}

TEST_F(ServerTest, AStreamAppliesInOrderAndEndsAtItsFirstRefusal) {
  const auto streamed = MustCreate("streamed");
  const auto unary = MustCreate("unary");
  ASSERT_TRUE(Send(Prefill(unary, 10, 1)).ok());
  for (int p = 10; p < 40; ++p) ASSERT_TRUE(Send(Decode(unary, p, p)).ok());

  grpc::ClientContext context;
  auto stream = update_stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_prefill() = Prefill(streamed, 10, 1);
  ASSERT_TRUE(stream->Write(message));
  for (int p = 10; p < 40; ++p) {
    *message.mutable_decode() = Decode(streamed, p, p);
    ASSERT_TRUE(stream->Write(message));
  }
  auto bad = Decode(streamed, 40, 40);
  bad.set_slots(0, 57);
  *message.mutable_decode() = bad;
  stream->Write(message);
  for (int p = 40; p < 48; ++p) {
    *message.mutable_decode() = Decode(streamed, p, 1);
    stream->Write(message);  // the stream may have ended
  }
  stream->WritesDone();
  int answers = 0;
  for (v1::StreamUpdatesResponse reply; stream->Read(&reply);) ++answers;
  EXPECT_EQ(Details(stream->Finish()), "SLOT_POSITION_MISMATCH slots[0]");
  EXPECT_EQ(answers, 31);
  EXPECT_EQ(Snapshot(streamed), Snapshot(unary));
}

TEST_F(ServerTest, AStreamThatIsHalfClosedAnswersEverything) {
  const auto info = MustCreate("a");
  grpc::ClientContext context;
  auto stream = update_stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  for (int p = 0; p < 50; ++p) {
    *message.mutable_decode() = Decode(info, p, p);
    ASSERT_TRUE(stream->Write(message));
  }
  stream->WritesDone();
  int answers = 0;
  std::int64_t closed = 0;
  for (v1::StreamUpdatesResponse reply; stream->Read(&reply); ++answers)
    closed += reply.result().regions_closed();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answers, 50);
  EXPECT_EQ(closed, 6);
}

TEST_F(ServerTest, AnEmptyStreamMessageIsRefused) {
  grpc::ClientContext context;
  auto stream = update_stub_->StreamUpdates(&context);
  stream->Write({});
  v1::StreamUpdatesResponse reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "FIELD_MISSING update");
}

TEST_F(ServerTest, ReadsComeInTheOrderAskedForAndInParts) {
  auto request = Request("a");
  request.mutable_geometry()->set_blocks(2000);
  request.mutable_geometry()->set_block_size(64);
  request.mutable_geometry()->set_block_stride(4096);
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  v1::WritePagesRequest write;
  *write.mutable_cache() = info.cache();
  write.mutable_layers()->set_count(2);
  std::string all;
  for (int b = 1; b < 2000; ++b) {
    write.add_blocks(b);
    for (int l = 0; l < 2; ++l) all += std::string(2048, static_cast<char>(b * 2 + l));
  }
  write.set_data(all);
  grpc::ClientContext context;
  v1::WritePagesResponse written;
  ASSERT_TRUE(cache_stub_->WritePages(&context, write, &written).ok());

  v1::ReadPagesRequest read;
  *read.mutable_cache() = info.cache();
  read.mutable_layers()->set_first(1);
  read.mutable_layers()->set_count(1);
  std::string want;
  for (int b = 1999; b >= 0; --b) {
    read.add_blocks(b);
    want += std::string(2048, b == 0 ? '\0' : static_cast<char>(b * 2 + 1));
  }
  grpc::ClientContext read_context;
  auto reader = cache_stub_->ReadPages(&read_context, read);
  std::string got;
  int parts = 0;
  for (v1::ReadPagesResponse part; reader->Read(&part); ++parts) {
    EXPECT_EQ(part.first_page() * 2048, static_cast<std::int64_t>(got.size()));
    got += part.data();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(got, want);
  EXPECT_EQ(parts, 4);
}

TEST_F(ServerTest, WritesAreCheckedAndChangeNothingWhenRefused) {
  const auto info = MustCreate("a");
  const auto write = [&](std::vector<std::int64_t> blocks, std::size_t bytes) {
    v1::WritePagesRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    for (const auto b : blocks) request.add_blocks(b);
    request.set_data(std::string(bytes, 'x'));
    grpc::ClientContext context;
    v1::WritePagesResponse reply;
    return Details(cache_stub_->WritePages(&context, request, &reply));
  };
  const auto write_ring = [&](std::int64_t block, std::size_t bytes) {
    v1::WriteRingRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    request.add_ring_blocks(block);
    request.set_data(std::string(bytes, 'x'));
    grpc::ClientContext context;
    v1::WriteRingResponse reply;
    return Details(cache_stub_->WriteRing(&context, request, &reply));
  };
  const std::string before = Snapshot(info);
  EXPECT_EQ(write({1, 0}, 2048), "NULL_BLOCK blocks[1]");
  EXPECT_EQ(write({1, 1}, 2048), "DUPLICATE_BLOCK blocks[1]");
  EXPECT_EQ(write({1, 10}, 2048), "BLOCK_OUT_OF_RANGE blocks[1]");
  EXPECT_EQ(write({1, 2}, 2047), "SIZE_MISMATCH data");
  EXPECT_EQ(write_ring(0, 20480), "NULL_RING_BLOCK ring_blocks[0]");
  EXPECT_EQ(write_ring(4, 20480), "RING_OUT_OF_RANGE ring_blocks[0]");
  EXPECT_EQ(write_ring(1, 24576), "SIZE_MISMATCH data");
  EXPECT_EQ(Snapshot(info), before);
  EXPECT_EQ(write({1, 2}, 2048), "");
  EXPECT_EQ(write_ring(3, 20480), "");
  EXPECT_NE(Snapshot(info), before);
}

TEST_F(ServerTest, ACancelledReadGivesItsCacheBack) {
  auto request = Request("a");
  request.mutable_geometry()->set_blocks(10000);
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  v1::ReadPagesRequest read;
  *read.mutable_cache() = info.cache();
  read.mutable_layers()->set_count(2);
  for (int i = 0; i < 100000; ++i) read.add_blocks(i % 10000);
  grpc::ClientContext context;
  auto reader = cache_stub_->ReadPages(&context, read);
  v1::ReadPagesResponse part;
  ASSERT_TRUE(reader->Read(&part));
  context.TryCancel();
  while (reader->Read(&part)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Delete(info.cache()).ok());
  while (caches_->devices()[0]->budget().used_bytes() > 0) std::this_thread::yield();
}

TEST_F(ServerTest, ACancelledStreamGivesItsCacheBack) {
  const auto info = MustCreate("a");
  grpc::ClientContext context;
  auto stream = update_stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  for (int p = 0; p < 40; ++p) {
    *message.mutable_decode() = Decode(info, p, p);
    ASSERT_TRUE(stream->Write(message));
  }
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Delete(info.cache()).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  server_->Drain(std::chrono::hours(1));  // does not wait for it: the test's own time limit is far below
}

TEST_F(ServerTest, AMessageBeyondTheLimitIsRefusedWithTheLimit) {
  const auto info = MustCreate("a");
  auto request = Decode(info, 0, 1);
  request.mutable_rows()->set_inline_(std::string((64 << 20) + 1, 'x'));
  const auto status = Send(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_message().find("67108864"), std::string::npos) << status.error_message();
  EXPECT_TRUE(Send(Decode(info, 0, 1)).ok());
}

TEST_F(ServerTest, AReaderThatStopsReadingDoesNotKeepADeletedCache) {
  auto request = Request("a");
  request.mutable_geometry()->set_blocks(10000);
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  v1::ReadPagesRequest read;
  *read.mutable_cache() = info.cache();
  read.mutable_layers()->set_count(2);
  for (int i = 0; i < 100000; ++i) read.add_blocks(i % 10000);
  grpc::ClientContext context;
  auto reader = cache_stub_->ReadPages(&context, read);
  v1::ReadPagesResponse part;
  ASSERT_TRUE(reader->Read(&part));
  ASSERT_TRUE(Delete(info.cache()).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  while (reader->Read(&part)) {
  }
  EXPECT_EQ(Details(reader->Finish()), "CACHE_NOT_FOUND cache.name");
}

TEST_F(ServerTest, DeleteIsAnsweredWhenTheLastHolderHasLetGo) {
  const auto info = MustCreate("a");
  auto held = caches_->Find("a");
  ASSERT_TRUE(held.ok());
  auto deleted = std::async(std::launch::async, [&] { return Delete(info.cache()); });
  while (caches_->Find("a").ok()) std::this_thread::yield();
  EXPECT_GT(caches_->devices()[0]->budget().used_bytes(), 0);
  held->reset();
  EXPECT_TRUE(deleted.get().ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
}

TEST_F(ServerTest, ACancelledCreateKeepsNothing) {
  std::promise<void> release;
  Executor& executor = caches_->devices()[0]->executor();
  ASSERT_TRUE(executor.Submit([&] { release.get_future().wait(); }).ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::CreateCacheResponse reply;
  EXPECT_EQ(cache_stub_->CreateCache(&context, Request("a"), &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  // The server sees the deadline by its own clock: a cancelled update that comes later shows that it has.
  EXPECT_EQ(Details(Create(Request("a"))), "CACHE_EXISTS name");
  release.set_value();
  std::promise<void> idle;
  ASSERT_TRUE(executor.Submit([&] { idle.set_value(); }).ok());
  idle.get_future().wait();
  EXPECT_TRUE(caches_->List().empty());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  MustCreate("a");
}

TEST_F(ServerTest, AnAnswerTellsLongNamesInPart) {
  grpc::ClientContext context;
  v1::GetCacheRequest get;
  get.set_name(std::string(1 << 20, 'x'));
  v1::GetCacheResponse reply;
  const auto status = cache_stub_->GetCache(&context, get, &reply);
  EXPECT_EQ(Details(status), "CACHE_NOT_FOUND cache.name");
  auto create = Request("a");
  create.set_device(std::string(1 << 20, '\n'));
  EXPECT_EQ(Details(Create(create)), "DEVICE_NOT_FOUND device");
}

TEST_F(ServerTest, AMalformedStreamMessageIsRefusedByName) {
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto stream = stub.PrepareCall(&context, "/kvsummary.v1.UpdateService/StreamUpdates", &queue);
  void* tag = nullptr;
  bool ok = false;
  stream->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  const grpc::Slice cut("\x0a\x7f");  // an update of 127 bytes that do not follow
  stream->WriteLast(grpc::ByteBuffer(&cut, 1), grpc::WriteOptions(), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  grpc::Status status;
  stream->Finish(&status, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(Details(status), "MESSAGE_MALFORMED");
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

// Writes until nothing moves any more, and never reads. A bound on what the server takes shows as the
// client's writes not ending: its own window and the server's are full.
TEST_F(ServerTest, AClientThatTakesNoAnswersIsNotReadFrom) {
  const auto info = MustCreate("a");
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  auto channel =
      grpc::CreateCustomChannel(server_->addresses()[0], grpc::InsecureChannelCredentials(), arguments);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  auto stub = v1::UpdateService::NewStub(channel);
  auto stream = stub->AsyncStreamUpdates(&context, &queue, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  v1::StreamUpdatesRequest empty;
  *empty.mutable_decode()->mutable_cache() = info.cache();
  empty.mutable_decode()->mutable_layers()->set_count(1);
  constexpr int kMessages = 1 << 20;
  int written = 0;
  for (; written < kMessages; ++written) {
    stream->Write(empty, nullptr);
    // Half a second is far beyond what a write takes that is not held back.
    const auto next =
        queue.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    if (next == grpc::CompletionQueue::TIMEOUT) break;
    ASSERT_TRUE(ok);
  }
  EXPECT_LT(written, kMessages);
  context.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST_F(ServerTest, ADrainDoesNotWaitForWatchesOfTheHealth) {
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto watch = stub.PrepareCall(&context, "/grpc.health.v1.Health/Watch", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  watch->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice none;
  watch->Write(grpc::ByteBuffer(&none, 1), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer serving;
  watch->Read(&serving, nullptr);
  ASSERT_TRUE(next());
  server_->Drain(std::chrono::hours(1));  // the test's own time limit is far below
  context.TryCancel();
  grpc::Status status;
  watch->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST_F(ServerTest, DrainEndsStreamsAndTurnsHealthAndCallsAway) {
  const auto info = MustCreate("a");
  std::string health;
  ASSERT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_EQ(health, std::string("\x08\x01"));  // status = SERVING
  grpc::ClientContext context;
  auto stream = update_stub_->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_decode() = Decode(info, 0, 1);
  ASSERT_TRUE(stream->Write(message));
  v1::StreamUpdatesResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  server_->Drain(std::chrono::minutes(1));  // returns long before: nothing is under way but an idle stream
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "DRAINING");
  EXPECT_EQ(Send(Decode(info, 1, 1)).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, ABrokenDeviceTurnsHealthAway) {
  auto request = Request("a");
  request.set_device("test:0");
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  const auto status = Send(Decode(info, 0, 1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Details(status), "DEVICE_FAILED");
  std::string health;
  ASSERT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_EQ(health, std::string("\x08\x02"));  // status = NOT_SERVING
  EXPECT_EQ(Details(Create(request)), "CACHE_EXISTS name");
  request.set_name("b");
  EXPECT_EQ(Details(Create(request)), "DEVICE_FAILED");
  grpc::ClientContext context;
  v1::ListDevicesResponse devices;
  ASSERT_TRUE(admin_stub_->ListDevices(&context, {}, &devices).ok());
  EXPECT_NE(devices.devices(1).unusable_reason().find("fell off the bus"), std::string::npos);
  EXPECT_TRUE(Create(Request("c")).ok());  // the host still works
}

TEST_F(ServerTest, ADeadlineIsObeyedWhileTheDeviceIsBusy) {
  const auto info = MustCreate("a");
  std::promise<void> release;
  ASSERT_TRUE(caches_->devices()[0]->executor().Submit([&] { release.get_future().wait(); }).ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::UpdateDecodeResponse reply;
  EXPECT_EQ(update_stub_->UpdateDecode(&context, Decode(info, 0, 1), &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  std::string health;  // a busy device starves neither health nor admin
  EXPECT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_TRUE(CallEmpty("/kvsummary.v1.AdminService/GetStats", &health).ok());
  release.set_value();
}

TEST_F(ServerTest, ReflectionAndChannelzAreOn) {
  std::string servers;
  EXPECT_TRUE(CallEmpty("/grpc.channelz.v1.Channelz/GetServers", &servers).ok());
  EXPECT_FALSE(servers.empty());
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto stream =
      stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  stream->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice list_services("\x3a\x01*");  // field 7, "*"
  const grpc::ByteBuffer request(&list_services, 1);
  stream->Write(request, nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer reply;
  stream->Read(&reply, nullptr);
  ASSERT_TRUE(next());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(reply.Dump(&slices).ok());
  std::string text;
  for (const auto& slice : slices) text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  for (const char* name :
       {"kvsummary.v1.CacheService", "kvsummary.v1.UpdateService", "kvsummary.v1.AdminService",
        "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  context.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST_F(ServerTest, SecondServerOnTheSocketIsRefusedAndTheFirstGoesOn) {
  const auto second = Server::Start({.listen = {server_->addresses()[0]}}, *caches_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  MustCreate("a");
}

TEST_F(ServerTest, APortInUseIsRefused) {
  const auto first = Server::Start({.listen = {":0"}}, *caches_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Server::Start({.listen = {(*first)->addresses()[0]}}, *caches_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(second.status().message().find((*first)->addresses()[0]), absl::string_view::npos);
}

}  // namespace
}  // namespace kvsummary
