// The host's movement of pages, byte for byte against a walk over single bytes.
#include "kernels/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/copy_testing.h"

namespace kvsummary {
namespace {

using testing::Below;
using testing::Layout;
using testing::Random;
using Bytes = std::vector<std::uint8_t>;
using Ids = std::vector<std::int64_t>;

// Where byte `at` of a block's page lies in memory.
std::size_t ByteOf(const Layout& layout, std::int64_t block, std::int64_t at) {
  for (const PageView& view : layout.views) {
    if (at < view.bytes) return static_cast<std::size_t>(view.offset + block * view.block_stride + at);
    at -= view.bytes;
  }
  ADD_FAILURE() << "page ends before byte " << at;
  return 0;
}

bool Inside(const Layout& layout, std::int64_t block) { return block >= 0 && block < layout.blocks; }

// A cache with random bytes.
struct Cache {
  Cache(Random& random, const std::vector<std::int64_t>& shape, std::int64_t blocks)
      : layout(testing::RandomLayout(random, shape, blocks, 1)),
        memory(testing::RandomBytes(random, layout.memory_bytes)) {}
  PageSet Set() { return layout.Set(memory.data(), layout.views.data()); }

  Layout layout;
  Bytes memory;
};

// Calls body(random) for many seeds, with the seed in failures.
template <typename Body>
void ForManySeeds(const Body& body) {
  for (std::uint64_t seed = 0; seed < 100 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    body(random);
  }
}

std::vector<std::int64_t> SmallShape(Random& random) { return testing::RandomShape(random, 9, 70, 1); }

TEST(HostPages, GatherReadsLivePagesAndLeavesTheRestOfTheBuffer) {
  ForManySeeds([](Random& random) {
    Cache cache(random, SmallShape(random), 2 + Below(random, 20));
    const Layout& layout = cache.layout;
    Ids ids = testing::RandomBlocks(random, layout.blocks, Below(random, layout.blocks));
    testing::SpoilSome(random, layout.blocks, false, ids);
    Bytes buffer = testing::RandomBytes(random, static_cast<std::int64_t>(ids.size()) * layout.page_bytes);
    Bytes want = buffer;
    unsigned long long want_skipped = 5;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= layout.blocks) ++want_skipped;
      if (!Inside(layout, ids[i])) continue;
      for (std::int64_t b = 0; b < layout.page_bytes; ++b)
        want[i * static_cast<std::size_t>(layout.page_bytes) + static_cast<std::size_t>(b)] =
            cache.memory[ByteOf(layout, ids[i], b)];
    }
    const Bytes before = cache.memory;
    unsigned long long skipped = 5;
    ASSERT_EQ(HostPages().Gather(cache.Set(), ids.data(), static_cast<std::int64_t>(ids.size()),
                                 buffer.data(), {.skipped = &skipped}),
              0);
    EXPECT_EQ(buffer, want);
    EXPECT_EQ(skipped, want_skipped);
    EXPECT_EQ(cache.memory, before);
  });
}

TEST(HostPages, ScatterWritesLivePagesAndNeitherGapsNorTheNullBlock) {
  ForManySeeds([](Random& random) {
    Cache cache(random, SmallShape(random), 2 + Below(random, 20));
    const Layout& layout = cache.layout;
    Ids ids = testing::RandomBlocks(random, layout.blocks, Below(random, layout.blocks));
    testing::SpoilSome(random, layout.blocks, true, ids);
    const Bytes buffer =
        testing::RandomBytes(random, static_cast<std::int64_t>(ids.size()) * layout.page_bytes);
    Bytes want = cache.memory;
    unsigned long long want_skipped = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == 0 || ids[i] >= layout.blocks) ++want_skipped;
      if (ids[i] == 0 || !Inside(layout, ids[i])) continue;
      for (std::int64_t b = 0; b < layout.page_bytes; ++b)
        want[ByteOf(layout, ids[i], b)] =
            buffer[i * static_cast<std::size_t>(layout.page_bytes) + static_cast<std::size_t>(b)];
    }
    unsigned long long skipped = 0;
    ASSERT_EQ(HostPages().Scatter(buffer.data(), cache.Set(), ids.data(),
                                  static_cast<std::int64_t>(ids.size()), {.skipped = &skipped}),
              0);
    EXPECT_EQ(cache.memory, want);
    EXPECT_EQ(skipped, want_skipped);
  });
}

TEST(HostPages, CopyMovesPagesBetweenDifferentLayouts) {
  ForManySeeds([](Random& random) {
    const auto shape = SmallShape(random);
    Cache source(random, shape, 2 + Below(random, 20));
    Cache sink(random, shape, 2 + Below(random, 20));
    const std::int64_t count = Below(random, std::min(source.layout.blocks, sink.layout.blocks));
    Ids from = testing::RandomBlocks(random, source.layout.blocks, count);
    Ids to = testing::RandomBlocks(random, sink.layout.blocks, count);
    testing::SpoilSome(random, source.layout.blocks, false, from);
    testing::SpoilSome(random, sink.layout.blocks, true, to);
    Bytes want = sink.memory;
    unsigned long long want_skipped = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i] < 0 || to[i] < 0) continue;
      if (!Inside(source.layout, from[i]) || to[i] == 0 || !Inside(sink.layout, to[i])) {
        ++want_skipped;
        continue;
      }
      for (std::int64_t b = 0; b < source.layout.page_bytes; ++b)
        want[ByteOf(sink.layout, to[i], b)] = source.memory[ByteOf(source.layout, from[i], b)];
    }
    unsigned long long skipped = 0;
    ASSERT_EQ(
        HostPages().Copy(source.Set(), from.data(), sink.Set(), to.data(), count, {.skipped = &skipped}), 0);
    EXPECT_EQ(sink.memory, want);
    EXPECT_EQ(skipped, want_skipped);
  });
}

// Those are written around the processor's cache, but for short runs; of any length and alignment.
TEST(HostPages, LargeMovesAreTheSameBytes) {
  constexpr std::int64_t kBlocks = 7000;  // of more than 2,600 bytes
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const std::vector<std::int64_t> shape = {2048, 3, 256 + Below(random, 64), 300, 17};
    Cache source(random, shape, kBlocks);
    Cache sink(random, shape, kBlocks);
    const Ids from = testing::RandomBlocks(random, kBlocks, kBlocks - 1);
    const Ids to = testing::RandomBlocks(random, kBlocks, kBlocks - 1);
    Bytes want = sink.memory;
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::int64_t at = 0;
      for (const std::int64_t bytes : shape) {
        std::copy_n(&source.memory[ByteOf(source.layout, from[i], at)], bytes,
                    &want[ByteOf(sink.layout, to[i], at)]);
        at += bytes;
      }
    }
    ASSERT_EQ(HostPages().Copy(source.Set(), from.data(), sink.Set(), to.data(), kBlocks - 1, {}), 0);
    EXPECT_TRUE(sink.memory == want);
  }
}

TEST(HostPages, ScatterOfAGatherRestoresThePages) {
  ForManySeeds([](Random& random) {
    Cache cache(random, SmallShape(random), 30);
    const Ids ids = testing::RandomBlocks(random, 30, 20);
    const Bytes before = cache.memory;
    Bytes buffer(static_cast<std::size_t>(20 * cache.layout.page_bytes));
    ASSERT_EQ(HostPages().Gather(cache.Set(), ids.data(), 20, buffer.data(), {}), 0);
    for (const std::int64_t id : ids) {
      for (std::int64_t b = 0; b < cache.layout.page_bytes; ++b)
        cache.memory[ByteOf(cache.layout, id, b)] ^= 0xff;
    }
    ASSERT_NE(cache.memory, before);
    ASSERT_EQ(HostPages().Scatter(buffer.data(), cache.Set(), ids.data(), 20, {}), 0);
    EXPECT_EQ(cache.memory, before);
  });
}

TEST(HostPages, GatherReadsTheNullBlock) {
  Random random(1);
  Cache cache(random, {24}, 3);
  const std::int64_t null_block = 0;
  Bytes buffer(24);
  unsigned long long skipped = 0;
  ASSERT_EQ(HostPages().Gather(cache.Set(), &null_block, 1, buffer.data(), {.skipped = &skipped}), 0);
  EXPECT_EQ(skipped, 0u);
  EXPECT_EQ(buffer.front(), cache.memory[ByteOf(cache.layout, 0, 0)]);
}

TEST(HostPages, EmptyListsAndEmptyPagesMoveNothing) {
  Random random(1);
  Cache cache(random, {24}, 3);
  EXPECT_EQ(HostPages().Gather(cache.Set(), nullptr, 0, nullptr, {}), 0);
  const PageSet empty{.base = cache.memory.data(), .blocks = 3};
  const std::int64_t id = 1;
  EXPECT_EQ(HostPages().Gather(empty, &id, 1, nullptr, {}), 0);
}

TEST(HostPages, CallsThatCannotBeObeyedAreRefused) {
  Random random(1);
  Cache cache(random, {24, 8}, 3);
  const std::int64_t id = 1;
  Bytes buffer(32);
  const auto gather = [&](const PageSet& set, const std::int64_t* ids, std::int64_t pages) {
    return HostPages().Gather(set, ids, pages, buffer.data(), {});
  };
  EXPECT_EQ(gather(cache.Set(), &id, 1), 0);
  EXPECT_EQ(gather(cache.Set(), &id, -1), kInvalidMove);
  EXPECT_EQ(gather(cache.Set(), &id, kMaxIndex + 1), kInvalidMove);
  EXPECT_EQ(gather(cache.Set(), nullptr, 1), kInvalidMove);
  EXPECT_EQ(HostPages().Gather(cache.Set(), &id, 1, nullptr, {}), kInvalidMove);
  const auto changed = [&](auto&& change) {
    PageSet set = cache.Set();
    change(set);
    return gather(set, &id, 1);
  };
  EXPECT_EQ(changed([](PageSet& s) { s.base = nullptr; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.views = nullptr; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.view_count = 0; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.view_count = -1; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.view_count = kMaxPageViews + 1; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.page_bytes = -1; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.page_bytes = kMaxIndex + 1; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.blocks = -1; }), kInvalidMove);
  EXPECT_EQ(changed([](PageSet& s) { s.blocks = kMaxIndex + 1; }), kInvalidMove);

  Cache fewer_views(random, {32}, 3);
  EXPECT_EQ(HostPages().Copy(cache.Set(), &id, fewer_views.Set(), &id, 1, {}), kInvalidMove);
  Cache other_bytes(random, {24, 9}, 3);
  EXPECT_EQ(HostPages().Copy(cache.Set(), &id, other_bytes.Set(), &id, 1, {}), kInvalidMove);
}

TEST(HostPages, ViewsThatDoNotFitMoveNothingAndCountEveryPage) {
  Random random(1);
  const Ids ids = {1, 2};
  const auto expect_skipped = [&](const char* what, const std::vector<PageView>& views) {
    SCOPED_TRACE(what);
    Cache cache(random, {24, 8}, 3);
    PageSet set = cache.Set();
    set.views = views.data();
    set.view_count = static_cast<std::int32_t>(views.size());
    const Bytes before(64, 0xa5);
    Bytes buffer = before;
    unsigned long long skipped = 0;
    EXPECT_EQ(HostPages().Gather(set, ids.data(), 2, buffer.data(), {.skipped = &skipped}), 0);
    EXPECT_EQ(buffer, before);
    EXPECT_EQ(skipped, 2u);
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  expect_skipped("too few bytes", {{0, 32, 24}});
  expect_skipped("too many bytes", {{0, 32, 24}, {0, 32, 9}});
  expect_skipped("negative bytes", {{0, 32, -8}, {0, 32, 24}, {0, 32, 16}});
  expect_skipped("bytes that wrap around", {{0, 32, kHuge}, {0, 32, kHuge}, {0, 32, 34}});

  Cache source(random, {24, 8}, 3);
  Cache sink(random, {8, 24}, 3);
  const Bytes before = sink.memory;
  unsigned long long skipped = 0;
  EXPECT_EQ(HostPages().Copy(source.Set(), ids.data(), sink.Set(), ids.data(), 2, {.skipped = &skipped}), 0);
  EXPECT_EQ(sink.memory, before);
  EXPECT_EQ(skipped, 2u);
}

TEST(HostPages, BadPagesNeedNoCounter) {
  Random random(1);
  Cache cache(random, {24}, 3);
  const Bytes before = cache.memory;
  const Bytes buffer(24, 1);
  for (const std::int64_t id : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{3}})
    EXPECT_EQ(HostPages().Scatter(buffer.data(), cache.Set(), &id, 1, {}), 0);
  EXPECT_EQ(cache.memory, before);
}

}  // namespace
}  // namespace kvsummary
