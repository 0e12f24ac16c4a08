// What happens to publishes, loads, leases and watches when counters, clocks, sessions and the daemon come in
// between.
#include "server/rpc/prefix_test_fixture.h"

namespace kvsummary {
namespace {

using PrefixOrderTest = PrefixTest;

grpc::Status Finish(std::future<grpc::Status>& call) { return call.get(); }

TEST_F(PrefixOrderTest, APublishWaitsForItsCounter) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 5);
  a.Write({1}, 10);
  auto request = a.PublishRequest(1, 0, {1});
  *request.mutable_ready() = ready.value;
  v1::PublishResponse reply;
  auto call = std::async(std::launch::async, [&] { return a.Publish(request, &reply); });
  while (a.client.ListSessions().sessions(0).waits() == 0) std::this_thread::yield();
  a.Write({1}, 20);  // what the block holds when the counter gets there
  ready.Set(5);
  ASSERT_EQ(ReasonOf(Finish(call)), "OK");
  EXPECT_EQ(reply.stored(), 1);
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  ASSERT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "OK");
  EXPECT_EQ(a.Read(2), PageOf(20));
}

TEST_F(PrefixOrderTest, ALoadWaitsForItsCounterAndSetsTheOther) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 5);
  auto done = MakeCounter(a, 9);
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  auto request = a.LoadRequest(hit.lease_id(), 0, {2});
  *request.mutable_ready() = ready.value;
  *request.mutable_done() = done.value;
  v1::LoadResponse reply;
  auto call = std::async(std::launch::async, [&] { return a.Load(request, &reply); });
  while (a.client.ListSessions().sessions(0).waits() == 0) std::this_thread::yield();
  EXPECT_EQ(a.Read(2), std::string(kPageBytes, '\0'));
  EXPECT_EQ(done.Get(), 0u);
  ready.Set(6);
  ASSERT_EQ(ReasonOf(Finish(call)), "OK");
  EXPECT_EQ(done.Get(), 9u);
  EXPECT_EQ(a.Read(2), PageOf(10));

  auto refused = a.LoadRequest(hit.lease_id(), 0, {0});
  *refused.mutable_done() = done.value;
  refused.mutable_done()->set_value(10);
  EXPECT_EQ(a.LoadReason(refused), "NULL_BLOCK");
  EXPECT_EQ(done.Get(), 9u) << "only what has happened is told";
}

TEST_F(PrefixOrderTest, AReadOfPagesWaitsForItsCounter) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 1);
  v1::ReadPagesRequest request;
  *request.mutable_cache() = a.cache;
  request.add_blocks(1);
  request.mutable_layers()->set_count(2);
  request.set_session_id(a.client.session_id);
  *request.mutable_ready() = ready.value;
  grpc::ClientContext context;
  const auto reader = a.client.caches->ReadPages(&context, request);
  while (a.client.ListSessions().sessions(0).waits() == 0) std::this_thread::yield();
  a.Write({1}, 10);
  ready.Set(1);
  v1::ReadPagesResponse part;
  std::string data;
  while (reader->Read(&part)) data += part.data();
  EXPECT_EQ(ReasonOf(reader->Finish()), "OK");
  EXPECT_EQ(data, PageOf(10));

  request.mutable_ready()->set_offset_bytes(4);
  grpc::ClientContext misaligned;
  const auto refused = a.client.caches->ReadPages(&misaligned, request);
  EXPECT_FALSE(refused->Read(&part));
  EXPECT_EQ(ReasonOf(refused->Finish()), "BUFFER_RANGE");
  request.set_session_id("");
  grpc::ClientContext without_session;
  const auto anonymous = a.client.caches->ReadPages(&without_session, request);
  EXPECT_FALSE(anonymous->Read(&part));
  EXPECT_EQ(ReasonOf(anonymous->Finish()), "SESSION_REQUIRED");
}

TEST_F(PrefixOrderTest, ACancelledWaitEndsItsCall) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 5);
  auto request = a.PublishRequest(1, 0, {1});
  *request.mutable_ready() = ready.value;
  grpc::ClientContext context;
  v1::PublishResponse reply;
  auto call =
      std::async(std::launch::async, [&] { return a.client.prefixes->Publish(&context, request, &reply); });
  while (a.client.ListSessions().sessions(0).waits() == 0) std::this_thread::yield();
  context.TryCancel();
  EXPECT_EQ(Finish(call).error_code(), grpc::CANCELLED);
  while (a.client.ListSessions().sessions(0).waits() != 0) std::this_thread::yield();
  ready.Set(5);
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 0);
}

TEST_F(PrefixOrderTest, ALeaseEndsAtItsDeadlineUnlessItIsRenewed) {
  Worker& a = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  now_ms_ += 9'000;
  EXPECT_EQ(a.Renew(hit.lease_id(), 5'000), "OK");
  now_ms_ += 4'999;
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "OK");
  now_ms_ += 2;
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {3})), "LEASE_NOT_FOUND");
  EXPECT_EQ(a.Renew(hit.lease_id(), 5'000), "LEASE_NOT_FOUND");
  EXPECT_EQ(a.Release(hit.lease_id()), "OK");
  EXPECT_EQ(a.Release(hit.lease_id()), "OK") << "releasing is idempotent";
  EXPECT_EQ(a.Read(3), std::string(kPageBytes, '\0'));
  ExpectClean();
}

TEST_F(PrefixOrderTest, NoLeaseIsLongerThanTheDaemonsLimit) {
  options_.store.max_lease = std::chrono::milliseconds(3'000);
  Worker& a = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 1)).lease_milliseconds(), 3'000);
  auto request = a.LookupRequest(HashesOf(1, 0, 1));
  request.set_lease_milliseconds(0);
  v1::LookupResponse reply;
  EXPECT_EQ(ReasonOf(a.Lookup(request, &reply)), "OK");
  EXPECT_EQ(reply.lease_milliseconds(), 3'000);
  request.set_lease_milliseconds(-1);
  EXPECT_EQ(ReasonOf(a.Lookup(request, &reply)), "COUNT_OUT_OF_RANGE");
  request.set_lease_milliseconds(1);
  request.set_device("cuda:7");
  EXPECT_EQ(ReasonOf(a.Lookup(request, &reply)), "DEVICE_NOT_FOUND");
}

// The lease is good when the load begins and over before its copy has: the pages stay until it ends, though
// others want their room.
TEST_F(PrefixOrderTest, ALeaseThatExpiresDuringALoadKeepsItsPages) {
  options_.store.host_bytes = 64 * kPageBytes;
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  a.Write({1, 2}, 10);
  a.MustPublish(1, 0, {1, 2});
  const auto hit = a.MustLookup(HashesOf(1, 0, 2));

  auto executor = HoldExecutor();
  const std::int64_t reads = clock_reads_;
  v1::LoadResponse loaded;
  auto call = std::async(std::launch::async, [&] {
    return a.Load(a.LoadRequest(hit.lease_id(), 0, {5, 6}), &loaded);
  });
  while (clock_reads_ == reads) std::this_thread::yield();  // it has looked at the lease
  now_ms_ += 60'000;
  EXPECT_EQ(b.MustLookup(HashesOf(9, 0, 1)).hit_blocks(), 0);  // the store takes note of the time
  auto evicting = std::async(std::launch::async, [&] {
    v1::PublishResponse reply;
    for (int prefix = 100; prefix < 200; ++prefix) {
      const auto status = b.Publish(b.PublishRequest(prefix, 0, {1, 2}), &reply);
      if (!status.ok()) return status;
    }
    return grpc::Status::OK;
  });
  executor.set_value();
  ASSERT_EQ(ReasonOf(Finish(call)), "OK");
  EXPECT_EQ(loaded.loaded(), 2);
  EXPECT_EQ(ReasonOf(Finish(evicting)), "OK");
  EXPECT_EQ(a.Read(5), PageOf(10));
  EXPECT_EQ(a.Read(6), PageOf(11));
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {5, 6})), "LEASE_NOT_FOUND");
  ExpectClean();
}

TEST_F(PrefixOrderTest, LeasesEndWithTheirSession) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 1);
  EXPECT_EQ(b.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 1);
  EXPECT_EQ(Check().store().leases(), 2);
  a.client.Close();
  AwaitSessions(1);
  while (Check().store().leases() != 1) std::this_thread::yield();
  ExpectClean();
  b.client.Close();
  AwaitSessions(0);
  while (Check().store().leases() != 0) std::this_thread::yield();
  EXPECT_EQ(Pinned(), 0);
  ExpectClean();
}

TEST_F(PrefixOrderTest, APublishWhoseSessionEndsLeavesNothing) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  a.Write({1, 2}, 10);
  auto executor = HoldExecutor();
  v1::PublishResponse reply;
  auto call = std::async(std::launch::async, [&] {
    return a.Publish(a.PublishRequest(1, 0, {1, 2}), &reply);
  });
  while (Pinned() == 0) std::this_thread::yield();  // room is taken, nothing is copied
  EXPECT_EQ(b.MustLookup(HashesOf(1, 0, 2)).hit_blocks(), 0);
  a.client.Close();
  AwaitDetached(a.cache.name());
  executor.set_value();
  EXPECT_EQ(ReasonOf(Finish(call)), "SESSION_ENDED");
  EXPECT_EQ(b.MustLookup(HashesOf(1, 0, 2)).hit_blocks(), 0);
  EXPECT_EQ(Check().store().pages(), 0);
  EXPECT_EQ(Pinned(), 0);
  ExpectClean();
}

// A cache that its next owner has got is not written by what its last owner had asked for.
TEST_F(PrefixOrderTest, ALoadDoesNotOutliveItsSessionIntoTheNextGeneration) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  auto executor = HoldExecutor();
  const std::int64_t reads = clock_reads_;
  v1::LoadResponse reply;
  auto call =
      std::async(std::launch::async, [&] { return a.Load(a.LoadRequest(hit.lease_id(), 0, {5}), &reply); });
  while (clock_reads_ == reads) std::this_thread::yield();
  a.client.Close();
  AwaitDetached(a.cache.name());
  v1::CacheInfo taken;
  auto attach = std::async(std::launch::async, [&] { return b.client.Attach(a.cache.name(), &taken); });
  executor.set_value();
  EXPECT_EQ(ReasonOf(Finish(call)), "SESSION_ENDED");
  ASSERT_EQ(ReasonOf(Finish(attach)), "OK");
  b.cache = taken.cache();
  EXPECT_EQ(b.Read(5), std::string(kPageBytes, '\0'));
  ExpectClean();
}

TEST_F(PrefixOrderTest, ANamespaceIsKeptToItsQuota) {
  options_.store.namespace_quota_bytes = 16 * kPageBytes;
  Worker& a = NewWorker("tenant a");
  Worker& b = NewWorker("tenant b");
  a.Write({1, 2, 3, 4, 5, 6, 7, 8}, 10);
  b.Write({1}, 50);
  b.MustPublish(1, 0, {1});
  for (int prefix = 0; prefix < 10; ++prefix) a.MustPublish(prefix, 0, {1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(b.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 1) << "a tenant at its quota evicts its own pages";

  const auto all = a.MustLookup(HashesOf(9, 0, 8));
  const auto rest = a.MustLookup(HashesOf(8, 0, 8));
  EXPECT_EQ(all.hit_blocks() + rest.hit_blocks(), 16);
  v1::PublishResponse reply;
  const auto status = a.Publish(a.PublishRequest(20, 0, {1}), &reply);
  EXPECT_EQ(ReasonOf(status), "QUOTA_EXCEEDED") << "all its pages are leased";
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  google::rpc::Status details;
  google::rpc::QuotaFailure quota;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  bool told = false;
  for (const auto& any : details.details()) told = told || any.UnpackTo(&quota);
  EXPECT_TRUE(told);

  v1::ListNamespacesResponse namespaces;
  grpc::ClientContext context;
  ASSERT_TRUE(a.client.prefixes->ListNamespaces(&context, {}, &namespaces).ok());
  ASSERT_EQ(namespaces.namespaces_size(), 2);
  EXPECT_EQ(namespaces.namespaces(0).pages(), 16);
  EXPECT_EQ(namespaces.namespaces(0).used_bytes(), 16 * kPageBytes);
  EXPECT_EQ(namespaces.namespaces(0).quota_bytes(), 16 * kPageBytes);
  EXPECT_EQ(namespaces.namespaces(0).identity().salt(), "");
  EXPECT_EQ(namespaces.namespaces(1).pages(), 1);
  ExpectClean();
}

TEST_F(PrefixOrderTest, AStoreWithoutMemoryTakesNothing) {
  options_.store.host_bytes = 0;
  Worker& a = NewWorker();
  EXPECT_EQ(a.PublishReason(a.PublishRequest(1, 0, {1})), "STORE_FULL");
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 0);
  ExpectClean();
}

TEST_F(PrefixOrderTest, ADrainingDaemonTakesNoNewCalls) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 1);
  a.Write({1}, 10);
  auto request = a.PublishRequest(1, 0, {1});
  *request.mutable_ready() = ready.value;
  v1::PublishResponse reply;
  auto call = std::async(std::launch::async, [&] { return a.Publish(request, &reply); });
  while (a.client.ListSessions().sessions(0).waits() == 0) std::this_thread::yield();
  auto draining = std::async(std::launch::async, [&] { server_->Drain(std::chrono::seconds(10)); });
  v1::LookupResponse found;
  while (ReasonOf(a.Lookup(a.LookupRequest(HashesOf(1, 0, 1)), &found)) != "DRAINING")
    std::this_thread::yield();
  EXPECT_EQ(a.PublishReason(a.PublishRequest(2, 0, {1})), "DRAINING");
  ready.Set(1);
  EXPECT_EQ(ReasonOf(Finish(call)), "OK") << "what is under way may end";
  draining.get();
}

TEST_F(PrefixOrderTest, ARepeatedPublishIsAnsweredAndNotDoneAgain) {
  Worker& a = NewWorker();
  a.Write({1}, 10);
  auto request = a.PublishRequest(1, 0, {1});
  request.set_request_id(7);
  v1::PublishResponse reply;
  ASSERT_EQ(ReasonOf(a.Publish(request, &reply)), "OK");
  EXPECT_EQ(reply.stored(), 1);
  // The blocks may hold something else by now: even of hashes that are not stored nothing is copied.
  request.set_hashes(HashOf(2, 0));
  ASSERT_EQ(ReasonOf(a.Publish(request, &reply)), "OK");
  EXPECT_EQ(reply.stored(), 1);
  EXPECT_EQ(a.MustLookup(HashOf(2, 0)).hit_blocks(), 0);
  auto bad = a.PublishRequest(3, 0, {0});
  bad.set_request_id(8);
  EXPECT_EQ(a.PublishReason(bad), "NULL_BLOCK");
  auto good = a.PublishRequest(3, 0, {1});
  good.set_request_id(8);
  EXPECT_EQ(a.PublishReason(good), "OK") << "one that failed has no answer to repeat";
  EXPECT_EQ(a.MustLookup(HashOf(3, 0)).hit_blocks(), 1);
}

// Nobody sets the counter of what has been answered, and it may not even be there any more.
TEST_F(PrefixOrderTest, ARepeatedPublishDoesNotWait) {
  Worker& a = NewWorker();
  auto ready = MakeCounter(a, 5);
  a.Write({1}, 10);
  auto request = a.PublishRequest(1, 0, {1});
  request.set_request_id(7);
  v1::PublishResponse reply;
  ASSERT_EQ(ReasonOf(a.Publish(request, &reply)), "OK");
  *request.mutable_ready() = ready.value;  // never reached
  reply.Clear();
  ASSERT_EQ(ReasonOf(a.Publish(request, &reply)), "OK");
  EXPECT_EQ(reply.stored(), 1);
  request.mutable_ready()->set_buffer_id(12345);
  EXPECT_EQ(a.PublishReason(request), "OK");
  ASSERT_EQ(ReasonOf(a.client.Delete(a.cache)), "OK");
  EXPECT_EQ(a.PublishReason(request), "OK");
  // What is not known waits, or is refused.
  request.set_request_id(8);
  EXPECT_EQ(a.PublishReason(request), "BUFFER_NOT_FOUND");
  request.set_request_id(7);
  request.set_namespace_id(request.namespace_id() + 1);
  EXPECT_EQ(a.PublishReason(request), "BUFFER_NOT_FOUND");
}

}  // namespace
}  // namespace kvsummary
