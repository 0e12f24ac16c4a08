// The replay over an in-process cache and the host kernels, and over one that goes wrong.
#include "client/replay/engine.h"

#include <cstddef>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "client/replay/memory_target.h"
#include "client/replay/report.h"
#include "client/replay/rows.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

// Flips one bit of the summary of (layer, region) in what the `n`-th read of pages from now on answers.
class FlippingTarget : public MemoryTarget {
 public:
  FlippingTarget(const CacheGeometry& g, std::int32_t layer, std::int64_t region)
      : MemoryTarget(g), layer_(layer), region_(region) {}

  absl::StatusOr<std::vector<std::uint8_t>> ReadPages(std::span<const std::int64_t> blocks) override {
    auto pages = MemoryTarget::ReadPages(blocks);
    const std::int64_t regions_per_block = geometry().block_size / kRegionTokens;
    const auto at = static_cast<std::size_t>(region_ / regions_per_block * geometry().dense_block_stride() +
                                             layer_ * geometry().page_bytes() +
                                             region_ % regions_per_block * kSummaryBytes + 77);
    if (!std::exchange(flipped_, true)) (*pages)[at] ^= 0x01;
    return pages;
  }

 private:
  const std::int32_t layer_;
  const std::int64_t region_;
  bool flipped_ = false;
};

class RingFlippingTarget : public MemoryTarget {
 public:
  using MemoryTarget::MemoryTarget;
  absl::StatusOr<std::vector<std::uint16_t>> ReadRing(std::int64_t ring_block) override {
    auto rows = MemoryTarget::ReadRing(ring_block);
    for (std::uint16_t& value : *rows) value ^= 1;
    return rows;
  }
};

// Twelve requests, prefixes shared, lengths at and off block and region boundaries.
std::vector<TraceRequest> SmallTrace() {
  return {{0, 600, 30, {0, 1}},     {0, 512, 9, {0}},     {0, 1024, 17, {0, 2}}, {0, 5, 3, {3}},
          {0, 1100, 40, {0, 2, 4}}, {0, 600, 1, {0, 1}},  {0, 64, 64, {5}},      {0, 513, 12, {0, 6}},
          {0, 1536, 8, {0, 2, 7}},  {0, 700, 21, {8, 9}}, {0, 600, 33, {0, 1}},  {0, 8, 1, {10}}};
}

// A store of all that was published, by (first hash id, block): bytes come and go by the target's memory.
class MemoryPrefixes : public PrefixStore {
 public:
  explicit MemoryPrefixes(MemoryTarget& target) : target_(target) {}

  absl::StatusOr<FoundPrefix> Find(std::int64_t request) override {
    ++finds_;
    const TraceRequest& r = trace_[static_cast<std::size_t>(request)];
    found_.clear();
    for (std::int64_t block = 0; block < r.input_length / 64; ++block) {
      const auto page = pages_.find(PromptBlockKey(r, block, 64));
      if (page == pages_.end()) break;
      found_.push_back(page->second);
    }
    return FoundPrefix{std::ssize(found_), std::ssize(found_)};
  }
  absl::StatusOr<std::int64_t> Load(std::span<const std::int64_t> blocks) override {
    const std::int64_t good = std::ssize(blocks) - (bad_ && !blocks.empty() ? 1 : 0);
    for (std::int64_t i = 0; i < good; ++i) {
      target_.SetPage(blocks[static_cast<std::size_t>(i)], found_[static_cast<std::size_t>(i)]);
    }
    return good;
  }
  absl::Status Drop() override { return absl::OkStatus(); }
  absl::Status Publish(const PublishedBlocks& published) override {
    if (fail_) return absl::UnavailableError("the store is gone");
    const TraceRequest& r = trace_[static_cast<std::size_t>(published.request)];
    for (std::size_t i = 0; i < published.blocks.size(); ++i) {
      const std::int64_t block = published.first_block + static_cast<std::int64_t>(i);
      EXPECT_LE((block + 1) * 64, published.committed_tokens);
      if ((block + 1) * 64 > r.input_length) {
        ++output_blocks_;
        continue;
      }
      pages_.try_emplace(PromptBlockKey(r, block, 64),
                         *target_.ReadPages(std::span(&published.blocks[i], 1)));
    }
    return absl::OkStatus();
  }

  MemoryTarget& target_;
  const std::vector<TraceRequest> trace_ = SmallTrace();
  std::map<std::uint64_t, std::vector<std::uint8_t>> pages_;
  std::vector<std::vector<std::uint8_t>> found_;
  std::int64_t finds_ = 0;
  std::int64_t output_blocks_ = 0;
  bool bad_ = false;
  bool fail_ = false;
};

class MiscountingTarget : public MemoryTarget {
 public:
  using MemoryTarget::MemoryTarget;
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& u) override {
    auto result = MemoryTarget::Prefill(layers, u);
    result->regions_closed += 1;
    return result;
  }
};

class RefusingTarget : public MemoryTarget {
 public:
  using MemoryTarget::MemoryTarget;
  absl::StatusOr<UpdateResult> Decode(LayerSpan, const DecodeUpdate&) override {
    return absl::UnavailableError("draining");
  }
};

EngineOptions Options(std::int32_t k) {
  CacheGeometry g{.layers = 3, .blocks = 200, .block_size = 64, .ring_blocks = 6, .capacity = 8 + k, .k = k};
  g.block_stride = g.dense_block_stride();
  g.rows_per_layer = g.capacity + 1;
  return {.geometry = g, .concurrency = 5, .chunk_tokens = 300, .sampled_requests = 12, .seed = 9};
}

absl::StatusOr<ReplayReport> Replay(Target& target, const EngineOptions& options) {
  const std::atomic<bool> stop = false;
  return ReplayTrace(
      SmallTrace(), options, target, [](auto...) {}, stop);
}

TEST(ReplayEngineTest, RightBytesPass) {
  for (const std::int32_t k : {0, 1, 3}) {
    for (const std::int64_t blocks : {200, 34}) {
      EngineOptions options = Options(k);
      options.geometry.blocks = blocks;
      MemoryTarget target(options.geometry);
      const auto report = Replay(target, options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->counts.finished, 12);
      EXPECT_EQ(report->sampled_requests, 12);
      EXPECT_EQ(report->mismatch_count, 0) << report->mismatches[0].what;
      EXPECT_EQ(report->counts.preemptions > 0, blocks == 34);
      std::int64_t regions = 0;
      std::int64_t ring_rows = 0;
      for (const TraceRequest& r : SmallTrace()) {
        regions += r.rows() / kRegionTokens * 3;
        ring_rows += r.rows() % kRegionTokens * 3;
      }
      EXPECT_EQ(report->checked_regions, regions);
      EXPECT_EQ(report->checked_ring_rows, ring_rows);
      EXPECT_FALSE(report->interrupted);
    }
  }
}

TEST(ReplayEngineTest, PrefixesFromAStoreGiveTheSameBytes) {
  for (const std::int64_t blocks : {200, 34}) {
    for (const bool bad : {false, true}) {
      EngineOptions options = Options(3);
      options.geometry.blocks = blocks;
      MemoryTarget target(options.geometry);
      MemoryPrefixes prefixes(target);
      prefixes.bad_ = bad;  // the last block of every prefix has to be computed after all
      options.prefixes = &prefixes;
      const auto report = Replay(target, options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->counts.finished, 12);
      EXPECT_EQ(report->mismatch_count, 0) << report->mismatches[0].what;
      EXPECT_GT(report->counts.prefix_hit_tokens, 0);
      EXPECT_GE(report->counts.found_tokens, bad ? 0 : report->counts.prefix_hit_tokens);
      EXPECT_GT(report->checked_loaded_regions, 0);
      EXPECT_EQ(prefixes.output_blocks_, 0);
      EXPECT_EQ(report->counts.preemptions > 0, blocks == 34);
    }
  }
}

TEST(ReplayEngineTest, WithOneRequestAtATimeThePrefixesOfAllBeforeAreFound) {
  EngineOptions options = Options(0);
  options.concurrency = 1;
  MemoryTarget target(options.geometry);
  MemoryPrefixes prefixes(target);
  options.prefixes = &prefixes;
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  std::set<std::uint64_t> seen;
  std::int64_t found = 0;
  for (const TraceRequest& r : SmallTrace()) {
    std::int64_t run = 0;
    while (run < r.input_length / 64 && seen.contains(PromptBlockKey(r, run, 64))) ++run;
    found += run * 64;
    for (std::int64_t block = 0; block < r.input_length / 64; ++block)
      seen.insert(PromptBlockKey(r, block, 64));
  }
  EXPECT_EQ(report->counts.found_tokens, found);
  EXPECT_EQ(prefixes.pages_.size(), seen.size());
  EXPECT_EQ(prefixes.finds_, 12);
}

TEST(ReplayEngineTest, OutputsArePublishedWhenAskedFor) {
  EngineOptions options = Options(3);
  options.publish_output = true;
  MemoryTarget target(options.geometry);
  MemoryPrefixes prefixes(target);
  options.prefixes = &prefixes;
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mismatch_count, 0);
  std::int64_t output_blocks = 0;
  for (const TraceRequest& r : SmallTrace()) output_blocks += r.rows() / 64 - r.input_length / 64;
  EXPECT_EQ(prefixes.output_blocks_, output_blocks);
}

TEST(ReplayEngineTest, AKilledEnginesRequestsAreFinishedByTheNextOne) {
  EngineOptions options = Options(0);
  MemoryTarget target(options.geometry);
  MemoryPrefixes prefixes(target);
  options.prefixes = &prefixes;
  options.stop_after = 4;
  ReplayReport all;
  std::set<std::int64_t> finished;
  while (finished.size() < 12) {
    options.order.clear();
    for (std::int64_t i = 0; i < 12; ++i) {
      if (!finished.contains(i)) options.order.push_back(i);
    }
    const auto report = Replay(target, options);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_FALSE(report->finished.empty());
    finished.insert(report->finished.begin(), report->finished.end());
    all.Add(*report);
  }
  EXPECT_EQ(all.counts.finished, 12);
  EXPECT_EQ(all.finished.size(), 12u);
  EXPECT_GT(all.counts.started, 12) << "what was under way starts again";
  EXPECT_EQ(all.mismatch_count, 0);
}

TEST(ReplayEngineTest, AnErrorOfTheStoreEndsTheReplay) {
  EngineOptions options = Options(0);
  MemoryTarget target(options.geometry);
  MemoryPrefixes prefixes(target);
  prefixes.fail_ = true;
  options.prefixes = &prefixes;
  EXPECT_EQ(Replay(target, options).status().code(), absl::StatusCode::kUnavailable);
}

TEST(ReplayEngineTest, LayersThatFillMessagesGiveTheSameBytes) {
  EngineOptions options = Options(0);
  options.geometry.layers = 5;
  options.geometry.block_stride = options.geometry.dense_block_stride();
  options.chunk_tokens = 2000;  // 2 MB a layer: one layer a call
  MemoryTarget target(options.geometry);
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mismatch_count, 0);
}

TEST(ReplayEngineTest, AFlippedBitIsReportedWithRequestLayerAndRegion) {
  EngineOptions options = Options(0);
  options.concurrency = 1;  // request 0 is read first
  FlippingTarget target(options.geometry, 2, 11);
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->mismatch_count, 1);
  const Mismatch& m = report->mismatches[0];
  EXPECT_EQ(m.request, 0);
  EXPECT_EQ(m.layer, 2);
  EXPECT_EQ(m.region, 11);
  EXPECT_EQ(m.ring_position, -1);
  EXPECT_THAT(m.what, HasSubstr("request 0, layer 2, region 11 (positions 88 to 95): summary differs, first "
                                "in channel 77"));
}

TEST(ReplayEngineTest, AWrongRingRowIsReported) {
  EngineOptions options = Options(0);
  options.concurrency = 1;
  RingFlippingTarget target(options.geometry);
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mismatch_count, report->checked_ring_rows);
  EXPECT_EQ(report->mismatches.size(), ReplayReport::kMaxMismatches);
  const Mismatch& m = report->mismatches[0];
  EXPECT_EQ(m.request, 0);  // 629 rows: 624 to 628 are open
  EXPECT_EQ(m.region, 78);
  EXPECT_EQ(m.ring_position, 624);
}

TEST(ReplayEngineTest, AWrongCountIsAnError) {
  const EngineOptions options = Options(0);
  MiscountingTarget target(options.geometry);
  const auto report = Replay(target, options);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInternal);
}

TEST(ReplayEngineTest, TheTargetsErrorEndsTheReplay) {
  const EngineOptions options = Options(0);
  RefusingTarget target(options.geometry);
  EXPECT_EQ(Replay(target, options).status(), absl::UnavailableError("draining"));
}

TEST(ReplayEngineTest, StopEndsItBetweenCalls) {
  const EngineOptions options = Options(0);
  MemoryTarget target(options.geometry);
  std::atomic<bool> stop = false;
  const auto report = ReplayTrace(
      SmallTrace(), options, target,
      [&stop](std::int64_t, std::int64_t, const SchedulerCounts& counts) { stop = counts.finished > 3; },
      stop);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->interrupted);
  EXPECT_GT(report->counts.finished, 3);
  EXPECT_LT(report->counts.finished, 12);
}

TEST(ReplayEngineTest, ProgressEndsAtTheTotal) {
  const EngineOptions options = Options(3);
  MemoryTarget target(options.geometry);
  const std::atomic<bool> stop = false;
  std::int64_t last = 0;
  std::int64_t all = 0;
  const auto report = ReplayTrace(
      SmallTrace(), options, target,
      [&](std::int64_t done, std::int64_t total, const SchedulerCounts&) {
        EXPECT_GE(done, last);
        last = done;
        all = total;
      },
      stop);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(last, all);
}

TEST(ReplayEngineTest, TheReportIsATableOrOneJsonObject) {
  const EngineOptions options = Options(3);
  MemoryTarget target(options.geometry);
  const auto report = Replay(target, options);
  ASSERT_TRUE(report.ok()) << report.status();
  const std::string text = FormatJson(*report, options);
  EXPECT_EQ(std::ranges::count(text, '\n'), 1);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["requests"], 12);
  EXPECT_EQ(json["requests_checked"], 12);
  EXPECT_EQ(json["mismatches"], 0);
  EXPECT_EQ(json["computed_tokens"], report->counts.computed_rows);
  EXPECT_GT(json["verify_rpc"]["calls"], 0);
  const std::string table = FormatTable(*report, options);
  EXPECT_THAT(table, HasSubstr("prefix hits"));
  EXPECT_EQ(json.count("hit_rate"), 0u) << "no store, no rate";

  ReplayReport with_store = *report;
  with_store.counts.prompt_tokens = 1000;
  with_store.counts.found_tokens = 250;
  with_store.counts.ever_found_tokens = 500;
  with_store.prefix.emplace().tiers.push_back({"host", 7, 8, 9});
  const auto store = nlohmann::json::parse(FormatJson(with_store, options));
  EXPECT_EQ(store["hit_rate"], 0.25);
  EXPECT_EQ(store["infinite_hit_rate"], 0.5);
  EXPECT_EQ(store["tiers"][0]["evicted_pages"], 7);
  EXPECT_THAT(FormatTable(with_store, options), HasSubstr("25.00 %"));
  EXPECT_THAT(FormatTable(with_store, options), HasSubstr("host evicted"));
  EXPECT_THAT(table, HasSubstr("verify RPC p50/p99, us"));
}

}  // namespace
}  // namespace kvsummary
