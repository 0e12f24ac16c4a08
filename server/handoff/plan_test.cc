#include "server/handoff/plan.h"

#include <gtest/gtest.h>

#include <numeric>

namespace kvsummary {
namespace {

Part Summaries(std::int32_t layers, std::int64_t regions) {
  return {.kind = PartKind::kSummaries, .layers = {0, layers}, .count = regions, .unit_bytes = kSummaryBytes};
}

TEST(PlanTest, ChunksCoverAPartOnceAndAreAtMostAMebibyte) {
  std::vector<Part> parts;
  for (const std::int64_t regions : {1, 7, 4095, 4096, 4097, 16384}) {
    for (const int layers : {1, 2, 23, 1024}) parts.push_back(Summaries(layers, regions));
  }
  for (const std::int64_t bytes :
       {std::int64_t{1}, std::int64_t{48}, kChunkBytes - 1, kChunkBytes, kChunkBytes + 16, 3 * kChunkBytes}) {
    parts.push_back({.kind = PartKind::kBlocks, .first = 5, .count = 9, .unit_bytes = bytes});
  }
  for (const Part& part : parts) {
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < ChunkCount(part); ++i) {
      const Chunk chunk = ChunkAt(part, i);
      ASSERT_EQ(chunk.offset(part), next);
      ASSERT_GT(chunk.bytes(), 0);
      ASSERT_LE(chunk.bytes(), kChunkBytes);
      if (chunk.outers > 1) {
        ASSERT_EQ(chunk.begin, 0);
        ASSERT_EQ(chunk.end, part.outer_bytes());
      }
      next += chunk.bytes();
    }
    EXPECT_EQ(next, part.bytes());
  }
}

TEST(PlanTest, EveryResumePositionOfTheBackOffCanBeServedFromSevenPlusKPlusBRowsOn) {
  for (int k = 0; k <= 4; ++k) {
    for (int back_off = 0; back_off <= 10; ++back_off) {
      for (std::int64_t n = 1; n <= 60; ++n) {
        const auto positions = TailPositions(n, back_off, n - 1 + k, 7 + k + back_off);
        for (std::int64_t r = std::max<std::int64_t>(0, n - back_off); r <= n; ++r) {
          EXPECT_TRUE(CanResume(r, n, positions)) << n << " " << r << " " << back_off;
        }
        EXPECT_FALSE(CanResume(n + 1, n, positions));
        EXPECT_FALSE(CanResume(-1, n, positions));
      }
    }
  }
}

TEST(PlanTest, RowsThatTheRingHasOverwrittenAreNotPromised) {
  // Capacity 10 with three rejected drafts behind token 20: rows up to position 13 are gone.
  const auto positions = TailPositions(21, 8, 23, 10);
  EXPECT_EQ(positions, (std::vector<std::int64_t>{14, 16, 17, 18, 19, 20}));
  EXPECT_TRUE(CanResume(21, 21, positions));
  EXPECT_TRUE(CanResume(16, 21, positions));  // needs none
  EXPECT_FALSE(CanResume(15, 21, positions));
  EXPECT_EQ(NearestResume(15, 21, positions), 16);
  EXPECT_EQ(NearestResume(13, 21, positions), 16);
  EXPECT_EQ(NearestResume(11, 21, positions), 8);
  EXPECT_EQ(NearestResume(99, 21, positions), 21);
}

TEST(PlanTest, TheNearestResumePositionIsOneThatWorksAndNoneIsNearer) {
  for (std::int64_t n = 0; n <= 40; ++n) {
    for (int capacity = 7; capacity <= 20; ++capacity) {
      const auto positions = TailPositions(n, 8, n + 2, capacity);
      for (std::int64_t r = 0; r <= n; ++r) {
        const std::int64_t nearest = NearestResume(r, n, positions);
        ASSERT_TRUE(CanResume(nearest, n, positions));
        for (std::int64_t other = 0; other <= n; ++other) {
          if (!CanResume(other, n, positions)) continue;
          ASSERT_LE(std::abs(nearest - r), std::abs(other - r));
        }
      }
    }
  }
}

TEST(PlanTest, TheLastRowOfARegionIsNeverSent) {
  const auto positions = TailPositions(16, 2, 15, 100);
  EXPECT_EQ(positions, (std::vector<std::int64_t>{8, 9, 10, 11, 12, 13, 14}));
}

TEST(PlanTest, PartsThatNoOfferHasAreRefused) {
  const Part good = Summaries(2, 3);
  EXPECT_TRUE(CheckPart(good, 2).ok());
  const auto changed = [&](auto change) {
    Part part = good;
    change(part);
    return CheckPart(part, 2).ok();
  };
  EXPECT_FALSE(changed([](Part& p) { p.first = -1; }));
  EXPECT_FALSE(changed([](Part& p) { p.count = 0; }));
  EXPECT_FALSE(changed([](Part& p) { p.count = std::int64_t{1} << 62; }));
  EXPECT_FALSE(changed([](Part& p) {
    p.kind = PartKind::kBlocks;
    p.count = p.unit_bytes = 0x7fffffff;  // each of them possible, not together
  }));
  EXPECT_FALSE(changed([](Part& p) { p.layers = {1, 2}; }));
  EXPECT_FALSE(changed([](Part& p) { p.layers = {-1, 2}; }));
  EXPECT_FALSE(changed([](Part& p) { p.layers = {0, 0}; }));
  EXPECT_FALSE(changed([](Part& p) { p.layers = {0x7fffffff, 2}; }));
  EXPECT_FALSE(changed([](Part& p) { p.unit_bytes = 255; }));
  EXPECT_FALSE(changed([](Part& p) { p.positions = {1, 2, 3}; }));
  EXPECT_FALSE(changed([](Part& p) { p.kind = PartKind::kRows; }));
  const Part rows = {
      .kind = PartKind::kRows, .layers = {0, 2}, .count = 2, .unit_bytes = kRowBytes, .positions = {3, 4}};
  EXPECT_TRUE(CheckPart(rows, 2).ok());
  for (const auto& positions :
       std::vector<std::vector<std::int64_t>>{{3}, {4, 3}, {3, 3}, {-1, 3}, {3, 1L << 40}}) {
    Part part = rows;
    part.positions = positions;
    EXPECT_FALSE(CheckPart(part, 2).ok());
  }
}

}  // namespace
}  // namespace kvsummary
