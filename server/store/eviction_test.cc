// What goes when there is no room.
#include <gtest/gtest.h>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::HashOf;
using testing::SimpleSpec;

using EvictionTest = testing::StoreTest;

TEST_F(EvictionTest, TheTailOfAPrefixGoesBeforeItsHead) {
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

TEST_F(EvictionTest, WhatIsUsedStays) {
  Make({.host_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Store(ns, SimpleSpec(), device(0), 1, 4);
  Store(ns, SimpleSpec(), device(0), 2, 4);
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
  Store(ns, SimpleSpec(), device(0), 3, 4);
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
  EXPECT_EQ(Blocks(ns, 2, 4), 0);
}

TEST_F(EvictionTest, WhatFindsNoRoomIsTheTail) {
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

TEST_F(EvictionTest, WithoutRoomNothingIsStored) {
  Make({});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  EXPECT_EQ(RefusalReason(Run(ArgsOf(Bind(ns, engine), engine, 1, 0, 4)).status()), "STORE_FULL");
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
}

}  // namespace
}  // namespace kvsummary
