#include "client/replay/block_pool.h"

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "client/replay/rows.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

TEST(BlockPoolTest, NeverGivesTheNullBlock) {
  BlockPool pool(4);
  std::set<std::int64_t> blocks;
  while (const auto block = pool.Allocate()) blocks.insert(*block);
  EXPECT_EQ(blocks, (std::set<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(pool.free_blocks(), 0);
}

TEST(BlockPoolTest, FreedBlocksAreFoundUntilTheyAreAllocatedAnew) {
  BlockPool pool(3);
  const std::int64_t a = *pool.Allocate();
  pool.Publish(a, 7);
  pool.Release(a);
  EXPECT_EQ(pool.Acquire(7), a);
  pool.Release(a);
  EXPECT_NE(*pool.Allocate(), a) << "the block without a key goes first";
  EXPECT_EQ(*pool.Allocate(), a);
  EXPECT_EQ(pool.Acquire(7), std::nullopt);
  EXPECT_EQ(pool.cached_blocks(), 0);
}

TEST(BlockPoolTest, SharedBlocksStayUsedUntilTheLastRelease) {
  BlockPool pool(2);
  const std::int64_t a = *pool.Allocate();
  pool.Publish(a, 7);
  EXPECT_EQ(pool.Acquire(7), a);
  pool.Release(a);
  EXPECT_EQ(pool.Allocate(), std::nullopt);
  pool.Release(a);
  EXPECT_EQ(pool.Allocate(), a);
}

TEST(BlockPoolTest, EvictsTheLongestUnused) {
  BlockPool pool(4);
  for (const std::uint64_t key : {1, 2, 3}) pool.Publish(*pool.Allocate(), key);
  for (const std::int64_t block : {1, 2, 3}) pool.Release(block);
  pool.Release(*pool.Acquire(1));
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.Allocate(), 3);
  EXPECT_EQ(pool.Acquire(1), 1);
}

TEST(BlockPoolTest, AKeyNamesOneBlock) {
  BlockPool pool(3);
  const std::int64_t a = *pool.Allocate();
  const std::int64_t b = *pool.Allocate();
  pool.Publish(a, 7);
  pool.Publish(b, 7);
  EXPECT_EQ(pool.Acquire(7), a);
  EXPECT_EQ(pool.cached_blocks(), 1);
  pool.Release(b);
  EXPECT_EQ(pool.Allocate(), b);
  EXPECT_EQ(pool.Acquire(7), a) << "b never carried the key";
}

// Random use against a model that keeps reference counts and keys in maps.
TEST(BlockPoolTest, KeepsItsBooksUnderRandomUse) {
  constexpr std::int64_t kBlocks = 24;
  BlockPool pool(kBlocks);
  std::map<std::int64_t, int> references;
  std::map<std::uint64_t, std::int64_t> by_key;
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    const std::uint64_t random = MixBits(i, 1, 2, 3);
    const std::uint64_t key = random / 4 % 40;
    const auto used =
        references.empty()
            ? references.end()
            : std::next(references.begin(), static_cast<std::ptrdiff_t>(random / 256 % references.size()));
    switch (random % 4) {
      case 0:
        if (const auto block = pool.Allocate()) {
          ASSERT_GT(*block, 0);
          ASSERT_LT(*block, kBlocks);
          ASSERT_TRUE(references.emplace(*block, 1).second) << "a used block was allocated";
          std::erase_if(by_key, [&](const auto& entry) { return entry.second == *block; });
        } else {
          ASSERT_EQ(std::ssize(references), kBlocks - 1);
        }
        break;
      case 1: {
        const auto expected = by_key.find(key);
        const auto block = pool.Acquire(key);
        ASSERT_EQ(block.has_value(), expected != by_key.end());
        if (block) {
          ASSERT_EQ(*block, expected->second);
          ++references[*block];
        }
        break;
      }
      case 2:
        if (used == references.end()) break;
        // A block gets one key in its life.
        if (std::ranges::any_of(by_key, [&](const auto& e) { return e.second == used->first; })) break;
        pool.Publish(used->first, key);
        by_key.emplace(key, used->first);
        break;
      default:
        if (used == references.end()) break;
        pool.Release(used->first);
        if (--used->second == 0) references.erase(used);
    }
    ASSERT_EQ(pool.used_blocks(), std::ssize(references));
    ASSERT_EQ(pool.used_blocks() + pool.free_blocks(), kBlocks - 1);
    ASSERT_EQ(pool.cached_blocks(), std::ssize(by_key));
  }
}

}  // namespace
}  // namespace kvsummary
