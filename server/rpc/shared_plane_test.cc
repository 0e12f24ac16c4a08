// Updates by reference to shared memory: the bytes they write, and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "server/rpc/shared_plane_fixture.h"

namespace kvsummary {
namespace {

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
  const auto theirs = CreateOwned("theirs", other);
  auto request = Shared(Prefill(21, 1), worker_);
  *request.mutable_cache() = theirs.cache();
  const std::string before = Snapshot(theirs);
  EXPECT_EQ(Details(Send(request)), "CACHE_NOT_YOURS cache.name");
  EXPECT_EQ(Snapshot(theirs), before);
}

}  // namespace
}  // namespace kvsummary
