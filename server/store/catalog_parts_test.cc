// The parts of the catalog, each for itself.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "server/error.h"
#include "server/store/hash_index.h"
#include "server/store/slot_allocator.h"
#include "server/store/types.h"
#include "server/store/validate.h"

namespace kvsummary {
namespace {

void ExpectSound(const SlotAllocator& slots) {
  std::vector<std::string> problems;
  slots.Check("test", problems);
  EXPECT_EQ(problems, std::vector<std::string>());
}

TEST(SlotAllocator, GivesOneSizeAllOfTheCapacity) {
  for (const std::int64_t page : {256, 512, 768, 47104}) {
    for (const std::int64_t pages : {1, 7, 64, 1000}) {
      SlotAllocator slots(pages * page + page - 256);
      std::set<Unit> given;
      for (std::int64_t i = 0; i < pages; ++i) EXPECT_TRUE(given.insert(slots.Allocate(page)).second);
      EXPECT_EQ(given.count(kNoUnit), 0u);
      EXPECT_EQ(slots.Allocate(page), kNoUnit);
      EXPECT_EQ(slots.used_bytes(), pages * page);
      ExpectSound(slots);
    }
  }
}

TEST(SlotAllocator, GivesEmptySlabsToOtherSizes) {
  SlotAllocator slots(1 << 20);
  std::vector<Unit> small;
  while (const Unit unit = slots.Allocate(256)) small.push_back(unit);
  EXPECT_EQ(slots.Allocate(1 << 20), kNoUnit);
  for (const Unit unit : small) slots.Free(unit);
  EXPECT_NE(slots.Allocate(1 << 20), kNoUnit);
  EXPECT_EQ(slots.Allocate(256), kNoUnit);
  ExpectSound(slots);
}

TEST(SlotAllocator, NeverGivesAByteTwice) {
  std::mt19937_64 random(1);
  SlotAllocator slots(3 << 20);
  std::map<Unit, std::int64_t> held;  // unit, bytes
  for (int turn = 0; turn < 20000; ++turn) {
    if (held.empty() || random() % 100 < 55) {
      const std::int64_t bytes = 256 * (std::int64_t{1} << random() % 10);
      const Unit unit = slots.Allocate(bytes);
      if (unit == kNoUnit) continue;
      ASSERT_LE(unit - 1 + bytes / 256, (3 << 20) / 256);
      const auto [at, added] = held.emplace(unit, bytes);
      ASSERT_TRUE(added);
      if (at != held.begin()) {
        ASSERT_LE(std::prev(at)->first + std::prev(at)->second / 256, unit);
      }
      if (std::next(at) != held.end()) {
        ASSERT_LE(unit + bytes / 256, std::next(at)->first);
      }
    } else {
      auto at = held.lower_bound(static_cast<Unit>(random() % (3 << 12)));
      if (at == held.end()) at = held.begin();
      slots.Free(at->first);
      held.erase(at);
    }
    if (turn % 1000 == 0) ExpectSound(slots);
  }
  for (const auto& [unit, bytes] : held) slots.Free(unit);
  EXPECT_EQ(slots.used_bytes(), 0);
  EXPECT_NE(slots.Allocate(3 << 20), kNoUnit);
}

TEST(HashIndex, FindsWhatAMapFinds) {
  std::mt19937_64 random(1);
  HashIndex index;
  std::map<std::uint64_t, Entry> map;
  const auto find = [&](std::uint64_t key, Entry want) {
    return index.Find(key, [&](Entry e) { return e == want; });
  };
  for (Entry turn = 0; turn < 30000; ++turn) {
    // Few keys, and few tags: long runs and equal tags.
    const std::uint64_t key = (random() % 64) << 32 << (random() % 2 * 20) | (random() % 64);
    if (const auto known = map.find(key); known != map.end()) {
      EXPECT_EQ(find(key, known->second), known->second);
      if (random() % 2 == 0) continue;
      index.Erase(key, known->second);
      EXPECT_EQ(find(key, known->second), kNoEntry);
      map.erase(known);
    } else {
      index.Insert(key, turn);
      map.emplace(key, turn);
    }
    EXPECT_EQ(index.size(), map.size());
  }
  for (const auto& [key, entry] : map) EXPECT_EQ(find(key, entry), entry);
}

// Of which the first 20 bytes are a hash.
std::string Wide(int i) { return std::string(64, static_cast<char>(i)); }

TEST(PageTable, RecordsStayWhereTheyAre) {
  PageTable pages(20);
  std::vector<const char*> hashes;
  for (int i = 0; i < 5000; ++i) {
    const std::string hash = Wide(i);
    const Entry e = pages.Add(hash.data());
    ASSERT_EQ(e, static_cast<Entry>(i));
    hashes.push_back(pages.hash(e));
    pages.extra(e).checksum = static_cast<std::uint64_t>(i);
  }
  for (Entry e = 0; e < 5000; ++e) {
    EXPECT_EQ(pages.hash(e), hashes[e]);
    EXPECT_TRUE(pages.HashIs(e, Wide(static_cast<int>(e)).data()));
    EXPECT_EQ(pages.extra(e).checksum, e);
  }
  pages.Remove(17);
  EXPECT_EQ(pages.Add(Wide(1).data()), 17u);
}

TEST(CheckSpec, RefusesWhatNoNamespaceCanBe) {
  NamespaceSpec good;
  good.key.model = "step-5";
  good.key.layers = 23;
  good.key.block_size = 64;
  good.hash_width = 32;
  good.groups = {{.bytes_per_block = 47104},
                 {.kind = GroupKind::kWindow, .window_tokens = 512, .bytes_per_block = 1},
                 {.kind = GroupKind::kRing}};
  EXPECT_TRUE(CheckSpec(good).ok());
  const auto refusal = [&](auto change) {
    NamespaceSpec spec = good;
    change(spec);
    const auto s = CheckSpec(spec);
    return RefusalReason(s) + " " + RefusalField(s);
  };
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.model.clear(); }), "NAME_INVALID identity.model");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.model.assign(129, 'm'); }), "NAME_INVALID identity.model");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.model = "\x1b[2J"; }), "NAME_INVALID identity.model");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.layers = 0; }), "COUNT_OUT_OF_RANGE identity.layers");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.block_size = 12; }),
            "BLOCK_SIZE_INVALID identity.block_size");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.rank = 1; }), "COUNT_OUT_OF_RANGE identity.shard_rank");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.key.salt.assign(65, 's'); }),
            "COUNT_OUT_OF_RANGE identity.salt");
  for (const int width : {0, 7, 65}) {
    EXPECT_EQ(refusal([&](NamespaceSpec& s) { s.hash_width = width; }), "HASH_WIDTH_INVALID hash_width");
  }
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups = {{.kind = GroupKind::kRing}}; }),
            "GROUP_INVALID groups");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups[0].bytes_per_block = 0; }),
            "GROUP_INVALID groups[0].bytes_per_block");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups[0].window_tokens = 1; }),
            "GROUP_INVALID groups[0].window_tokens");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups[1].window_tokens = 0; }),
            "GROUP_INVALID groups[1].window_tokens");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups[1].lookahead_blocks = 2; }),
            "GROUP_INVALID groups[1].lookahead_blocks");
  EXPECT_EQ(refusal([](NamespaceSpec& s) { s.groups[2].bytes_per_block = 1; }),
            "GROUP_INVALID groups[2].bytes_per_block");
}

}  // namespace
}  // namespace kvsummary
