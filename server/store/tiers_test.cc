// Pages on their way between tiers and devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using ::testing::ElementsAre;
using testing::Engine;
using testing::Gate;
using testing::HashesOf;
using testing::HashOf;
using ::testing::IsEmpty;
using testing::SimpleSpec;

constexpr std::int64_t kPage = 512;
constexpr std::size_t kHostDevice = 0;
constexpr std::size_t kHost = 0;   // tiers
constexpr std::size_t kUpper = 1;  // of the first device

class TiersTest : public testing::StoreTest {
 protected:
  void MakeTiers(std::int64_t host_pages, std::int64_t upper_pages, int gpus = 1) {
    Make({.host_bytes = host_pages * kPage,
          .device_bytes = upper_pages * kPage,
          .high_watermark = 1,
          .low_watermark = 1},
         gpus);
    ns_ = Declare(SimpleSpec());
  }
  TierUsage Tier(std::size_t t) { return store_->stats().tiers[t]; }
  void Store(std::uint64_t prefix, std::int64_t count, std::size_t on = 1) {
    StoreTest::Store(ns_, SimpleSpec(), device(on), prefix, count);
  }
  std::int64_t FindAndLoad(std::uint64_t prefix, std::int64_t count, std::size_t on = 1) {
    return StoreTest::FindAndLoad(ns_, SimpleSpec(), device(on), prefix, count);
  }

  NamespaceId ns_{};
};

TEST_F(TiersTest, PagesStayOnTheirDeviceUntilItIsFull) {
  MakeTiers(16, 8);
  Store(1, 4);
  EXPECT_EQ(Tier(kUpper).pages, 4);
  EXPECT_EQ(Tier(kHost).pages, 0);
  auto hit = Find(ns_, 1, 4);
  EXPECT_EQ(hit->groups[0].elsewhere_pages, 4);
  hit = store_->Lookup(
      {.session = kSession, .name_space = ns_, .hashes = HashesOf(1, 0, 4), .device = &device(1)});
  EXPECT_EQ(hit->groups[0].device_pages, 4);
  EXPECT_EQ(FindAndLoad(1, 4), 4);
}

TEST_F(TiersTest, WhatIsEvictedIsCopiedDownAndComesUpAgain) {
  MakeTiers(16, 8);
  Store(1, 8);
  Store(2, 6);  // displaces the tail of the first
  EXPECT_EQ(Tier(kUpper).pages, 8);
  EXPECT_EQ(Tier(kHost).pages, 6);
  EXPECT_EQ(Tier(kUpper).demoted_pages, 6);
  EXPECT_EQ(store_->ReadEvents(kSession, ns_, 0, 100)->events.size(), 2u);  // nothing is gone
  const auto hit = store_->Lookup(
      {.session = kSession, .name_space = ns_, .hashes = HashesOf(1, 0, 8), .device = &device(1)});
  EXPECT_EQ(hit->groups[0].device_pages, 2);
  EXPECT_EQ(hit->groups[0].host_pages, 6);
  store_->Release(kSession, hit->lease);
  EXPECT_EQ(FindAndLoad(1, 8), 8);
  EXPECT_EQ(Tier(kUpper).promoted_pages, 6);
  EXPECT_EQ(FindAndLoad(2, 6), 6);
  EXPECT_EQ(FindAndLoad(1, 8), 8);
  EXPECT_EQ(store_->stats().bad_pages, 0);
}

TEST_F(TiersTest, ThePagesOfBothTiersAreTheLastThatWereUsed) {
  MakeTiers(8, 8);
  for (std::uint64_t prefix = 1; prefix <= 6; ++prefix) Store(prefix, 4);
  EXPECT_EQ(Blocks(ns_, 1, 4), 0);
  EXPECT_EQ(Blocks(ns_, 2, 4), 0);
  for (std::uint64_t prefix = 3; prefix <= 6; ++prefix) EXPECT_EQ(Blocks(ns_, prefix, 4), 4) << prefix;
  EXPECT_EQ(Tier(kHost).evicted_pages, 8);
  EXPECT_EQ(Tier(kUpper).evicted_pages, 0);
}

TEST_F(TiersTest, WithoutAHostTierWhatIsEvictedIsGone) {
  MakeTiers(0, 8);
  Store(1, 8);
  Store(2, 4);
  EXPECT_EQ(FindAndLoad(1, 8), 4);
  EXPECT_EQ(FindAndLoad(2, 8), 4);
  EXPECT_EQ(Tier(kUpper).evicted_pages, 4);
}

TEST_F(TiersTest, AHostWithoutGpusHasBothTiers) {
  MakeTiers(8, 4, 0);
  Store(1, 4, 0);
  Store(2, 4, 0);
  EXPECT_EQ(Tier(kUpper).pages, 4);
  EXPECT_EQ(FindAndLoad(1, 4, 0), 4);
  EXPECT_EQ(FindAndLoad(2, 4, 0), 4);
  EXPECT_EQ(Tier(kUpper).promoted_pages, 8);
}

TEST_F(TiersTest, AHostCacheBesideGpusUsesTheHostTier) {
  MakeTiers(8, 4);
  Store(1, 4, 0);
  EXPECT_EQ(Tier(kHost).pages, 4);
  EXPECT_EQ(FindAndLoad(1, 4, 0), 4);
  EXPECT_EQ(FindAndLoad(1, 4, 1), 4);  // promoted
  EXPECT_EQ(Tier(kUpper).pages, 4);
  EXPECT_EQ(FindAndLoad(1, 4, 0), 4);  // through the host tier again
  EXPECT_EQ(Tier(kHost).pages, 4);
}

TEST_F(TiersTest, PagesOfAnotherDeviceComeThroughTheHostTier) {
  MakeTiers(8, 4, 2);
  Store(1, 4, 1);
  EXPECT_EQ(FindAndLoad(1, 4, 2), 4);
  EXPECT_EQ(Tier(2).pages, 4);
  EXPECT_EQ(Tier(1).pages, 0);
  EXPECT_EQ(FindAndLoad(1, 4, 1), 4);
  EXPECT_EQ(Tier(1).pages, 4);
}

TEST_F(TiersTest, PagesOfAnotherDeviceAreBadWithoutAHostTier) {
  MakeTiers(0, 4, 2);
  Store(1, 4, 1);
  const auto hit = Find(ns_, 1, 4);
  Engine engine(device(2), SimpleSpec(), 8);
  const auto loaded = Start(LoadOf(*hit, Bind(ns_, engine))).get();
  EXPECT_THAT(loaded->bad, ElementsAre(ElementsAre(0, 1, 2, 3)));
  EXPECT_TRUE(engine.Untouched(0, 1));
  EXPECT_EQ(FindAndLoad(1, 4, 1), 4);
}

// A device loads pages that another one takes away from it, and that its next publish overwrites.
TEST_F(TiersTest, ALoadIsNotDisturbedByOneOnAnotherDevice) {
  MakeTiers(16, 4, 2);
  Store(1, 4, 1);
  const auto first = Find(ns_, 1, 4);
  const auto second = Find(ns_, 1, 4);
  Engine here(device(1), SimpleSpec(), 8);
  Engine there(device(2), SimpleSpec(), 8);
  Engine third(device(1), SimpleSpec(), 8);
  Gate gate(device(1));
  auto loaded_here = Start(LoadOf(*first, Bind(ns_, here)));
  auto loaded_there = Start(LoadOf(*second, Bind(ns_, there)));
  auto published = Start(ArgsOf(Bind(ns_, third), third, 2, 0, 4));
  gate.Open();
  ExpectLoaded(loaded_here.get(), *first, here, 1);
  ExpectLoaded(loaded_there.get(), *second, there, 1);
  EXPECT_EQ(published.get()->stored, 4);
}

// A load has read a page from its own device's tier, and waits for others; meanwhile another device takes
// that page away, and loses it.
TEST_F(TiersTest, APageThatALoadHasReadMayBeLost) {
  MakeTiers(16, 4, 2);
  Engine head(device(2), SimpleSpec(), 8);
  Engine tail(device(1), SimpleSpec(), 8);
  ASSERT_EQ(Run(ArgsOf(Bind(ns_, head), head, 1, 0, 2))->stored, 2);
  ASSERT_EQ(Run(ArgsOf(Bind(ns_, tail), tail, 1, 2, 2))->stored, 2);
  const auto first = Find(ns_, 1, 4);
  const auto second = Find(ns_, 1, 4);
  Engine here(device(1), SimpleSpec(), 8);
  Engine there(device(2), SimpleSpec(), 8);
  Gate gate(device(2));
  int movements = 0;  // the first is the load's from its own tier, the second the copy down
  device(1).Run([&] {
    device(1).set_hook(
        [&](std::size_t) { return ++movements == 2 ? absl::InternalError("lost") : absl::OkStatus(); });
  });
  auto loaded_here = Start(LoadOf(*first, Bind(ns_, here)));
  auto loaded_there = Start(LoadOf(*second, Bind(ns_, there)));
  while (store_->stats().pages != 2) std::this_thread::yield();
  gate.Open();
  ExpectLoaded(loaded_here.get(), *first, here, 1);
  EXPECT_THAT(loaded_there.get()->bad, ElementsAre(ElementsAre(2, 3)));
  store_->Quiesce();
  device(1).Run([&] { device(1).set_hook(nullptr); });
  EXPECT_EQ(store_->Check(), std::vector<std::string>());
  EXPECT_EQ(FindAndLoad(1, 4, 1), 2);
}

TEST_F(TiersTest, ALoadFindsPagesThatAreBeingCopiedDown) {
  MakeTiers(16, 4);
  Store(1, 4);
  Engine other(device(1), SimpleSpec(), 8);
  Engine engine(device(1), SimpleSpec(), 8);
  Gate gate(device(1));
  auto published = Start(ArgsOf(Bind(ns_, other), other, 2, 0, 4));
  const auto hit = Find(ns_, 1, 4);
  EXPECT_EQ(hit->groups[0].host_pages, 4);
  auto loaded = Start(LoadOf(*hit, Bind(ns_, engine)));
  gate.Open();
  ExpectLoaded(loaded.get(), *hit, engine, 1);
  EXPECT_EQ(published.get()->stored, 4);
}

TEST_F(TiersTest, TwoLoadsOfAPageOfTheHostTierBothGetIt) {
  MakeTiers(16, 4);
  Store(1, 4, 0);
  const auto hit = Find(ns_, 1, 4);
  Engine a(device(1), SimpleSpec(), 8);
  Engine b(device(1), SimpleSpec(), 8);
  Engine c(device(0), SimpleSpec(), 8);
  Gate gate(device(1));
  Gate host_gate(device(0));
  auto loaded_c = Start(LoadOf(*hit, Bind(ns_, c)));
  auto loaded_a = Start(LoadOf(*hit, Bind(ns_, a)));
  auto loaded_b = Start(LoadOf(*hit, Bind(ns_, b)));
  gate.Open();
  ExpectLoaded(loaded_a.get(), *hit, a, 1);
  ExpectLoaded(loaded_b.get(), *hit, b, 1);
  Engine other(device(1), SimpleSpec(), 16);
  EXPECT_TRUE(Run(ArgsOf(Bind(ns_, other), other, 2, 0, 8)).ok());  // would like their slots
  host_gate.Open();
  ExpectLoaded(loaded_c.get(), *hit, c, 1);
}

TEST_F(TiersTest, APageWhoseChecksumDiffersIsReportedAndDropped) {
  MakeTiers(16, 4);
  Store(1, 4);
  Store(2, 4);
  ASSERT_EQ(Tier(kHost).pages, 4);
  const auto hit = Find(ns_, 1, 4);
  // One bit, somewhere in the page of block 2: the one that its bytes are in.
  const std::string page = PageOf(SimpleSpec(), 1, 2);
  char* memory = device(0).allocated(0);
  std::int64_t at = 0;
  while (std::string(memory + at, kPage) != page) at += 256;
  memory[at + 300] ^= 1;
  Engine engine(device(1), SimpleSpec(), 8);
  const auto loaded = Start(LoadOf(*hit, Bind(ns_, engine))).get();
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->pages, 3);
  EXPECT_THAT(loaded->bad, ElementsAre(ElementsAre(2)));
  EXPECT_TRUE(engine.Untouched(0, 3));
  EXPECT_EQ(engine.Read(0, 4), PageOf(SimpleSpec(), 1, 3));
  EXPECT_EQ(store_->stats().bad_pages, 1);
  // It is gone for everybody, and those behind it match again once it is back.
  EXPECT_EQ(Blocks(ns_, 1, 4), 2);
  const auto again = Start(LoadOf(*hit, Bind(ns_, engine))).get();
  EXPECT_THAT(again->bad, ElementsAre(ElementsAre(2)));
  store_->Release(kSession, hit->lease);
  Store(1, 4);
  EXPECT_EQ(FindAndLoad(1, 4), 4);
  const auto orphaned = Find(ns_, 1, 4);
  Store(3, 4);
  Store(4, 8);
  EXPECT_EQ(Blocks(ns_, 1, 4), 4);
}

// So much that several threads read it.
TEST_F(TiersTest, AWrongBitIsFoundInWhicheverPageOfALargeLoad) {
  constexpr std::int64_t kLarge = 300'000;
  constexpr std::int64_t kBlocks = 12;
  Make({.host_bytes = 16 * (kLarge + kPageUnit)});
  const NamespaceSpec spec = SimpleSpec(kLarge);
  const NamespaceId ns = Declare(spec);
  for (std::int64_t block = 0; block < kBlocks; ++block) {
    StoreTest::Store(ns, spec, device(0), 1, kBlocks);
    EXPECT_EQ(StoreTest::FindAndLoad(ns, spec, device(0), 1, kBlocks), kBlocks);
    const std::string page = PageOf(spec, 1, block);
    char* at = device(0).allocated(0);
    while (std::memcmp(at, page.data(), page.size()) != 0) at += kPageUnit;
    at[kLarge - 1] ^= 1;
    const auto hit = Find(ns, 1, kBlocks);
    Engine engine(device(0), spec, kBlocks + 1);
    const auto loaded = Start(LoadOf(*hit, Bind(ns, engine))).get();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(loaded->bad, ElementsAre(ElementsAre(block)));
    EXPECT_EQ(loaded->pages, kBlocks - 1);
    store_->Release(kSession, hit->lease);
  }
}

TEST_F(TiersTest, ACopyDownThatFailsLosesThePagesByName) {
  MakeTiers(16, 4);
  Store(1, 4);
  const auto hit = Find(ns_, 1, 2);
  device(1).Run([&] { device(1).set_hook([](std::size_t) { return absl::InternalError("lost"); }); });
  Engine other(device(1), SimpleSpec(), 8);
  EXPECT_FALSE(Run(ArgsOf(Bind(ns_, other), other, 2, 0, 4)).ok());
  store_->Quiesce();
  device(1).Run([&] { device(1).set_hook(nullptr); });
  EXPECT_EQ(Blocks(ns_, 1, 4), 2);  // leased: they have stayed
  EXPECT_EQ(Blocks(ns_, 2, 4), 0);
  const auto batch = store_->ReadEvents(kSession, ns_, 0, 10);
  EXPECT_EQ(batch->events.back().kind, EventKind::kRemoved);
  EXPECT_EQ(batch->events.back().hashes.size(), 64u);
}

TEST_F(TiersTest, ALoadThatFailsKeepsThePages) {
  MakeTiers(16, 4);
  Store(1, 4);
  Store(2, 4);
  device(1).Run([&] { device(1).set_hook([](std::size_t) { return absl::InternalError("lost"); }); });
  const auto hit = Find(ns_, 1, 4);
  Engine engine(device(1), SimpleSpec(), 8);
  EXPECT_FALSE(Start(LoadOf(*hit, Bind(ns_, engine))).get().ok());
  store_->Release(kSession, hit->lease);
  store_->Quiesce();
  device(1).Run([&] { device(1).set_hook(nullptr); });
  EXPECT_EQ(FindAndLoad(1, 4), 4);
}

TEST_F(TiersTest, APublishLargerThanTheUpperTierGoesOnInTheHostTier) {
  MakeTiers(8, 4);
  Store(1, 10);
  EXPECT_EQ(Tier(kUpper).pages, 4);
  EXPECT_EQ(Tier(kHost).pages, 6);
  EXPECT_EQ(FindAndLoad(1, 10), 10);
}

TEST_F(TiersTest, AnUpperTierIsEmptiedFromOneWatermarkToTheOther) {
  Make({.host_bytes = 200 * kPage, .device_bytes = 100 * kPage, .high_watermark = 0.9, .low_watermark = 0.8},
       1);
  ns_ = Declare(SimpleSpec());
  Store(1, 45);
  Store(2, 45);
  EXPECT_EQ(Tier(kUpper).pages, 90);
  Store(3, 5);
  EXPECT_EQ(Tier(kUpper).pages, 80);
  EXPECT_EQ(Tier(kHost).pages, 15);
  EXPECT_EQ(FindAndLoad(1, 45), 45);
  EXPECT_EQ(Tier(kUpper).evicted_pages + Tier(kHost).evicted_pages, 0);
}

TEST_F(TiersTest, AnUpperTierThatCannotBeTakenFailsThePublish) {
  MakeTiers(8, std::int64_t{1} << 24);  // beyond the device's budget
  Engine engine(device(1), SimpleSpec(), 8);
  EXPECT_EQ(RefusalReason(Run(ArgsOf(Bind(ns_, engine), engine, 1, 0, 4)).status()),
            "MEMORY_BUDGET_EXCEEDED");
  EXPECT_EQ(Blocks(ns_, 1, 4), 0);
}

// Its units would not be block ids any more: no page could ever be moved.
TEST_F(TiersTest, RefusesATierThatCannotBeAddressed) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<testing::FakeDevice>("host"));
  const std::int64_t too_many = std::int64_t{1} << 39;
  const auto host = PageStore::Create(devices, {.host_bytes = too_many}).status();
  EXPECT_EQ(RefusalReason(host) + " " + RefusalField(host), "COUNT_OUT_OF_RANGE host_bytes");
  const auto upper = PageStore::Create(devices, {.device_bytes = too_many}).status();
  EXPECT_EQ(RefusalReason(upper) + " " + RefusalField(upper), "COUNT_OUT_OF_RANGE device_bytes");
  EXPECT_TRUE(PageStore::Create(devices, {.device_bytes = too_many - 512}).ok());  // taken when it is used
}

TEST_F(TiersTest, PagesOfSeveralSizesShareATier) {
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.bytes_per_block = 8 * kPage});
  Make({.host_bytes = 64 * kPage, .device_bytes = 64 * kPage, .high_watermark = 1, .low_watermark = 1}, 1);
  const NamespaceId small = Declare(SimpleSpec(kPage));
  NamespaceSpec large = SimpleSpec(8 * kPage);
  large.key.salt = "large";
  const NamespaceId large_id = Declare(large);
  StoreTest::Store(small, SimpleSpec(kPage), device(1), 1, 64);
  // The others take what they need, slab by slab.
  for (std::uint64_t prefix = 1; prefix <= 8; ++prefix)
    StoreTest::Store(large_id, large, device(1), prefix, 1);
  EXPECT_EQ(StoreTest::FindAndLoad(large_id, large, device(1), 8, 1), 1);
  EXPECT_GE(StoreTest::FindAndLoad(small, SimpleSpec(kPage), device(1), 1, 64), 1);
}

// What is emptied in the background is not wanted by anybody yet: nothing is lost for it.
TEST_F(TiersTest, AnUpperTierIsNotEmptiedIntoAHostTierWithoutRoom) {
  for (const auto policy : {PageStore::Policy::kLru, PageStore::Policy::kS3Fifo}) {
    for (const bool pinned : {true, false}) {
      const std::int64_t host_pages = pinned ? 10 : 0;
      Make({.host_bytes = host_pages * kPage,
            .device_bytes = 100 * kPage,
            .policy = policy,
            .high_watermark = 0.9,
            .low_watermark = 0.8},
           1);
      ns_ = Declare(SimpleSpec());
      LeaseId lease{};
      if (pinned) {
        Store(1, host_pages, kHostDevice);
        const auto hit = Find(ns_, 1, host_pages);
        ASSERT_EQ(hit->blocks, host_pages);
        lease = hit->lease;
      }
      Store(2, 45);
      for (std::uint64_t prefix = 3; prefix < 13; ++prefix) Store(prefix, 5);
      EXPECT_EQ(Tier(kUpper).pages, 95);
      EXPECT_EQ(FindAndLoad(2, 45), 45);
      EXPECT_EQ(Tier(kUpper).pages, 95);
      EXPECT_EQ(Tier(kUpper).evicted_pages + Tier(kHost).evicted_pages, 0);
      // What is wanted now is room enough to drop for.
      Store(13, 10);
      EXPECT_EQ(Tier(kUpper).pages, 100);
      EXPECT_EQ(Tier(kUpper).evicted_pages, 5);
      EXPECT_EQ(Blocks(ns_, 13, 10), 10);
      if (!pinned) continue;
      // With room below, the background takes up where it was.
      store_->Release(kSession, lease);
      Store(14, 1);
      EXPECT_EQ(Tier(kUpper).pages, 80);
    }
  }
}

}  // namespace
}  // namespace kvsummary
