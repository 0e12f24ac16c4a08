// Updates by messages, one by one and in streams, as clients see them.
#include <gtest/gtest.h>

#include <functional>
#include <future>

#include "server/rpc/server_fixture.h"

namespace kvsummary {
namespace {

using UpdateCallsTest = ServerTest;

TEST_F(UpdateCallsTest, UpdatesWriteWhatTheKernelsWrite) {
  const auto info = MustCreate("a");
  const auto request = PrefillOf(info, 21, 7);
  v1::UpdateResult result;
  ASSERT_TRUE(Send(request, &result).ok());
  EXPECT_EQ(result.rows(), 21);
  EXPECT_EQ(result.regions_closed(), 2);
  ASSERT_TRUE(Send(DecodeOf(info, 21, 8)).ok());
  ASSERT_TRUE(Send(DecodeOf(info, 22, 9)).ok());
  ASSERT_TRUE(Send(DecodeOf(info, 23, 10)).ok());

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
    const auto decode = DecodeOf(info, 21 + i, 8 + i);
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

TEST_F(UpdateCallsTest, ARefusedUpdateChangesNothing) {
  const auto info = MustCreate("a");
  ASSERT_TRUE(Send(PrefillOf(info, 21, 1)).ok());
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
    auto request = PrefillOf(info, 16, 2);
    change(request);
    EXPECT_EQ(Details(Send(request)), details);
    EXPECT_EQ(Snapshot(info), before) << details;
  }
  EXPECT_EQ(server_->stats().refused_steps, static_cast<std::int64_t>(cases.size()));
  EXPECT_EQ(server_->stats().prefill_steps, 1);
}

TEST_F(UpdateCallsTest, AStreamAppliesInOrderAndEndsAtItsFirstRefusal) {
  const auto streamed = MustCreate("streamed");
  const auto unary = MustCreate("unary");
  ASSERT_TRUE(Send(PrefillOf(unary, 10, 1)).ok());
  for (int p = 10; p < 40; ++p) ASSERT_TRUE(Send(DecodeOf(unary, p, p)).ok());

  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_prefill() = PrefillOf(streamed, 10, 1);
  ASSERT_TRUE(stream->Write(message));
  for (int p = 10; p < 40; ++p) {
    *message.mutable_decode() = DecodeOf(streamed, p, p);
    ASSERT_TRUE(stream->Write(message));
  }
  auto bad = DecodeOf(streamed, 40, 40);
  bad.set_slots(0, 57);
  *message.mutable_decode() = bad;
  stream->Write(message);
  for (int p = 40; p < 48; ++p) {
    *message.mutable_decode() = DecodeOf(streamed, p, 1);
    stream->Write(message);  // the stream may have ended
  }
  stream->WritesDone();
  int answers = 0;
  for (v1::StreamUpdatesResponse reply; stream->Read(&reply);) ++answers;
  EXPECT_EQ(Details(stream->Finish()), "SLOT_POSITION_MISMATCH slots[0]");
  EXPECT_EQ(answers, 31);
  EXPECT_EQ(Snapshot(streamed), Snapshot(unary));
}

TEST_F(UpdateCallsTest, AStreamThatIsHalfClosedAnswersEverything) {
  const auto info = MustCreate("a");
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  for (int p = 0; p < 50; ++p) {
    *message.mutable_decode() = DecodeOf(info, p, p);
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

TEST_F(UpdateCallsTest, AnEmptyStreamMessageIsRefused) {
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  stream->Write({});
  v1::StreamUpdatesResponse reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "FIELD_MISSING update");
}

TEST_F(UpdateCallsTest, ACancelledStreamGivesItsCacheBack) {
  const auto info = MustCreate("a");
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  for (int p = 0; p < 40; ++p) {
    *message.mutable_decode() = DecodeOf(info, p, p);
    ASSERT_TRUE(stream->Write(message));
  }
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(client_->Delete(info.cache()).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  server_->Drain(std::chrono::hours(1));  // does not wait for it: the test's own time limit is far below
}

TEST_F(UpdateCallsTest, AMessageBeyondTheLimitIsRefusedWithTheLimit) {
  const auto info = MustCreate("a");
  auto request = DecodeOf(info, 0, 1);
  request.mutable_rows()->set_inline_(std::string((64 << 20) + 1, 'x'));
  const auto status = Send(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_message().find("67108864"), std::string::npos) << status.error_message();
  EXPECT_TRUE(Send(DecodeOf(info, 0, 1)).ok());
}

TEST_F(UpdateCallsTest, AMalformedStreamMessageIsRefusedByName) {
  grpc::GenericStub stub(client_->channel());
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
TEST_F(UpdateCallsTest, AClientThatTakesNoAnswersIsNotReadFrom) {
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

TEST_F(UpdateCallsTest, ADeadlineIsObeyedWhileTheDeviceIsBusy) {
  const auto info = MustCreate("a");
  std::promise<void> release;
  ASSERT_TRUE(caches_->devices()[0]->executor().Submit([&] { release.get_future().wait(); }).ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::UpdateDecodeResponse reply;
  EXPECT_EQ(client_->updates->UpdateDecode(&context, DecodeOf(info, 0, 1), &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  std::string health;  // a busy device starves neither health nor admin
  EXPECT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_TRUE(CallEmpty("/kvsummary.v1.AdminService/GetStats", &health).ok());
  release.set_value();
}

}  // namespace
}  // namespace kvsummary
