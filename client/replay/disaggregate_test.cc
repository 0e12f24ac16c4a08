// The replay on two caches in this process, over a path that hands over as daemons do, and over ones that go
// wrong.
#include "client/replay/disaggregate.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "client/replay/disaggregate_report.h"
#include "client/replay/memory_target.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

// Copies what is offered, and gives it to whoever accepts; an Accept waits for the last part.
class MemoryPath : public HandoffPath {
 public:
  MemoryPath(MemoryTarget& source, MemoryTarget& target) : source_(source), target_(target) {}

  absl::StatusOr<HandoffOffer> Offer(const OfferedRequest& offered) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t id = ++last_id_;
    Frozen& frozen = offers_[id];
    Freeze({.committed_tokens = offered.committed_tokens,
            .blocks = offered.blocks,
            .last = !offered.more,
            .ring_block = offered.ring_block},
           frozen);
    return HandoffOffer{.handoff = std::to_string(id), .offer_id = id};
  }

  absl::StatusOr<std::int64_t> Append(std::uint64_t offer_id, const AppendedPart& part) override {
    const std::lock_guard lock(mutex_);
    ++appends_;
    Freeze(part, offers_.at(offer_id));
    changed_.notify_all();
    return 0;
  }

  absl::StatusOr<AcceptResult> Accept(const std::string& handoff, const AcceptedRequest& accepted) override {
    std::unique_lock lock(mutex_);
    const std::uint64_t id = std::stoull(handoff);
    changed_.wait(lock, [&] { return !offers_.contains(id) || offers_[id].complete; });
    if (!offers_.contains(id)) return absl::AbortedError("cancelled");
    if (fail_at_ == id) return absl::UnavailableError("the link is cut");
    const Frozen& frozen = offers_[id];
    back_.insert(frozen.tokens - accepted.resume_position);
    const CacheGeometry& g = target_.geometry();
    const std::int64_t regions_per_block = g.block_size / kRegionTokens;
    const std::int64_t regions = accepted.resume_position / kRegionTokens;
    std::int64_t bytes = 0;
    for (std::int32_t layer = 0; layer < g.layers; ++layer) {
      for (std::int64_t region = 0; region < regions; ++region) {
        const std::int64_t block = accepted.blocks[static_cast<std::size_t>(region / regions_per_block)];
        std::memcpy(target_.summary(block, layer, region % regions_per_block),
                    frozen.summaries.at({layer, region}).data(), kSummaryBytes);
        bytes += kSummaryBytes;
      }
      for (std::int64_t p = regions * kRegionTokens; p < accepted.resume_position; ++p) {
        std::memcpy(target_.ring_row(accepted.ring_block, layer, p), frozen.rows.at({layer, p}).data(),
                    kRowBytes);
        bytes += kRowBytes;
      }
    }
    if (damage_ == id) *target_.summary(accepted.blocks[0], 0, 0) ^= 1;
    const AcceptResult result{.transport = HandoffTransport::kSameHost,
                              .bytes = bytes + excess_,
                              .committed_tokens = frozen.tokens,
                              .device_time = std::chrono::nanoseconds(10)};
    offers_.erase(id);
    return result;
  }

  absl::Status Cancel(std::uint64_t offer_id) override {
    const std::lock_guard lock(mutex_);
    offers_.erase(offer_id);
    changed_.notify_all();
    return absl::OkStatus();
  }

  std::size_t offers() const { return offers_.size(); }
  int appends() const { return appends_; }
  const std::set<std::int64_t>& back() const { return back_; }

  std::uint64_t fail_at_ = 0;
  std::uint64_t damage_ = 0;
  std::int64_t excess_ = 0;

 private:
  struct Frozen {
    bool complete = false;
    std::int64_t tokens = 0;
    std::map<std::pair<std::int32_t, std::int64_t>, std::vector<std::uint8_t>> summaries, rows;
  };

  void Freeze(const AppendedPart& part, Frozen& frozen) {
    const CacheGeometry& g = source_.geometry();
    const LayerSpan layers = part.layers.value_or(LayerSpan{0, g.layers});
    const std::int64_t regions_per_block = g.block_size / kRegionTokens;
    const std::int64_t old = part.offered_tokens / kRegionTokens;
    for (std::int32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
      for (std::int64_t region = old; region < part.committed_tokens / kRegionTokens; ++region) {
        const std::int64_t block = part.blocks[static_cast<std::size_t>(region / regions_per_block)];
        const std::uint8_t* at = source_.summary(block, layer, region % regions_per_block);
        frozen.summaries[{layer, region}] = {at, at + kSummaryBytes};
      }
      const std::int64_t tail = std::max<std::int64_t>(part.committed_tokens - 2, 0) / kRegionTokens;
      for (std::int64_t p = tail * kRegionTokens; part.last && p < part.committed_tokens; ++p) {
        const std::uint8_t* at = source_.ring_row(part.ring_block, layer, p);
        frozen.rows[{layer, p}] = {at, at + kRowBytes};
      }
    }
    frozen.tokens = part.committed_tokens;
    frozen.complete = part.last;
  }

  MemoryTarget& source_;
  MemoryTarget& target_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Frozen> offers_;
  std::set<std::int64_t> back_;  // of resume positions
  int appends_ = 0;
};

// Copies what is offered when it is accepted, not before.
class LazyPath final : public MemoryPath {
 public:
  using MemoryPath::MemoryPath;

  absl::StatusOr<HandoffOffer> Offer(const OfferedRequest& offered) override {
    offered_.push_back(offered);
    return HandoffOffer{.handoff = std::to_string(offered_.size()), .offer_id = offered_.size()};
  }
  absl::StatusOr<AcceptResult> Accept(const std::string& handoff, const AcceptedRequest& accepted) override {
    const auto copied = MemoryPath::Offer(offered_[std::stoull(handoff) - 1]);
    return MemoryPath::Accept(copied->handoff, accepted);
  }
  absl::Status Cancel(std::uint64_t) override { return absl::OkStatus(); }

 private:
  std::vector<OfferedRequest> offered_;
};

// Prompts around the edges of regions and of either side's blocks.
std::vector<TraceRequest> Trace() {
  std::vector<TraceRequest> trace;
  for (const std::int32_t length :
       {1, 2, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 127, 128, 130}) {
    trace.push_back({0, length, 1 + length % 12, {length}});
  }
  return trace;
}

class DisaggregateTest : public testing::TestWithParam<std::tuple<int, bool, int>> {
 protected:
  static DisaggregateOptions Options(int k, bool layer_wise, int concurrency) {
    return {.prefill = {.layers = 3,
                        .blocks = 1 + 2 * concurrency,
                        .block_size = 64 * 3,
                        .block_stride = 3 * 24 * 256,
                        .ring_blocks = 1 + concurrency,
                        .capacity = 9 + k,
                        .rows_per_layer = 9 + k,
                        .k = k},
            .decode = {.layers = 3,
                       .blocks = 1 + 2 * concurrency * 10,
                       .block_size = 16,
                       .block_stride = 3 * 2 * 256 + 512,
                       .ring_blocks = 1 + 2 * concurrency,
                       .capacity = 11 + k,
                       .rows_per_layer = 12 + k,
                       .k = k},
            .concurrency = concurrency,
            .chunk_tokens = 13,
            .seed = 3,
            .layer_wise = layer_wise};
  }

  static absl::StatusOr<DisaggregateReport> Run(const DisaggregateOptions& options, MemoryTarget& source,
                                                MemoryTarget& target, HandoffPath& path,
                                                const std::vector<TraceRequest>& trace) {
    const std::atomic<bool> stop = false;
    return ReplayDisaggregated(
        trace, options, source, target, path, [](std::int64_t, std::int64_t, std::int64_t) {}, stop);
  }
};

TEST_P(DisaggregateTest, EveryByteIsThereAfterEveryHandoff) {
  const auto [k, layer_wise, concurrency] = GetParam();
  const DisaggregateOptions options = Options(k, layer_wise, concurrency);
  MemoryTarget source(options.prefill);
  MemoryTarget target(options.decode);
  MemoryPath path(source, target);
  const std::vector<TraceRequest> trace = Trace();
  const auto report = Run(options, source, target, path, trace);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mismatch_count, 0) << report->mismatches[0].what;
  EXPECT_EQ(report->requests, trace.size());
  EXPECT_EQ(report->handoffs, trace.size());
  EXPECT_EQ(report->transports[static_cast<std::size_t>(HandoffTransport::kSameHost)], report->handoffs);
  EXPECT_EQ(report->accept_us.size(), trace.size());
  EXPECT_EQ(report->handoff_us.size(), trace.size());
  EXPECT_EQ(report->device_nanoseconds, 10 * report->handoffs);
  EXPECT_GT(report->bytes, 0);
  EXPECT_GT(report->checked_regions, 0);
  EXPECT_GT(report->checked_ring_rows, 0);
  EXPECT_EQ(report->rejected_drafts > 0, k > 0);
  EXPECT_FALSE(report->interrupted);
  EXPECT_EQ(path.offers(), 0);
  EXPECT_EQ(path.appends() > 0, layer_wise);
  EXPECT_EQ(path.back(), (std::set<std::int64_t>{0, 1, 2})) << "how far resume positions go back";
}

INSTANTIATE_TEST_SUITE_P(All, DisaggregateTest,
                         testing::Combine(testing::Values(0, 3), testing::Bool(), testing::Values(1, 3)));

TEST_F(DisaggregateTest, TheReportTellsHowTheBytesCame) {
  const DisaggregateOptions options = Options(0, true, 1);
  DisaggregateReport report;
  report.handoffs = 2;
  report.bytes = 4096;
  report.mismatch_count = 1;
  report.transports[static_cast<std::size_t>(HandoffTransport::kGrpc)] = 2;
  report.offer_us = {10, 20};
  report.accept_us = {1000, 3000};
  report.mismatches = {{0, 0, 7, -1, "region 7 differs"}};
  DisaggregateReport sum;
  sum.Add(report);
  sum.Add(report);
  const std::string table = FormatTable(sum, options);
  EXPECT_THAT(table, HasSubstr("gRPC"));
  EXPECT_THAT(table, HasSubstr("8,192"));
  EXPECT_THAT(table, HasSubstr("1,000 / 3,000  (4 calls)"));
  const auto json = nlohmann::json::parse(FormatJson(sum, options));
  EXPECT_EQ(json["transports"]["gRPC"], 4);
  EXPECT_FALSE(json["transports"].contains("UCX"));
  EXPECT_EQ(json["bytes"], 8192);
  EXPECT_EQ(json["accept"]["p50_us"], 1000);
  EXPECT_EQ(json["mismatches"], 2);
  EXPECT_EQ(json["first_mismatches"][0], "region 7 differs");
  EXPECT_EQ(json["decode_cache"]["block_size"], 16);
}

TEST_F(DisaggregateTest, AnOfferThatIsNotFrozenShows) {
  const DisaggregateOptions options = Options(0, false, 1);
  MemoryTarget source(options.prefill);
  MemoryTarget target(options.decode);
  LazyPath path(source, target);
  const auto report = Run(options, source, target, path, {{0, 40, 4, {1}}, {0, 40, 4, {2}}, {0, 40, 4, {3}}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->mismatch_count, 0);
}

TEST_F(DisaggregateTest, ADamagedByteIsFound) {
  const DisaggregateOptions options = Options(0, false, 1);
  MemoryTarget source(options.prefill);
  MemoryTarget target(options.decode);
  MemoryPath path(source, target);
  path.damage_ = 2;
  const auto report = Run(options, source, target, path, {{0, 40, 4, {1}}, {0, 40, 4, {2}}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mismatch_count, 2) << "after the hand-off, and at the request's end";
  EXPECT_THAT(report->mismatches[0].what, HasSubstr("request 1, layer 0, region 0"));
}

TEST_F(DisaggregateTest, AnswersThatDoNotAgreeAreErrors) {
  const DisaggregateOptions options = Options(0, false, 1);
  MemoryTarget source(options.prefill);
  MemoryTarget target(options.decode);
  MemoryPath path(source, target);
  path.excess_ = 256;
  const auto report = Run(options, source, target, path, {{0, 40, 4, {1}}});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("request 0 at position 40"));
}

TEST_F(DisaggregateTest, AfterAnErrorNoOfferIsLeft) {
  for (const bool layer_wise : {false, true}) {
    const DisaggregateOptions options = Options(0, layer_wise, 3);
    MemoryTarget source(options.prefill);
    MemoryTarget target(options.decode);
    MemoryPath path(source, target);
    path.fail_at_ = 5;
    const auto report = Run(options, source, target, path, Trace());
    EXPECT_EQ(report.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(path.offers(), 0);
  }
}

TEST_F(DisaggregateTest, WhatDoesNotFitIsRefused) {
  const auto error = [](const DisaggregateOptions& options) {
    const auto status = CheckDisaggregate(Trace(), options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  DisaggregateOptions options = Options(0, false, 2);
  EXPECT_TRUE(CheckDisaggregate(Trace(), options).ok());
  options.decode.layers = 2;
  EXPECT_THAT(error(options), HasSubstr("3 layers, the decode cache 2"));
  options = Options(0, false, 2);
  options.prefill.blocks = 2;
  EXPECT_THAT(error(options), HasSubstr("the prefill cache holds 1 requests of 130 tokens"));
  options = Options(0, false, 2);
  options.decode.ring_blocks = 4;
  EXPECT_THAT(error(options), HasSubstr("4 ring blocks"));
  options = Options(0, false, 2);
  options.chunk_tokens = 0;
  EXPECT_THAT(error(options), HasSubstr("chunk tokens are 0"));
}

}  // namespace
}  // namespace kvsummary
