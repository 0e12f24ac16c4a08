// What a lookup finds.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::HashesOf;
using testing::HashOf;
using testing::SimpleSpec;

using LookupTest = testing::StoreTest;

TEST_F(LookupTest, PrefixesShareTheirHead) {
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

TEST_F(LookupTest, HashesInAnotherOrderOrOfAnotherWidthNeverMatch) {
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

TEST_F(LookupTest, WindowsNeedTheirLastBlocksOnly) {
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.kind = GroupKind::kWindow, .window_tokens = 130, .bytes_per_block = 1024});
  spec.groups.push_back({.kind = GroupKind::kRing});
  Make({.host_bytes = 64 * 512, .device_bytes = 64 * 512}, 1);
  const NamespaceId ns = Declare(spec);
  Engine engine(device(1), spec, 16);
  const auto cache = Bind(ns, engine);
  auto args = ArgsOf(cache, engine, 1, 0, 8);
  for (const int absent : {0, 1, 2, 6}) args.groups[1].block_ids[static_cast<std::size_t>(absent)] = -1;
  ASSERT_EQ(Run(args)->stored, 12);
  // Blocks 3, 4, 5 of the window are there: 6 blocks = 384 tokens need (384 - 130 + 1) / 64 = 3 and on.
  const auto hit = Find(ns, 1, 8);
  ASSERT_TRUE(hit.ok());
  EXPECT_EQ(hit->blocks, 6);
  ASSERT_EQ(hit->groups.size(), 2u);
  EXPECT_EQ(hit->groups[1].group, 1);
  EXPECT_EQ(hit->groups[1].first_block_index, 3);
  EXPECT_EQ(hit->groups[1].elsewhere_pages, 3);
  Engine target(device(1), spec, 16);
  ExpectLoaded(Start(LoadOf(*hit, Bind(ns, target))).get(), *hit, target, 1);
  EXPECT_TRUE(target.Untouched(1, 3));
}

TEST_F(LookupTest, LookaheadNeedsOneBlockMore) {
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.lookahead_blocks = 1, .bytes_per_block = 256});
  Make({.host_bytes = 64 * 512});
  const NamespaceId ns = Declare(spec);
  Store(ns, spec, device(0), 1, 8);
  EXPECT_EQ(Blocks(ns, 1, 8), 7);
  EXPECT_EQ(Blocks(ns, 1, 16), 7);
  EXPECT_EQ(Blocks(ns, 1, 5), 4);
  EXPECT_EQ(Blocks(ns, 1, 1), 0);
  EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 8), 7);
}

// Pages of all life stages lie between those that a lookup wants, in the order of their publishing.
TEST_F(LookupTest, FindsWhatEventsTellHoweverPagesCameToLie) {
  constexpr std::uint64_t kPrefixes = 6;
  constexpr std::int64_t kBlocks = 300;
  constexpr std::uint64_t kShared = 90;  // of all prefixes
  for (const std::int64_t room : {600, 2000}) {
    Make({.host_bytes = room * 512});
    const NamespaceId ns = Declare(SimpleSpec());
    Engine engine(device(0), SimpleSpec(), kBlocks + 1);
    const auto cache = Bind(ns, engine);
    std::mt19937_64 random(1);
    std::set<std::string> visible;
    std::uint64_t next = 0;
    const auto hear = [&] {
      const auto batch = store_->ReadEvents(kSession, ns, next, 1'000'000);
      next = batch->next;
      for (const StoreEvent& event : batch->events) {
        for (std::size_t at = 0; at < event.hashes.size(); at += 32) {
          const std::string hash = event.hashes.substr(at, 32);
          if (event.kind == EventKind::kStored) {
            EXPECT_TRUE(visible.insert(hash).second);
          } else {
            EXPECT_EQ(visible.erase(hash), 1u);
          }
        }
      }
    };
    for (int turn = 0; turn < 400; ++turn) {
      const std::uint64_t prefix = 1 + random() % kPrefixes;
      const auto first = static_cast<std::int64_t>(random() % kBlocks / 10 * 10);
      const auto count = 1 + static_cast<std::int64_t>(random() % 100) % (kBlocks - first);
      auto args = ArgsOf(cache, engine, prefix, first, count);
      args.hashes = HashesOf(prefix, first, count, 32, kShared);
      if (first > 0) args.parent_hash = HashesOf(prefix, first - 1, 1, 32, kShared);
      ASSERT_TRUE(Run(args).ok());
      hear();
      std::string hashes = HashesOf(1 + random() % kPrefixes, 0, kBlocks, 32, kShared);
      if (random() % 4 == 0) ++hashes[random() % hashes.size()];
      std::int64_t want = 0;
      while (want < kBlocks && visible.count(hashes.substr(static_cast<std::size_t>(want) * 32, 32)) != 0)
        ++want;
      const auto hit = store_->Lookup({.session = kSession, .name_space = ns, .hashes = hashes});
      ASSERT_TRUE(hit.ok()) << hit.status();
      ASSERT_EQ(hit->blocks, want) << turn;
      if (want > 0) store_->Release(kSession, hit->lease);
    }
    store_->Quiesce();
    EXPECT_EQ(store_->Check(), std::vector<std::string>());
  }
}

}  // namespace
}  // namespace kvsummary
