// The page store as clients meet it: a real server, real sockets, a clock that the test moves.
#include "server/rpc/prefix_test_fixture.h"

namespace kvsummary {
namespace {

TEST_F(PrefixTest, AnotherEngineLoadsTheBytesThatWerePublished) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  EXPECT_EQ(a.name_space, b.name_space);
  a.Write({5, 3, 7}, 100);
  a.MustPublish(1, 0, {5, 3, 7});
  a.Write({5, 3, 7}, 200);  // recycled

  const auto hit = b.MustLookup(HashesOf(1, 0, 5));
  EXPECT_EQ(hit.hit_blocks(), 3);
  EXPECT_NE(hit.lease_id(), 0u);
  EXPECT_EQ(hit.lease_milliseconds(), 10'000);
  ASSERT_EQ(hit.groups_size(), 1);
  EXPECT_EQ(hit.groups(0).first_block_index(), 0);
  EXPECT_EQ(hit.groups(0).device_pages() + hit.groups(0).host_pages(), 3);

  v1::LoadResponse loaded;
  ASSERT_EQ(ReasonOf(b.Load(b.LoadRequest(hit.lease_id(), 0, {9, 2, 4}), &loaded)), "OK");
  EXPECT_EQ(loaded.loaded(), 3);
  EXPECT_EQ(loaded.loaded_bytes(), 3 * kPageBytes);
  EXPECT_TRUE(loaded.groups().empty());
  EXPECT_EQ(b.Read(9), PageOf(100));
  EXPECT_EQ(b.Read(2), PageOf(101));
  EXPECT_EQ(b.Read(4), PageOf(102));
  EXPECT_EQ(b.Read(1), std::string(kPageBytes, '\0'));
  EXPECT_EQ(b.Release(hit.lease_id()), "OK");
  ExpectClean();
}

TEST_F(PrefixTest, APartOfAHitIsLoadedIntoTheBlocksThatAreNamed) {
  Worker& a = NewWorker();
  a.Write({1, 2, 3, 4}, 10);
  a.MustPublish(1, 0, {1, 2, 3, 4});
  const auto hit = a.MustLookup(HashesOf(1, 0, 4));
  v1::LoadResponse loaded;
  ASSERT_EQ(ReasonOf(a.Load(a.LoadRequest(hit.lease_id(), 1, {8, -1, 9}), &loaded)), "OK");
  EXPECT_EQ(loaded.loaded(), 2);
  EXPECT_EQ(a.Read(8), PageOf(11));
  EXPECT_EQ(a.Read(9), PageOf(13));
}

TEST_F(PrefixTest, EveryTierPathGivesTheSameBytes) {
  options_.store.device_bytes = 256 << 10;  // of the host: some of the pages go down to the other tier
  options_.store.host_bytes = 4 << 20;
  Worker& a = NewWorker();
  constexpr int kPrefixes = 60;
  for (int prefix = 0; prefix < kPrefixes; ++prefix) {
    a.Write({1, 2, 3, 4, 5, 6, 7, 8}, prefix * 8);
    a.MustPublish(prefix, 0, {1, 2, 3, 4, 5, 6, 7, 8});
  }
  std::int64_t device = 0;
  std::int64_t host = 0;
  for (int prefix = kPrefixes - 1; prefix >= 0; --prefix) {  // the last ones have not gone down yet
    const auto hit = a.MustLookup(HashesOf(prefix, 0, 8));
    ASSERT_EQ(hit.hit_blocks(), 8);
    device += hit.groups(0).device_pages();
    host += hit.groups(0).host_pages();
    v1::LoadResponse loaded;
    ASSERT_EQ(ReasonOf(a.Load(a.LoadRequest(hit.lease_id(), 0, {8, 7, 6, 5, 4, 3, 2, 1}), &loaded)), "OK");
    ASSERT_EQ(loaded.loaded(), 8);
    for (int i = 0; i < 8; ++i) ASSERT_EQ(a.Read(8 - i), PageOf(prefix * 8 + i)) << prefix << " " << i;
    EXPECT_EQ(a.Release(hit.lease_id()), "OK");
  }
  EXPECT_GT(device, 0);
  EXPECT_GT(host, 0);
  ExpectClean();
}

TEST_F(PrefixTest, HashesInAnotherOrderOrOfAnotherWidthServeNoPrefix) {
  Worker& a = NewWorker();
  a.Write({1, 2}, 10);
  a.MustPublish(1, 0, {1, 2});
  EXPECT_EQ(a.MustLookup(HashOf(1, 1) + HashOf(1, 0)).hit_blocks(), 0);
  EXPECT_EQ(a.MustLookup(HashOf(1, 1)).hit_blocks(), 0);
  v1::LookupResponse reply;
  EXPECT_EQ(ReasonOf(a.Lookup(a.LookupRequest(""), &reply)), "COUNT_OUT_OF_RANGE");
  EXPECT_EQ(ReasonOf(a.Lookup(a.LookupRequest(HashesOf(1, 0, 2).substr(1)), &reply)), "HASH_WIDTH_INVALID");

  auto request = a.PublishRequest(2, 0, {1});
  request.set_hashes(HashOf(2, 0) + "x");
  EXPECT_EQ(a.PublishReason(request), "HASH_WIDTH_INVALID");
  request = a.PublishRequest(2, 1, {1});
  request.set_parent_hash("short");
  EXPECT_EQ(a.PublishReason(request), "PARENT_HASH_INVALID");
  request = a.PublishRequest(2, 0, {1, 2});
  request.set_hashes(HashOf(1, 1) + HashOf(1, 0));
  EXPECT_EQ(a.PublishReason(request), "CHAIN_MISMATCH");
}

TEST_F(PrefixTest, WhatMustNotBeStoredIsRefusedAndNothingChanges) {
  Worker& a = NewWorker();
  a.Write({1, 2}, 10);
  const auto refused = [&](const char* reason, const std::function<void(v1::PublishRequest&)>& change) {
    auto request = a.PublishRequest(1, 0, {1, 2});
    change(request);
    EXPECT_EQ(a.PublishReason(request), reason);
  };
  refused("NULL_BLOCK", [](auto& r) { r.mutable_groups(0)->set_block_ids(1, 0); });
  refused("BLOCK_OUT_OF_RANGE", [](auto& r) { r.mutable_groups(0)->set_block_ids(1, 10); });
  refused("BLOCK_NOT_COMMITTED", [](auto& r) { r.set_committed_tokens(2 * kBlockTokens - 1); });
  refused("SIZE_MISMATCH", [](auto& r) { r.mutable_groups(0)->add_block_ids(3); });
  refused("GROUP_OUT_OF_RANGE", [](auto& r) { r.mutable_groups(0)->set_group(1); });
  refused("GROUP_OUT_OF_RANGE", [](auto& r) { r.mutable_groups(0)->set_group(-1); });
  refused("PARENT_HASH_INVALID", [](auto& r) { r.set_parent_hash(HashOf(1, 7)); });
  refused("PARENT_HASH_INVALID", [](auto& r) { r.set_first_block_index(3), r.set_committed_tokens(1000); });
  refused("NAMESPACE_NOT_FOUND", [](auto& r) { r.set_namespace_id(r.namespace_id() + 1); });
  refused("CACHE_NOT_FOUND", [](auto& r) { r.mutable_cache()->set_name("none"); });
  refused("GENERATION_STALE", [](auto& r) { r.mutable_cache()->set_generation(1); });
  refused("SESSION_REQUIRED", [](auto& r) { r.clear_session_id(); });
  refused("SESSION_NOT_FOUND", [](auto& r) { r.set_session_id(std::string(16, 'x')); });
  refused("BUFFER_NOT_FOUND", [](auto& r) { r.mutable_ready()->set_buffer_id(77); });
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 2)).hit_blocks(), 0);
  EXPECT_EQ(Check().store().pages(), 0);
  ExpectClean();
}

TEST_F(PrefixTest, ARingGroupIsNeverStored) {
  Worker& a = NewWorker();
  auto declare = a.DeclareRequest("with a ring");
  declare.add_groups()->set_kind(v1::GROUP_KIND_RING);
  ASSERT_EQ(ReasonOf(a.Declare(declare, &a.name_space)), "OK");
  ASSERT_EQ(ReasonOf(a.Bind(a.BindRequest())), "OK");
  auto request = a.PublishRequest(1, 0, {1});
  auto* ring = request.add_groups();
  ring->set_group(1);
  ring->add_block_ids(1);
  EXPECT_EQ(a.PublishReason(request), "RING_GROUP");
  EXPECT_EQ(a.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 0);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  ASSERT_EQ(hit.hit_blocks(), 1);
  EXPECT_EQ(hit.groups_size(), 1) << "the ring has no part in a hit";
}

TEST_F(PrefixTest, WhatMustNotBeLoadedIsRefusedAndNoBlockChanges) {
  Worker& a = NewWorker();
  a.Write({1, 2}, 10);
  a.MustPublish(1, 0, {1, 2});
  const auto hit = a.MustLookup(HashesOf(1, 0, 2));
  const auto refused = [&](const char* reason, const std::function<void(v1::LoadRequest&)>& change) {
    auto request = a.LoadRequest(hit.lease_id(), 0, {5, 6});
    change(request);
    EXPECT_EQ(a.LoadReason(request), reason);
  };
  refused("NULL_BLOCK", [](auto& r) { r.mutable_groups(0)->set_block_ids(0, 0); });
  refused("BLOCK_OUT_OF_RANGE", [](auto& r) { r.mutable_groups(0)->set_block_ids(1, 10); });
  refused("DUPLICATE_BLOCK", [](auto& r) { r.mutable_groups(0)->set_block_ids(1, 5); });
  refused("BLOCK_NOT_LEASED", [](auto& r) { r.mutable_groups(0)->add_block_ids(7); });
  refused("BLOCK_NOT_LEASED", [](auto& r) { r.mutable_groups(0)->set_first_block_index(-1); });
  refused("GROUP_OUT_OF_RANGE", [](auto& r) { r.mutable_groups(0)->set_group(3); });
  refused("LEASE_NOT_FOUND", [](auto& r) { r.set_lease_id(r.lease_id() + 1); });
  refused("LEASE_NOT_FOUND", [](auto& r) { r.set_lease_id(0); });
  refused("NAMESPACE_NOT_FOUND", [](auto& r) { r.set_namespace_id(99); });
  refused("GENERATION_STALE", [](auto& r) { r.mutable_cache()->set_generation(1); });
  EXPECT_EQ(a.Read(5), std::string(kPageBytes, '\0'));
  EXPECT_EQ(a.Read(6), std::string(kPageBytes, '\0'));
}

TEST_F(PrefixTest, AnotherTenantsPagesNeverMatch) {
  Worker& a = NewWorker("tenant a");
  Worker& b = NewWorker("tenant b");
  EXPECT_NE(a.name_space, b.name_space);
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  EXPECT_EQ(b.MustLookup(HashesOf(1, 0, 1)).hit_blocks(), 0);
}

TEST_F(PrefixTest, NothingOfAnotherSessionCanBeUsedByItsNumber) {
  Worker& a = NewWorker("tenant a");
  Worker& b = NewWorker("tenant b");
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));

  auto lookup = b.LookupRequest(HashesOf(1, 0, 1));
  lookup.set_namespace_id(a.name_space);
  v1::LookupResponse found;
  EXPECT_EQ(ReasonOf(b.Lookup(lookup, &found)), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(b.LoadReason(b.LoadRequest(hit.lease_id(), 0, {5})), "LEASE_NOT_FOUND");
  EXPECT_EQ(b.Renew(hit.lease_id(), 1000), "LEASE_NOT_FOUND");
  EXPECT_EQ(b.Release(hit.lease_id()), "OK");
  EXPECT_EQ(a.Renew(hit.lease_id(), 1000), "OK") << "another session's release has no effect";

  auto bind = b.BindRequest();
  *bind.mutable_cache() = a.cache;
  EXPECT_EQ(ReasonOf(b.Bind(bind)), "CACHE_NOT_YOURS");
  auto publish = b.PublishRequest(2, 0, {1});
  *publish.mutable_cache() = a.cache;
  EXPECT_EQ(b.PublishReason(publish), "CACHE_NOT_YOURS");
  auto watch = v1::WatchEventsRequest();
  watch.set_session_id(b.client.session_id);
  watch.set_namespace_id(a.name_space);
  grpc::ClientContext context;
  const auto stream = b.client.prefixes->WatchEvents(&context, watch);
  v1::WatchEventsResponse event;
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(ReasonOf(stream->Finish()), "NAMESPACE_NOT_FOUND");
}

TEST_F(PrefixTest, ANamespaceIsTheSameOnlyWithTheSameGroups) {
  Worker& a = NewWorker();
  Worker& b = NewWorker();
  std::uint64_t id = 0;
  EXPECT_EQ(ReasonOf(b.Declare(b.DeclareRequest(), &id)), "OK");
  EXPECT_EQ(id, a.name_space);
  const auto declared = [&](const std::function<void(v1::DeclareNamespaceRequest&)>& change) {
    auto request = a.DeclareRequest();
    change(request);
    return ReasonOf(a.Declare(request, &id));
  };
  EXPECT_EQ(declared([](auto& r) { r.set_hash_width(32); }), "NAMESPACE_DIFFERS");
  EXPECT_EQ(declared([](auto& r) { r.mutable_groups(0)->set_bytes_per_block(4096); }), "NAMESPACE_DIFFERS");
  EXPECT_EQ(declared([](auto& r) { r.mutable_groups(0)->set_lookahead_blocks(1); }), "NAMESPACE_DIFFERS");
  for (const auto& other : std::vector<std::function<void(v1::NamespaceIdentity&)>>{
           [](auto& i) { i.set_model("other"); }, [](auto& i) { i.set_layers(3); },
           [](auto& i) { i.set_block_size(32); }, [](auto& i) { i.set_layout_version(2); },
           [](auto& i) { i.set_shard_count(2); },
           [](auto& i) { i.set_shard_rank(1), i.set_shard_count(2); }}) {
    EXPECT_EQ(declared([&](auto& r) { other(*r.mutable_identity()); }), "OK");
    EXPECT_NE(id, a.name_space);
  }
  EXPECT_EQ(declared([](auto& r) { r.mutable_groups(0)->set_kind(v1::GROUP_KIND_UNSPECIFIED); }),
            "GROUP_INVALID");
  EXPECT_EQ(declared([](auto& r) { r.clear_groups(); }), "GROUP_INVALID");
  EXPECT_EQ(declared([](auto& r) { r.set_hash_width(7); }), "HASH_WIDTH_INVALID");
  EXPECT_EQ(declared([](auto& r) { r.mutable_identity()->clear_model(); }), "NAME_INVALID");
  EXPECT_EQ(declared([](auto& r) { r.mutable_identity()->set_block_size(12); }), "BLOCK_SIZE_INVALID");
}

TEST_F(PrefixTest, ViewsThatDoNotMakeThePageAreRefused) {
  Worker& a = NewWorker();
  const auto bound = [&](std::uint64_t buffer, std::int64_t offset, std::int64_t stride, std::int64_t bytes) {
    auto request = a.BindRequest();
    auto* view = request.add_groups()->add_views();
    view->set_buffer_id(buffer);
    view->set_offset_bytes(offset);
    view->set_block_stride_bytes(stride);
    view->set_bytes_per_block(bytes);
    return ReasonOf(a.Bind(request));
  };
  EXPECT_EQ(bound(0, 0, kPageBytes, kPageBytes), "OK");
  EXPECT_EQ(bound(0, 0, kPageBytes, kPageBytes / 2), "VIEW_MISMATCH");
  EXPECT_EQ(bound(0, 0, kPageBytes / 2, kPageBytes), "VIEW_MISMATCH") << "blocks overlap";
  EXPECT_EQ(bound(0, -1, kPageBytes, kPageBytes), "BUFFER_RANGE");
  EXPECT_EQ(bound(0, 1 << 20, kPageBytes, kPageBytes), "BUFFER_RANGE");
  EXPECT_EQ(bound(0, 0, std::int64_t{1} << 62, kPageBytes), "BUFFER_RANGE");
  EXPECT_EQ(bound(0, 0, -kPageBytes, kPageBytes), "BUFFER_RANGE");
  EXPECT_EQ(bound(5, 0, kPageBytes, kPageBytes), "BUFFER_NOT_FOUND");
  auto request = a.BindRequest();
  request.add_groups()->set_group(1);
  EXPECT_EQ(ReasonOf(a.Bind(request)), "GROUP_OUT_OF_RANGE");
  auto declare = a.DeclareRequest();
  declare.mutable_identity()->set_block_size(32);
  ASSERT_EQ(ReasonOf(a.Declare(declare, &a.name_space)), "OK");
  EXPECT_EQ(ReasonOf(a.Bind(a.BindRequest())), "BLOCK_SIZE_INVALID");
  EXPECT_EQ(a.PublishReason(a.PublishRequest(1, 0, {1})), "CACHE_NOT_BOUND");
}

TEST_F(PrefixTest, PagesOfSeveralMemoriesAreStoredWhole) {
  Worker& a = NewWorker();
  const auto [id, data] = RegisterBuffer(a);
  auto declare = a.DeclareRequest("with companions");
  declare.mutable_groups(0)->set_bytes_per_block(kPageBytes + 1000);
  ASSERT_EQ(ReasonOf(a.Declare(declare, &a.name_space)), "OK");
  auto bind = a.BindRequest();
  auto* views = bind.add_groups();
  auto* summaries = views->add_views();
  summaries->set_block_stride_bytes(a.block_stride);
  summaries->set_bytes_per_block(kPageBytes);
  auto* companion = views->add_views();  // block b at 8 + 3000 b
  companion->set_buffer_id(id);
  companion->set_offset_bytes(8);
  companion->set_block_stride_bytes(3000);
  companion->set_bytes_per_block(1000);
  ASSERT_EQ(ReasonOf(a.Bind(bind)), "OK");

  a.Write({1}, 10);
  const std::string k = PageOf(99, 1000);
  k.copy(data + 8 + 3000, k.size());
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  ASSERT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "OK");
  EXPECT_EQ(a.Read(2), PageOf(10));
  EXPECT_EQ(std::string(data + 8 + 6000, 1000), k);
  EXPECT_EQ(std::string(data + 8 + 7000, 8), std::string(8, '\0'));

  ASSERT_EQ(ReasonOf(a.client.Unregister(id)), "OK") << "the binding does not keep it";
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "BUFFER_NOT_FOUND");
}

TEST_F(PrefixTest, AWindowGroupNeedsItsWindowOnly) {
  Worker& a = NewWorker();
  auto declare = a.DeclareRequest("with a window");
  auto* window = declare.add_groups();
  window->set_kind(v1::GROUP_KIND_WINDOW);
  window->set_window_tokens(kBlockTokens + 1);
  window->set_bytes_per_block(kPageBytes);
  ASSERT_EQ(ReasonOf(a.Declare(declare, &a.name_space)), "OK");
  ASSERT_EQ(ReasonOf(a.Bind(a.BindRequest())), "OK");
  a.Write({1, 2, 3, 4}, 10);
  auto request = a.PublishRequest(1, 0, {1, 2, 3, 4});
  auto* group = request.add_groups();
  group->set_group(1);
  for (const std::int64_t id : {-1, -1, 3, -1}) group->add_block_ids(id);
  v1::PublishResponse published;
  ASSERT_EQ(ReasonOf(a.Publish(request, &published)), "OK");
  EXPECT_EQ(published.stored(), 5);

  const auto hit = a.MustLookup(HashesOf(1, 0, 4));
  EXPECT_EQ(hit.hit_blocks(), 3) << "block 3 of the window group is missing";
  ASSERT_EQ(hit.groups_size(), 2);
  EXPECT_EQ(hit.groups(1).first_block_index(), 2);
}

TEST_F(PrefixTest, EveryBlockSizeGoesThroughTheStore) {
  Worker& a = NewWorker();
  for (const int block_size : {8, 16, 32, 64, 128, 256, 384, 512}) {
    auto create = TestClient::CacheRequest("cache of " + std::to_string(block_size));
    create.set_name("blocks-" + std::to_string(block_size));
    create.set_session_id(a.client.session_id);
    create.mutable_geometry()->set_block_size(block_size);
    create.mutable_geometry()->set_block_stride(0);
    v1::CreateCacheResponse created;
    grpc::ClientContext create_context;
    ASSERT_EQ(ReasonOf(a.client.caches->CreateCache(&create_context, create, &created)), "OK");
    a.cache = created.info().cache();
    const std::int64_t bytes = 2 * block_size / 8 * 256;
    auto declare = a.DeclareRequest();
    declare.mutable_identity()->set_block_size(block_size);
    declare.mutable_groups(0)->set_bytes_per_block(bytes);
    ASSERT_EQ(ReasonOf(a.Declare(declare, &a.name_space)), "OK");
    ASSERT_EQ(ReasonOf(a.Bind(a.BindRequest())), "OK");

    v1::WritePagesRequest write;
    *write.mutable_cache() = a.cache;
    write.add_blocks(3);
    write.mutable_layers()->set_count(2);
    write.set_data(PageOf(block_size, bytes));
    v1::WritePagesResponse written;
    grpc::ClientContext write_context;
    ASSERT_EQ(ReasonOf(a.client.caches->WritePages(&write_context, write, &written)), "OK");
    auto publish = a.PublishRequest(1, 0, {3});
    publish.set_committed_tokens(block_size - 1);
    EXPECT_EQ(a.PublishReason(publish), "BLOCK_NOT_COMMITTED");
    publish.set_committed_tokens(block_size);
    EXPECT_EQ(a.PublishReason(publish), "OK");
    const auto hit = a.MustLookup(HashesOf(1, 0, 1));
    ASSERT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {7})), "OK");
    EXPECT_EQ(a.Read(7), PageOf(block_size, bytes)) << block_size;
  }
  ExpectClean();
}

TEST_F(PrefixTest, AStaleGenerationNeitherPublishesNorLoads) {
  Worker& a = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  ASSERT_EQ(ReasonOf(a.client.Delete(a.cache)), "OK");
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "CACHE_NOT_FOUND");
  v1::CacheInfo again;
  ASSERT_EQ(ReasonOf(a.client.Create(a.cache.name(), &again)), "OK");
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "GENERATION_STALE");
  EXPECT_EQ(a.PublishReason(a.PublishRequest(2, 0, {1})), "GENERATION_STALE");
  a.cache = again.cache();
  EXPECT_EQ(a.PublishReason(a.PublishRequest(2, 0, {1})), "CACHE_NOT_BOUND");
  ASSERT_EQ(ReasonOf(a.Bind(a.BindRequest())), "OK");
  EXPECT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "OK");
  EXPECT_EQ(a.Read(2), PageOf(10));
}

TEST_F(PrefixTest, ABindingDoesNotKeepADeletedCachesMemory) {
  Worker& a = NewWorker();
  const std::int64_t before = caches_->devices()[0]->budget().used_bytes();
  v1::CacheInfo info;
  ASSERT_EQ(ReasonOf(a.client.Create("another", &info)), "OK");
  a.cache = info.cache();
  ASSERT_EQ(ReasonOf(a.Bind(a.BindRequest())), "OK");
  ASSERT_EQ(ReasonOf(a.client.Delete(a.cache)), "OK");
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), before);
}

TEST_F(PrefixTest, APageThatIsPresentIsNotCopiedAgain) {
  Worker& a = NewWorker();
  a.Write({1}, 10);
  a.MustPublish(1, 0, {1});
  a.Write({1}, 20);
  v1::PublishResponse reply;
  ASSERT_EQ(ReasonOf(a.Publish(a.PublishRequest(1, 0, {1}), &reply)), "OK");
  EXPECT_EQ(reply.stored(), 0);
  EXPECT_EQ(reply.present(), 1);
  const auto hit = a.MustLookup(HashesOf(1, 0, 1));
  ASSERT_EQ(a.LoadReason(a.LoadRequest(hit.lease_id(), 0, {2})), "OK");
  EXPECT_EQ(a.Read(2), PageOf(10)) << "a page is immutable once visible";
}

}  // namespace
}  // namespace kvsummary
