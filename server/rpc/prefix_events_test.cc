// The stream of events.
#include "server/rpc/prefix_test_fixture.h"

namespace kvsummary {
namespace {

using PrefixEventsTest = PrefixTest;

// Reads events until there are `count`, and ends the stream.
std::vector<v1::WatchEventsResponse> Watch(Worker& worker, std::uint64_t from, std::size_t count) {
  v1::WatchEventsRequest request;
  request.set_session_id(worker.client.session_id);
  request.set_namespace_id(worker.name_space);
  request.set_from_sequence(from);
  grpc::ClientContext context;
  const auto stream = worker.client.prefixes->WatchEvents(&context, request);
  std::vector<v1::WatchEventsResponse> events;
  v1::WatchEventsResponse event;
  while (events.size() < count && stream->Read(&event)) events.push_back(event);
  context.TryCancel();
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
  return events;
}

TEST_F(PrefixEventsTest, EventsTellWhatCanBeFetchedAndGoOnFromANumber) {
  Worker& a = NewWorker();
  auto early = std::async(std::launch::async, [&] { return Watch(a, 0, 2); });
  a.Write({1, 2, 3}, 10);
  a.MustPublish(1, 0, {1, 2});
  a.MustPublish(1, 2, {3});
  const auto events = early.get();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].stored().hashes(), HashesOf(1, 0, 2));
  EXPECT_EQ(events[0].stored().parent_hash(), "");
  EXPECT_EQ(events[0].stored().first_block_index(), 0);
  EXPECT_EQ(events[1].sequence(), events[0].sequence() + 1);
  EXPECT_EQ(events[1].stored().hashes(), HashesOf(1, 2, 1));
  EXPECT_EQ(events[1].stored().parent_hash(), HashOf(1, 1));
  EXPECT_EQ(events[1].stored().first_block_index(), 2);

  const auto again = Watch(a, events[1].sequence(), 1);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].SerializeAsString(), events[1].SerializeAsString());
}

TEST_F(PrefixEventsTest, WhatIsEvictedIsToldAndCannotBeFoundAnyMore) {
  options_.store.host_bytes = 64 * kPageBytes;
  Worker& a = NewWorker();
  a.Write({1, 2}, 10);
  a.MustPublish(0, 0, {1, 2});
  for (int prefix = 1; prefix < 200; ++prefix) a.MustPublish(prefix, 0, {1, 2});
  EXPECT_EQ(a.MustLookup(HashesOf(0, 0, 2)).hit_blocks(), 0);
  bool told = false;
  for (const auto& event : Watch(a, 0, 200)) {
    if (event.has_removed() && event.removed().hashes().find(HashOf(0, 1)) != std::string::npos) told = true;
  }
  EXPECT_TRUE(told);
  ExpectClean();
}

TEST_F(PrefixEventsTest, EventsThatAreNoLongerKeptAreAnnouncedAsAGap) {
  options_.store.event_log_bytes = 2048;
  options_.store.first_sequence = 1000;
  Worker& a = NewWorker();
  a.Write({1}, 10);
  for (int prefix = 0; prefix < 200; ++prefix) a.MustPublish(prefix, 0, {1});
  const auto events = Watch(a, 1000, 2);
  ASSERT_EQ(events.size(), 2u);
  ASSERT_TRUE(events[0].has_gap());
  EXPECT_EQ(events[0].gap().from_sequence(), 1000u);
  EXPECT_EQ(events[0].gap().to_sequence(), events[1].sequence());
  EXPECT_GT(events[1].sequence(), 1000u);
}

TEST_F(PrefixEventsTest, AWatchEndsWithItsSessionAndWithTheDaemon) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  const auto watch = [&](Worker& worker, grpc::ClientContext& context) {
    v1::WatchEventsRequest request;
    request.set_session_id(worker.client.session_id);
    request.set_namespace_id(worker.name_space);
    return worker.client.prefixes->WatchEvents(&context, request);
  };
  grpc::ClientContext of_a;
  grpc::ClientContext of_b;
  const auto stream_a = watch(a, of_a);
  const auto stream_b = watch(b, of_b);
  b.Write({1}, 10);
  b.MustPublish(1, 0, {1});
  v1::WatchEventsResponse event;
  ASSERT_TRUE(stream_a->Read(&event));
  ASSERT_TRUE(stream_b->Read(&event));
  a.client.Close();
  EXPECT_FALSE(stream_a->Read(&event));
  EXPECT_EQ(ReasonOf(stream_a->Finish()), "SESSION_ENDED");
  auto draining = std::async(std::launch::async, [&] { server_->Drain(std::chrono::seconds(10)); });
  EXPECT_FALSE(stream_b->Read(&event));
  EXPECT_EQ(ReasonOf(stream_b->Finish()), "DRAINING");
  draining.get();
}

TEST_F(PrefixEventsTest, ASessionHasABoundedNumberOfWatches) {
  Worker& a = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  v1::WatchEventsRequest request;
  request.set_session_id(a.client.session_id);
  request.set_namespace_id(a.name_space);
  struct Watch {
    ~Watch() {
      context.TryCancel();
      if (stream != nullptr) stream->Finish();
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>> stream;
  };
  // "OK" once there is an event: the watch is there then.
  const auto begin = [&](Watch& watch) {
    watch.stream = a.client.prefixes->WatchEvents(&watch.context, request);
    v1::WatchEventsResponse event;
    if (watch.stream->Read(&event)) return std::string("OK");
    return ReasonOf(std::exchange(watch.stream, nullptr)->Finish());
  };
  std::vector<Watch> watches(kMaxListenersPerSession);
  for (Watch& watch : watches) ASSERT_EQ(begin(watch), "OK");
  Watch refused;
  EXPECT_EQ(begin(refused), "SESSION_LIMIT");
  Worker& b = NewWorker();
  request.set_session_id(b.client.session_id);
  Watch of_b;
  EXPECT_EQ(begin(of_b), "OK");
  request.set_session_id(a.client.session_id);
  // One that has ended makes room as soon as the daemon knows.
  watches[3].context.TryCancel();
  while (true) {
    Watch again;
    if (begin(again) == "OK") break;
    std::this_thread::yield();
  }
}

}  // namespace
}  // namespace kvsummary
