// Updates that wait for a counter in shared memory: their order, and every way in which a wait ends.
#include <gtest/gtest.h>

#include <future>
#include <vector>

#include "server/rpc/shared_plane_fixture.h"

namespace kvsummary {
namespace {

using SharedWaitTest = SharedPlaneTest;

TEST_F(SharedWaitTest, NothingIsReadBeforeReadyAndDoneComesAfterAll) {
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

TEST_F(SharedWaitTest, AWaitEndsAtTheLimit) {
  auto call = SendAsync(Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  UntilHeld(worker_, kWaiting);
  while (Pending(call)) seconds_ += 60;
  const auto status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Details(status), "WAIT_TIMEOUT shared.ready");
  UntilHeld(worker_, 0);
}

TEST_F(SharedWaitTest, AWaitEndsWithItsCall) {
  grpc::ClientContext context;
  auto call = std::async(std::launch::async, [&] {
    return kvsummary::Send(*client_->updates, &context, Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  });
  UntilHeld(worker_, kWaiting);
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  UntilHeld(worker_, 0);
  grpc::ClientContext brief;
  brief.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  EXPECT_EQ(kvsummary::Send(*client_->updates, &brief, Ordered(Shared(Decode(0, 1), worker_), worker_, 1))
                .error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  UntilHeld(worker_, 0);
}

TEST_F(SharedWaitTest, AWaitEndsWithItsSession) {
  auto call = SendAsync(Ordered(Shared(Decode(0, 1), worker_), worker_, 1));
  UntilHeld(worker_, kWaiting);
  server_->sessions().End(worker_.session);
  const auto status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Details(status), "SESSION_ENDED shared.session_id");
  while (worker_.buffer.use_count() > 1) std::this_thread::yield();
}

TEST_F(SharedWaitTest, AStepThatIsQueuedWhenItsSessionEndsIsNotApplied) {
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

TEST_F(SharedWaitTest, AWorkerThatDiesBetweenAnnouncedAndReadyStopsNobody) {
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

TEST_F(SharedWaitTest, WaitsOfASessionAreBounded) {
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

TEST_F(SharedWaitTest, AWaitingStepHoldsBackItsStreamAndOnlyThat) {
  for (int p = 0; p < 24; ++p) ASSERT_TRUE(Send(Decode(p, p)).ok());
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
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

TEST_F(SharedWaitTest, AStreamEndsAtAWaitThatTimesOutOrIsCancelled) {
  v1::StreamUpdatesRequest message;
  v1::StreamUpdatesResponse reply;
  const std::string before = Snapshot(shared_);
  {
    grpc::ClientContext context;
    auto stream = client_->updates->StreamUpdates(&context);
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
    auto stream = client_->updates->StreamUpdates(&context);
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

TEST_F(SharedWaitTest, DrainEndsAStreamThatWaits) {
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_decode() = Ordered(Shared(Decode(0, 1), worker_), worker_, 1);
  ASSERT_TRUE(stream->Write(message));
  UntilHeld(worker_, kWaiting);
  server_->Drain(std::chrono::minutes(1));  // returns long before
  v1::StreamUpdatesResponse reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "DRAINING");
}

TEST_F(SharedWaitTest, AStepOfManyRowsIsCheckedElsewhere) {
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
