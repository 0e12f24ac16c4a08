// Leases, and the loads that they are for.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using std::chrono::milliseconds;
using testing::Engine;
using testing::Gate;
using testing::HashesOf;
using testing::SimpleSpec;

using LeasesTest = testing::StoreTest;

TEST_F(LeasesTest, ALeasePinsItsPagesUntilItEnds) {
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

TEST_F(LeasesTest, ALeaseEndsAtItsDeadlineUnlessItIsRenewed) {
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

TEST_F(LeasesTest, APublishFindsTheRoomOfLeasesThatHaveExpired) {
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

TEST_F(LeasesTest, ASessionsLeasesAreOfABoundedNumberOfPages) {
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

TEST_F(LeasesTest, LeasesEndWithTheirSession) {
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

TEST_F(LeasesTest, ALoadKeepsItsPagesWhenItsLeaseEnds) {
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

TEST_F(LeasesTest, ALoadTakesWhatItIsAskedFor) {
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

TEST_F(LeasesTest, RefusesLoadsThatAreNotOfTheLease) {
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

}  // namespace
}  // namespace kvsummary
