// What a lookup finds.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kvsummary
