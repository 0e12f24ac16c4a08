#include "server/store/page_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using testing::Engine;
using testing::Gate;
using testing::HashesOf;
using testing::HashOf;
using testing::SimpleSpec;

using PageStoreTest = testing::StoreTest;

TEST_F(PageStoreTest, BytesInAreBytesOutForAllBlockSizes) {
  Make({.host_bytes = 8 << 20});
  for (const std::int32_t block_size : {8, 16, 32, 64, 128, 256, 384, 512}) {
    NamespaceSpec spec = SimpleSpec(block_size / 8 * 256 * 3);
    spec.key.block_size = block_size;
    const NamespaceId ns = Declare(spec);
    Engine engine(device(0), spec, 8, 3);
    const auto published = Run(ArgsOf(Bind(ns, engine), engine, 1, 0, 6));
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->stored, 6);
    EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 9), 6) << block_size;
  }
}

TEST_F(PageStoreTest, BytesInAreBytesOutForOddPageSizesAndHashWidths) {
  Make({.host_bytes = 8 << 20});
  for (const int width : {8, 9, 16, 20, 32, 33, 64}) {
    NamespaceSpec spec = SimpleSpec(1000 + width, width);
    spec.key.salt = std::to_string(width);
    const NamespaceId ns = Declare(spec);
    Store(ns, spec, device(0), 1, 70);
    EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 80), 70) << width;
  }
}

TEST_F(PageStoreTest, APageIsImmutableOnceVisible) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 1, 0, 4)).ok());
  // The blocks are recycled, and even published again under the same hashes.
  auto again = ArgsOf(cache, engine, 1, 0, 4);
  for (int b = 1; b <= 4; ++b) engine.Write(0, b, std::string(512, 'x'));
  const auto published = Run(std::move(again));
  ASSERT_TRUE(published.ok());
  EXPECT_EQ(published->present, 4);
  EXPECT_EQ(published->stored, 0);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, APageIsVisibleOnlyWhenItsBytesAreThere) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, engine), engine, 1, 0, 4));
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  EXPECT_EQ(store_->stats().pages, 0);
  EXPECT_EQ(store_->stats().tiers[0].pinned_bytes, 4 * 512);
  gate.Open();
  ASSERT_TRUE(published.get().ok());
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
}

TEST_F(PageStoreTest, APublishThatDiesHalfWayLeavesNothing) {
  Make({.host_bytes = 1 << 20});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.bytes_per_block = 1024});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 8);
  const auto cache = Bind(ns, engine);
  int left = 1;  // the second movement fails
  device(0).set_hook(
      [&](std::size_t) { return left-- > 0 ? absl::OkStatus() : absl::InternalError("lost"); });
  EXPECT_EQ(Run(ArgsOf(cache, engine, 1, 0, 4)).status().message(), "lost");
  device(0).Run([&] { device(0).set_hook(nullptr); });
  EXPECT_EQ(store_->stats().pages, 0);
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 1, 0, 4)).ok());
  EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 4), 4);
}

// An engine's blocks are another engine's as soon as its session has ended, and its cache's generation with
// it.
TEST_F(PageStoreTest, AReaderNeverSeesAPageOfAnotherGeneration) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Declare(SimpleSpec(), 8);
  Engine engine(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, engine, 8), engine, 1, 0, 4, 8));
  store_->EndSession(8);
  for (int b = 1; b <= 4; ++b) engine.Write(0, b, std::string(512, 'x'));
  gate.Open();
  EXPECT_EQ(RefusalReason(published.get().status()), "SESSION_ENDED");
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
}

TEST_F(PageStoreTest, WorkKeepsTheMemoryOfItsCache) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  auto engine = std::make_unique<Engine>(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, *engine), *engine, 1, 0, 4));
  engine = nullptr;
  gate.Open();
  ASSERT_TRUE(published.get().ok());
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, OfTwoPublishesOfAPageOneIsKept) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  Gate gate(device(0));
  auto first = Start(ArgsOf(cache, engine, 1, 0, 4));
  auto second = Start(ArgsOf(cache, engine, 1, 0, 6));
  gate.Open();
  EXPECT_EQ(first.get()->stored, 4);
  const auto result = second.get();
  EXPECT_EQ(result->present, 4);
  EXPECT_EQ(result->stored, 2);
  EXPECT_EQ(store_->stats().pages, 6);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 8), 6);
}

TEST_F(PageStoreTest, APublishIsNotLostWithAnotherOfTheSamePagesThatFails) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  int calls = 0;
  device(0).set_hook(
      [&](std::size_t) { return calls++ > 0 ? absl::OkStatus() : absl::InternalError("lost"); });
  Gate gate(device(0));
  auto first = Start(ArgsOf(cache, engine, 1, 0, 4));
  auto second = Start(ArgsOf(cache, engine, 1, 0, 4));
  gate.Open();
  EXPECT_FALSE(first.get().ok());
  EXPECT_EQ(second.get()->stored, 4);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, PrefixesShareTheirHead) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 8);
  // Another prompt, of which the first four blocks are the same.
  Engine engine(device(0), SimpleSpec(), 8);
  auto args = ArgsOf(Bind(ns, engine), engine, 2, 4, 3);
  args.parent_hash = HashOf(1, 3);
  EXPECT_EQ(Run(args)->stored, 3);
  const auto hit = store_->Lookup(
      {.session = kSession, .name_space = ns, .hashes = HashesOf(1, 0, 4) + HashesOf(2, 4, 4)});
  EXPECT_EQ(hit->blocks, 7);
  EXPECT_EQ(store_->stats().pages, 11);
}

TEST_F(PageStoreTest, HashesInAnotherOrderOrOfAnotherWidthNeverMatch) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 8);
  const auto blocks = [&](const std::string& hashes) {
    return store_->Lookup({.session = kSession, .name_space = ns, .hashes = hashes})->blocks;
  };
  EXPECT_EQ(blocks(HashOf(1, 1) + HashOf(1, 0)), 0);
  EXPECT_EQ(blocks(HashOf(1, 0) + HashOf(1, 2)), 1);
  EXPECT_EQ(blocks(HashOf(1, 0) + HashOf(2, 1) + HashOf(1, 2)), 1);
  EXPECT_EQ(blocks(HashesOf(1, 1, 3)), 0);  // not from the first block on
  EXPECT_EQ(blocks(HashesOf(1, 0, 16, 16)), 0);
  const auto uneven = store_->Lookup({.session = kSession, .name_space = ns, .hashes = HashOf(1, 0, 33)});
  EXPECT_EQ(RefusalReason(uneven.status()), "HASH_WIDTH_INVALID");
  // The same bytes at another place of a prefix.
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  auto moved = ArgsOf(cache, engine, 1, 0, 2);
  moved.hashes = HashOf(2, 0) + HashOf(1, 4);
  EXPECT_EQ(RefusalReason(Run(moved).status()), "CHAIN_MISMATCH");
  moved.hashes = HashOf(2, 0) + HashOf(1, 1);
  EXPECT_EQ(RefusalReason(Run(moved).status()), "CHAIN_MISMATCH");
  moved.hashes = HashOf(2, 0) + HashOf(2, 0);
  EXPECT_EQ(RefusalReason(Run(moved).status()), "CHAIN_MISMATCH");
  EXPECT_EQ(store_->stats().pages, 8);
}

TEST_F(PageStoreTest, PagesOfAnotherNamespaceNeverMatch) {
  Make({.host_bytes = 1 << 20});
  Store(Declare(SimpleSpec()), SimpleSpec(), device(0), 1, 4);
  std::vector<NamespaceSpec> others(5, SimpleSpec());
  others[0].key.salt = "tenant";
  others[1].key.model = "step-6";
  others[2].key.layers = 2;
  others[3].key.layout_version = 1;
  others[4].key.shards = 2;
  for (const NamespaceSpec& spec : others) EXPECT_EQ(Blocks(Declare(spec), 1, 4), 0);
  EXPECT_EQ(store_->ListNamespaces().size(), 6u);
}

TEST_F(PageStoreTest, ANamespaceIsForThoseWhoHaveDeclaredIt) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  Store(ns, SimpleSpec(), device(0), 1, 4);
  constexpr std::uint64_t kOther = 8;
  EXPECT_EQ(RefusalReason(Find(ns, 1, 4, 32, kOther).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(store_->Bind(kOther, ns, engine.bound()).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(Run(ArgsOf(cache, engine, 1, 0, 4, kOther)).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(store_->ReadEvents(kOther, ns, 0, 1).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(Declare(SimpleSpec(), kOther), ns);
  EXPECT_EQ(Blocks(ns, 1, 4, 32, kOther), 4);
  store_->EndSession(kOther);
  EXPECT_EQ(RefusalReason(Find(ns, 1, 4, 32, kOther).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
}

TEST_F(PageStoreTest, ANamespaceHasOneSetOfGroups) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  EXPECT_EQ(Declare(SimpleSpec()), ns);
  EXPECT_EQ(RefusalReason(store_->Declare(kSession, SimpleSpec(768)).status()), "NAMESPACE_DIFFERS");
  const auto other_width = store_->Declare(kSession, SimpleSpec(512, 16));
  EXPECT_EQ(RefusalReason(other_width.status()), "NAMESPACE_DIFFERS");
  EXPECT_EQ(RefusalField(other_width.status()), "hash_width");
}

TEST_F(PageStoreTest, ANamespaceWithoutPagesAndSessionsIsForgotten) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec(), 8);
  NamespaceSpec full = SimpleSpec();
  full.key.salt = "full";
  Store(Declare(full, 8), full, device(0), 1, 4, 8);
  store_->EndSession(8);
  ASSERT_EQ(store_->ListNamespaces().size(), 1u);
  EXPECT_EQ(store_->ListNamespaces()[0].spec.key.salt, "full");
  EXPECT_NE(Declare(SimpleSpec()), ns);
}

// Who resumes the stream of its earlier life must not wait for sequences that it has seen.
TEST_F(PageStoreTest, ANamespaceThatComesBackGoesOnCountingItsEvents) {
  Make({.host_bytes = 8 * 512, .first_sequence = 1000});
  NamespaceSpec other = SimpleSpec();
  other.key.salt = "other";
  const NamespaceId ns = Declare(SimpleSpec(), 8);
  for (std::uint64_t prefix = 1; prefix <= 3; ++prefix) Store(ns, SimpleSpec(), device(0), prefix, 1, 8);
  Store(Declare(other), other, device(0), 1, 8);  // takes all of the tier
  const std::uint64_t next = store_->ReadEvents(8, ns, 0, 100)->next;
  store_->EndSession(8);
  const NamespaceId again = Declare(SimpleSpec(), 9);
  ASSERT_NE(again, ns);
  Store(again, SimpleSpec(), device(0), 4, 1, 9);
  const auto resumed = store_->ReadEvents(9, again, next, 100);
  EXPECT_FALSE(resumed->gap.has_value());
  ASSERT_EQ(resumed->events.size(), 1u);
  EXPECT_EQ(resumed->events[0].hashes, HashOf(4, 0));
  EXPECT_EQ(store_->ReadEvents(9, again, next - 1, 100)->gap->to, next);
}

TEST_F(PageStoreTest, ALeasePinsItsPagesUntilItEnds) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 4);
  const auto hit = Find(ns, 1, 4);
  ASSERT_EQ(hit->blocks, 4);
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  EXPECT_EQ(Run(ArgsOf(cache, engine, 2, 0, 8))->dropped, 4);
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
  store_->Release(kSession, hit->lease);
  store_->Release(kSession, hit->lease);  // no harm
  EXPECT_EQ(Run(ArgsOf(cache, engine, 3, 0, 8))->stored, 8);
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
}

TEST_F(PageStoreTest, ALeaseEndsAtItsDeadlineUnlessItIsRenewed) {
  Make({.host_bytes = 1 << 20, .max_lease = milliseconds(1000)});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 4);
  const std::string hashes = HashesOf(1, 0, 4);
  LookupArgs args{.session = kSession, .name_space = ns, .hashes = hashes, .lease = milliseconds(300)};
  const auto hit = store_->Lookup(args);
  EXPECT_EQ(hit->lease_time, milliseconds(300));
  args.lease = milliseconds(5000);
  EXPECT_EQ(store_->Lookup(args)->lease_time, milliseconds(1000));
  EXPECT_EQ(store_->stats().leases, 2);
  now_ += milliseconds(299);
  EXPECT_EQ(*store_->Renew(kSession, hit->lease, milliseconds(900)), milliseconds(900));
  EXPECT_EQ(RefusalReason(store_->Renew(8, hit->lease, milliseconds(1)).status()), "LEASE_NOT_FOUND");
  now_ += milliseconds(899);
  EXPECT_EQ(store_->stats().leases, 1);
  now_ += milliseconds(1);
  EXPECT_EQ(store_->stats().leases, 0);
  EXPECT_EQ(RefusalReason(store_->Renew(kSession, hit->lease, milliseconds(1)).status()), "LEASE_NOT_FOUND");
  EXPECT_EQ(store_->stats().tiers[0].pinned_bytes, 0);
}

TEST_F(PageStoreTest, APublishFindsTheRoomOfLeasesThatHaveExpired) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 8);
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  const auto hit = Find(ns, 1, 8);
  EXPECT_EQ(RefusalReason(Run(ArgsOf(cache, engine, 2, 0, 8)).status()), "STORE_FULL");
  now_ += hit->lease_time;
  const auto published = Run(ArgsOf(cache, engine, 2, 0, 8));
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->stored, 8);
}

TEST_F(PageStoreTest, ASessionsLeasesAreOfABoundedNumberOfPages) {
  constexpr std::int64_t kPages = std::int64_t{1} << 16;
  Make({.host_bytes = kPages * 256});
  const NamespaceSpec spec = SimpleSpec(256, 8);
  const NamespaceId ns = Declare(spec);
  Declare(spec, 8);
  Store(ns, spec, device(0), 1, kPages);
  const std::string hashes = HashesOf(1, 0, kPages, 8);
  const auto look_up = [&](std::uint64_t session) {
    return store_->Lookup({.session = session, .name_space = ns, .hashes = hashes});
  };
  LeaseId last{};
  for (std::int64_t pages = 0; pages < kMaxLeasedPages; pages += kPages) {
    const auto hit = look_up(kSession);
    ASSERT_TRUE(hit.ok()) << hit.status();
    ASSERT_EQ(hit->blocks, kPages);
    last = hit->lease;
  }
  EXPECT_EQ(RefusalReason(look_up(kSession).status()), "SESSION_LIMIT");
  EXPECT_TRUE(look_up(8).ok());
  store_->Release(kSession, last);
  EXPECT_TRUE(look_up(kSession).ok());
}

TEST_F(PageStoreTest, LeasesEndWithTheirSession) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Declare(SimpleSpec(), 8);
  Store(ns, SimpleSpec(), device(0), 1, 4);
  const auto hit = Find(ns, 1, 4, 32, 8);
  ASSERT_TRUE(Find(ns, 1, 3).ok());
  store_->Release(kSession, hit->lease);  // not its own
  EXPECT_EQ(store_->stats().leases, 2);
  store_->EndSession(8);
  store_->EndSession(8);
  EXPECT_EQ(store_->stats().leases, 1);
}

TEST_F(PageStoreTest, ALoadKeepsItsPagesWhenItsLeaseEnds) {
  enum class End { kDeadline, kRelease, kSession };
  Make({.host_bytes = 8 * 512, .max_lease = milliseconds(100)});
  for (const End end : {End::kDeadline, End::kRelease, End::kSession}) {
    const NamespaceId ns = Declare(SimpleSpec());
    Store(ns, SimpleSpec(), device(0), 1, 8);
    const auto hit = Find(ns, 1, 8);
    ASSERT_EQ(hit->blocks, 8);
    Engine engine(device(0), SimpleSpec(), 16);
    const auto cache = Bind(ns, engine);
    Gate gate(device(0));
    auto loaded = Start(LoadOf(*hit, cache));
    if (end == End::kDeadline) now_ += milliseconds(100);
    if (end == End::kRelease) store_->Release(kSession, hit->lease);
    if (end == End::kSession) store_->EndSession(kSession);
    EXPECT_EQ(store_->stats().leases, 0);
    // Somebody wants all of the room.
    Declare(SimpleSpec(), 8);
    Engine other(device(0), SimpleSpec(), 16);
    auto published = Start(ArgsOf(Bind(ns, other, 8), other, 2, 0, 8, 8));
    gate.Open();
    if (end == End::kSession) {  // the cache may be somebody else's by now
      EXPECT_EQ(RefusalReason(loaded.get().status()), "SESSION_ENDED");
      for (int block = 1; block <= 8; ++block) EXPECT_TRUE(engine.Untouched(0, block));
    } else {
      ExpectLoaded(loaded.get(), *hit, engine, 1);
    }
    EXPECT_EQ(RefusalReason(published.get().status()), "STORE_FULL");
    EXPECT_EQ(Run(ArgsOf(Bind(ns, other, 8), other, 2, 0, 8, 8))->stored, 8);
    store_->EndSession(8);
  }
}

TEST_F(PageStoreTest, TheTailOfAPrefixGoesBeforeItsHead) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  // In parts, the way an engine commits blocks.
  for (int first = 0; first < 8; first += 2) ASSERT_TRUE(Run(ArgsOf(cache, engine, 1, first, 2)).ok());
  for (int blocks = 1; blocks <= 7; ++blocks) {
    ASSERT_EQ(Run(ArgsOf(cache, engine, 10, blocks - 1, 1))->stored, 1);
    const auto events = store_->ReadEvents(kSession, ns, 0, 1000);
    EXPECT_TRUE(events->events[events->events.size() - 2].hashes ==
                HashOf(1, static_cast<std::uint64_t>(8 - blocks)))
        << blocks;
  }
  EXPECT_EQ(Blocks(ns, 1, 8), 1);
}

TEST_F(PageStoreTest, WhatIsUsedStays) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 4);
  Store(ns, SimpleSpec(), device(0), 2, 4);
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
  Store(ns, SimpleSpec(), device(0), 3, 4);
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
  EXPECT_EQ(Blocks(ns, 2, 4), 0);
}

TEST_F(PageStoreTest, WhatFindsNoRoomIsTheTail) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  const auto published = Run(ArgsOf(cache, engine, 1, 0, 12));
  EXPECT_EQ(published->stored, 8);
  EXPECT_EQ(published->dropped, 4);
  const auto hit = Find(ns, 1, 12);
  EXPECT_EQ(hit->blocks, 8);
  EXPECT_EQ(RefusalReason(Run(ArgsOf(cache, engine, 2, 0, 4)).status()), "STORE_FULL");
  EXPECT_EQ(store_->stats().dropped_pages, 8);
}

TEST_F(PageStoreTest, WithoutRoomNothingIsStored) {
  Make({});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  EXPECT_EQ(RefusalReason(Run(ArgsOf(Bind(ns, engine), engine, 1, 0, 4)).status()), "STORE_FULL");
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
}

TEST_F(PageStoreTest, ANamespaceAtItsQuotaEvictsItsOwnPages) {
  Make({.host_bytes = 64 * 512, .namespace_quota_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  NamespaceSpec other = SimpleSpec();
  other.key.salt = "other";
  const NamespaceId quiet = Declare(other);
  Store(quiet, other, device(0), 1, 8);
  Store(ns, SimpleSpec(), device(0), 1, 8);
  Store(ns, SimpleSpec(), device(0), 2, 6);
  EXPECT_EQ(Blocks(ns, 1, 8), 2);
  EXPECT_EQ(Blocks(quiet, 1, 8), 8);
  EXPECT_EQ(store_->ListNamespaces()[0].used_bytes, 8 * 512);
  // All that is left is leased.
  ASSERT_EQ(Find(ns, 1, 8)->blocks, 2);
  ASSERT_EQ(Find(ns, 2, 8)->blocks, 6);
  Engine engine(device(0), SimpleSpec(), 16);
  const auto refused = Run(ArgsOf(Bind(ns, engine), engine, 3, 0, 4)).status();
  EXPECT_EQ(RefusalReason(refused), "QUOTA_EXCEEDED");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(PageStoreTest, APageLargerThanTheQuotaDisplacesNothing) {
  Make({.host_bytes = 64 * 512, .namespace_quota_bytes = 8 * 512});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.insert(spec.groups.begin(), GroupSpec{.bytes_per_block = 9 * 512});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 16);
  const auto cache = Bind(ns, engine);
  // Pages of the group that fits are stored, and stay.
  const auto published = Run(ArgsOf(cache, engine, 1, 0, 4));
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->stored, 4);
  EXPECT_EQ(published->dropped, 4);
  auto large = ArgsOf(cache, engine, 2, 0, 1);
  large.groups.pop_back();
  EXPECT_EQ(RefusalReason(Run(large).status()), "QUOTA_EXCEEDED");
  EXPECT_EQ(store_->stats().pages, 4);
}

TEST_F(PageStoreTest, ALoadTakesWhatItIsAskedFor) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 8);
  const auto hit = Find(ns, 1, 8);
  Engine engine(device(0), SimpleSpec(), 16);
  LoadArgs args = LoadOf(*hit, Bind(ns, engine));
  args.groups[0].first_block_index = 2;
  args.groups[0].block_ids = {9, -1, 5};
  const auto loaded = Start(args).get();
  EXPECT_EQ(loaded->pages, 2);
  EXPECT_EQ(loaded->bytes, 1024);
  EXPECT_EQ(engine.Read(0, 9), PageOf(SimpleSpec(), 1, 2));
  EXPECT_EQ(engine.Read(0, 5), PageOf(SimpleSpec(), 1, 4));
  for (const int block : {0, 1, 2, 3, 4, 6, 7, 8, 10}) EXPECT_TRUE(engine.Untouched(0, block)) << block;
}

TEST_F(PageStoreTest, RefusesLoadsThatAreNotOfTheLease) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 8);
  const auto hit = Find(ns, 1, 6);
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  const auto reason = [&](auto change) {
    LoadArgs args = LoadOf(*hit, cache);
    change(args);
    return RefusalReason(Start(args).get().status());
  };
  EXPECT_EQ(reason([](LoadArgs& a) { a.session = 8; }), "LEASE_NOT_FOUND");
  EXPECT_EQ(reason([](LoadArgs& a) { a.lease = LeaseId{1}; }), "LEASE_NOT_FOUND");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].first_block_index = 1; }), "BLOCK_NOT_LEASED");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].first_block_index = -1; }), "BLOCK_NOT_LEASED");
  // Sums with these overflow; an id that is not wanted is not compared with the lease.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t first : {kMost, kMost - 1, -kMost - 1, -kMost}) {
    for (const std::vector<std::int64_t>& ids : {std::vector<std::int64_t>{1}, {-1, 1}, {-1, -1, 1}}) {
      EXPECT_EQ(reason([&](LoadArgs& a) { a.groups[0] = {0, first, ids}; }), "BLOCK_NOT_LEASED") << first;
    }
  }
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].block_ids[2] = 0; }), "NULL_BLOCK");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].block_ids[2] = 16; }), "BLOCK_OUT_OF_RANGE");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].block_ids[2] = 1; }), "DUPLICATE_BLOCK");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups[0].group = 1; }), "GROUP_OUT_OF_RANGE");
  EXPECT_EQ(reason([](LoadArgs& a) { a.groups.push_back(a.groups[0]); }), "GROUP_OUT_OF_RANGE");
  NamespaceSpec other = SimpleSpec();
  other.key.salt = "other";
  const auto elsewhere = Bind(Declare(other), engine);
  EXPECT_EQ(reason([&](LoadArgs& a) { a.cache = elsewhere; }), "NAMESPACE_DIFFERS");
  for (int block = 0; block < 16; ++block) EXPECT_TRUE(engine.Untouched(0, block));
}

TEST_F(PageStoreTest, RefusesPublishesThatCannotBe) {
  Make({.host_bytes = 1 << 20});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.kind = GroupKind::kRing});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 16);
  const auto cache = Bind(ns, engine);
  const auto refusal = [&](auto change) {
    PublishArgs args = ArgsOf(cache, engine, 1, 2, 4);
    change(args);
    const auto s = Run(args).status();
    return RefusalReason(s) + " " + RefusalField(s);
  };
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 0; }),
            "NULL_BLOCK groups[0].block_ids[1]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 16; }),
            "BLOCK_OUT_OF_RANGE groups[0].block_ids[1]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 4; }),
            "DUPLICATE_BLOCK groups[0].block_ids[3]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids.pop_back(); }),
            "SIZE_MISMATCH groups[0].block_ids");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].group = 1; }), "RING_GROUP groups[0].group");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].group = 2; }), "GROUP_OUT_OF_RANGE groups[0].group");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.committed_tokens = 6 * 64 - 1; }),
            "BLOCK_NOT_COMMITTED committed_tokens");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.hashes.pop_back(); }), "HASH_WIDTH_INVALID hashes");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.hashes.clear(); }), "COUNT_OUT_OF_RANGE hashes");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.parent_hash.clear(); }), "PARENT_HASH_INVALID parent_hash");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.first_block_index = 0; }), "PARENT_HASH_INVALID parent_hash");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.first_block_index = -1; }),
            "COUNT_OUT_OF_RANGE first_block_index");
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
}

TEST_F(PageStoreTest, RefusesMoreOperationsThanItsBound) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 4);
  const auto cache = Bind(ns, engine);
  std::vector<std::future<Published>> started;
  {
    Gate gate(device(0));
    for (int i = 0; i < kMaxStoreOperations; ++i) {
      started.push_back(Start(ArgsOf(cache, engine, static_cast<std::uint64_t>(i) + 1, 0, 1)));
    }
    EXPECT_EQ(RefusalReason(Run(ArgsOf(cache, engine, 9999, 0, 1)).status()), "QUEUE_FULL");
  }
  for (auto& publish : started) EXPECT_TRUE(publish.get().ok());
}

TEST_F(PageStoreTest, EventsTellWhatCanBeFetchedAndWhatIsGone) {
  Make({.host_bytes = 8 * 512, .first_sequence = 1000});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  std::int64_t told_blocks = -1;  // what is visible by the time one hears of it
  const auto listener = store_->Listen(kSession, ns, [&] {
    const auto batch = store_->ReadEvents(kSession, ns, 0, 1);
    if (!batch->events.empty()) told_blocks = Blocks(ns, 1, 4);
  });
  {
    Gate gate(device(0));
    auto published = Start(ArgsOf(cache, engine, 1, 0, 4));
    EXPECT_TRUE(store_->ReadEvents(kSession, ns, 0, 10)->events.empty());
    gate.Open();
    published.wait();
  }
  store_->Quiesce();
  EXPECT_EQ(told_blocks, 4);
  store_->StopListening(*listener);
  Store(ns, SimpleSpec(), device(0), 2, 6);
  const auto batch = store_->ReadEvents(kSession, ns, 1000, 10);
  EXPECT_FALSE(batch->gap.has_value());
  ASSERT_EQ(batch->events.size(), 3u);
  EXPECT_EQ(batch->events[0].sequence, 1000u);
  EXPECT_EQ(batch->events[0].kind, EventKind::kStored);
  EXPECT_EQ(batch->events[0].hashes, HashesOf(1, 0, 4));
  EXPECT_EQ(batch->events[0].parent_hash, "");
  EXPECT_EQ(batch->events[1].kind, EventKind::kRemoved);
  EXPECT_EQ(batch->events[1].hashes, HashOf(1, 3) + HashOf(1, 2));
  EXPECT_EQ(batch->events[2].hashes, HashesOf(2, 0, 6));
  EXPECT_EQ(batch->next, 1003u);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 2, 6, 1)).ok());
  const auto more = store_->ReadEvents(kSession, ns, batch->next, 10);
  ASSERT_EQ(more->events.size(), 2u);
  EXPECT_EQ(more->events[1].parent_hash, HashOf(2, 5));
  EXPECT_EQ(more->events[1].first_block_index, 6);
}

// Clients take messages of 4 MiB unless they say otherwise; a watcher must not be stopped by one publish.
TEST_F(PageStoreTest, EventsAreOfABoundedNumberOfPages) {
  constexpr std::int64_t kPages = 2 * kMaxEventPages + 3;
  Make({.host_bytes = kPages * 256, .event_log_bytes = std::size_t{8} << 20});
  const NamespaceSpec spec = SimpleSpec(256, 64);
  const NamespaceId ns = Declare(spec);
  Store(ns, spec, device(0), 1, kPages);
  Store(ns, spec, device(0), 2, kPages);
  const auto batch = store_->ReadEvents(kSession, ns, 0, 100);
  ASSERT_TRUE(batch.ok());
  ASSERT_EQ(batch->events.size(), 9u);  // stored, removed, stored
  for (std::size_t e = 0; e < 9; ++e) {
    const StoreEvent& event = batch->events[e];
    const std::int64_t first = static_cast<std::int64_t>(e % 3) * kMaxEventPages;
    const std::int64_t count = std::min(kPages - first, kMaxEventPages);
    EXPECT_EQ(event.hashes.size(), static_cast<std::size_t>(count) * 64) << e;
    if (event.kind == EventKind::kRemoved) continue;
    const std::uint64_t prefix = e < 3 ? 1 : 2;
    EXPECT_TRUE(event.hashes == HashesOf(prefix, first, count, 64)) << e;
    EXPECT_EQ(event.first_block_index, first);
    const auto before = static_cast<std::uint64_t>(first) - 1;
    EXPECT_TRUE(event.parent_hash == (first == 0 ? "" : HashOf(prefix, before, 64))) << e;
  }
}

TEST_F(PageStoreTest, EventsThatAreNoLongerKeptAreAGap) {
  Make({.host_bytes = 1 << 20, .first_sequence = 1000, .event_log_bytes = 1000});
  const NamespaceId ns = Declare(SimpleSpec());
  for (std::uint64_t prefix = 1; prefix <= 20; ++prefix) Store(ns, SimpleSpec(), device(0), prefix, 1);
  const auto batch = store_->ReadEvents(kSession, ns, 5, 100);  // of an earlier life
  ASSERT_TRUE(batch->gap.has_value());
  EXPECT_EQ(batch->gap->from, 5u);
  EXPECT_EQ(batch->gap->to, batch->events[0].sequence);
  EXPECT_EQ(batch->next, 1020u);
  EXPECT_TRUE(store_->ReadEvents(kSession, ns, 1020, 100)->events.empty());
  EXPECT_EQ(store_->ReadEvents(kSession, ns, 0, 2)->events.size(), 2u);
}

}  // namespace
}  // namespace kvsummary
