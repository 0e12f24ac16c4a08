#include "client/replay/scheduler.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

// Requests of random lengths; half of them start like an earlier one.
std::vector<TraceRequest> RandomTrace(std::int64_t count, std::uint64_t seed) {
  std::vector<TraceRequest> trace;
  std::int64_t next_id = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto random = [&](std::uint64_t what) {
      return static_cast<std::int64_t>(MixBits(seed, static_cast<std::uint64_t>(i), what, 0) >> 1);
    };
    TraceRequest r{i,
                   static_cast<std::int32_t>(1 + random(0) % 2500),
                   static_cast<std::int32_t>(1 + random(1) % 60),
                   {}};
    const std::int64_t chunks = (r.input_length + kTraceChunkTokens - 1) / kTraceChunkTokens;
    if (i > 0 && random(2) % 2 == 0) {
      r.hash_ids = trace[static_cast<std::size_t>(random(3) % i)].hash_ids;
      r.hash_ids.resize(
          static_cast<std::size_t>(std::min<std::int64_t>(random(4) % (chunks + 1), std::ssize(r.hash_ids))));
    }
    while (std::ssize(r.hash_ids) < chunks) r.hash_ids.push_back(next_id++);
    trace.push_back(r);
  }
  return trace;
}

struct RowPlace {
  std::int64_t slot;
  std::int64_t position;
  std::int64_t ring;
  RowKey key;
};

// Applies the steps of a scheduler to a model of a cache, slots and ring rows naming what was stored, and
// expects what an engine relies on. A row stands for its key: a page is right if its slots hold the keys
// of the request's tokens.
class ModelEngine {
 public:
  ModelEngine(const std::vector<TraceRequest>& trace, const SchedulerOptions& options)
      : trace_(trace), options_(options), scheduler_(trace, options) {}

  void Run() {
    Step step;
    while (*scheduler_.Next(step)) {
      ++steps_;
      ASSERT_GT(step.prefill.rows() + step.decode.rows(), 0) << "a step without work";
      ASSERT_LE(step.prefill.rows(), options_.chunk_tokens);
      std::set<std::int64_t> slots, rings;
      ASSERT_NO_FATAL_FAILURE(Apply(step.prefill, /*prefill=*/true, slots, rings));
      ASSERT_NO_FATAL_FAILURE(Apply(step.decode, /*prefill=*/false, slots, rings));
      ASSERT_LE(std::ssize(rings), options_.concurrency);
      for (const FinishedRequest& finished : step.finished) ASSERT_NO_FATAL_FAILURE(Finish(finished));
      ASSERT_EQ(scheduler_.pool().used_blocks() + scheduler_.pool().free_blocks(), options_.blocks - 1);
    }
    ASSERT_EQ(std::ssize(finished_), std::ssize(trace_)) << "every request finishes";
    ASSERT_EQ(scheduler_.pool().used_blocks(), 0);
    const SchedulerCounts& c = scheduler_.counts();
    ASSERT_EQ(c.finished, std::ssize(trace_));
    ASSERT_EQ(c.computed_rows, rows_);
    ASSERT_EQ(c.computed_rows, c.prompt_tokens - c.prefix_hit_tokens + c.output_tokens - c.finished +
                                   c.rejected_drafts + c.recomputed_rows);
  }

  const SchedulerCounts& counts() const { return scheduler_.counts(); }
  std::int64_t steps() const { return steps_; }

 private:
  void Apply(const PlannedUpdate& u, bool prefill, std::set<std::int64_t>& slots,
             std::set<std::int64_t>& rings) {
    ASSERT_EQ(u.query_start_loc.front(), 0);
    ASSERT_EQ(u.query_start_loc.back(), u.rows());
    ASSERT_EQ(std::ssize(u.positions), u.rows());
    ASSERT_EQ(std::ssize(u.ring_bases), u.rows());
    ASSERT_EQ(std::ssize(u.keys), u.rows());
    std::int64_t closing = 0;
    for (std::size_t request = 0; request + 1 < u.query_start_loc.size(); ++request) {
      const auto begin = static_cast<std::size_t>(u.query_start_loc[request]);
      const auto end = static_cast<std::size_t>(u.query_start_loc[request + 1]);
      ASSERT_LT(begin, end);
      if (!prefill) {
        ASSERT_LE(end - begin, static_cast<std::size_t>(options_.k) + 1);
        ASSERT_EQ(u.seq_lens[request], u.positions[end - 1] + 1);
      }
      ASSERT_TRUE(rings.insert(u.ring_bases[begin]).second) << "a ring block in two requests of a step";
      for (std::size_t i = begin; i < end; ++i) {
        ASSERT_EQ(u.positions[i], u.positions[begin] + static_cast<std::int64_t>(i - begin));
        ASSERT_EQ(u.ring_bases[i], u.ring_bases[begin]);
        ASSERT_EQ(u.ring_bases[i] % options_.ring_rows_per_block, 0);
        ASSERT_GE(u.ring_bases[i], options_.ring_rows_per_block);
        ASSERT_LE(u.ring_bases[i], options_.concurrency * options_.ring_rows_per_block);
        ASSERT_GE(u.slots[i], options_.block_size) << "the null block is never written";
        ASSERT_LT(u.slots[i], options_.blocks * options_.block_size);
        ASSERT_EQ(u.slots[i] % options_.block_size, u.positions[i] % options_.block_size);
        ASSERT_TRUE(slots.insert(u.slots[i]).second) << "a slot twice in a step";
        slot_keys_[u.slots[i]] = u.keys[i];
        closing += u.positions[i] % kRegionTokens == kRegionTokens - 1 ? 1 : 0;
      }
    }
    ASSERT_EQ(u.closing_rows, closing);
    rows_ += u.rows();
  }

  void Finish(const FinishedRequest& finished) {
    ASSERT_TRUE(finished_.insert(finished.request).second);
    const TraceRequest& r = trace_[static_cast<std::size_t>(finished.request)];
    ASSERT_EQ(finished.rows, r.input_length + r.output_length - 1);
    for (std::int64_t p = 0; p < finished.rows; ++p) {
      const std::int64_t block = finished.blocks[static_cast<std::size_t>(p / options_.block_size)];
      const auto found = slot_keys_.find(block * options_.block_size + p % options_.block_size);
      ASSERT_NE(found, slot_keys_.end()) << "request " << finished.request << " position " << p;
      ASSERT_EQ(found->second, TokenRow(r, finished.request, p))
          << "request " << finished.request << " position " << p;
    }
  }

  const std::vector<TraceRequest>& trace_;
  const SchedulerOptions options_;
  Scheduler scheduler_;
  std::map<std::int64_t, RowKey> slot_keys_;
  std::set<std::int64_t> finished_;
  std::int64_t rows_ = 0;
  std::int64_t steps_ = 0;
};

SchedulerOptions Options() {
  return {.block_size = 16,
          .blocks = 3000,
          .concurrency = 8,
          .chunk_tokens = 700,
          .k = 0,
          .ring_rows_per_block = 20,
          .seed = 3};
}

TEST(SchedulerTest, EveryTokenIsComputedOrHitOnce) {
  const auto trace = RandomTrace(150, 1);
  ModelEngine engine(trace, Options());
  ASSERT_NO_FATAL_FAILURE(engine.Run());
  EXPECT_EQ(engine.counts().preemptions, 0);
  EXPECT_EQ(engine.counts().recomputed_rows, 0);
  EXPECT_EQ(engine.counts().rejected_drafts, 0);
  EXPECT_GT(engine.counts().prefix_hit_tokens, engine.counts().prompt_tokens / 20);
}

TEST(SchedulerTest, VerifyStepsGiveTheExactLengths) {
  const auto trace = RandomTrace(150, 2);
  for (const std::int32_t k : {1, 3, 7}) {
    SchedulerOptions options = Options();
    options.k = k;
    ModelEngine engine(trace, options);
    ASSERT_NO_FATAL_FAILURE(engine.Run());
    EXPECT_GT(engine.counts().rejected_drafts, 0);
  }
}

TEST(SchedulerTest, PreemptedRequestsStartOverAndFinish) {
  const auto trace = RandomTrace(150, 3);
  for (const std::int32_t k : {0, 3}) {
    SchedulerOptions options = Options();
    options.k = k;
    options.blocks = 200;  // a request has up to 160
    options.chunk_tokens = 4000;
    ModelEngine engine(trace, options);
    ASSERT_NO_FATAL_FAILURE(engine.Run());
    EXPECT_GT(engine.counts().preemptions, 0);
    EXPECT_GT(engine.counts().recomputed_rows, 0);
  }
}

TEST(SchedulerTest, AFullHitComputesTheLastBlock) {
  const std::vector<TraceRequest> trace(2, {0, 1024, 1, {0, 1}});
  SchedulerOptions options = Options();
  options.block_size = 64;
  ModelEngine engine(trace, options);
  ASSERT_NO_FATAL_FAILURE(engine.Run());
  EXPECT_EQ(engine.counts().prefix_hit_tokens, 1024 - 64);
  EXPECT_EQ(engine.counts().computed_rows, 1024 + 64);
}

TEST(SchedulerTest, RequestsAreAdmittedInOrderUpToTheConcurrency) {
  const auto trace = RandomTrace(40, 4);
  SchedulerOptions options = Options();
  options.concurrency = 1;
  Scheduler scheduler(trace, options);
  std::vector<std::int64_t> order;
  Step step;
  while (*scheduler.Next(step)) {
    for (const auto& finished : step.finished) order.push_back(finished.request);
  }
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_EQ(order.size(), trace.size());
}

TEST(SchedulerTest, IsAFunctionOfItsOptions) {
  const auto trace = RandomTrace(40, 5);
  SchedulerOptions options = Options();
  options.k = 3;
  Scheduler a(trace, options);
  Scheduler b(trace, options);
  Step step_a, step_b;
  while (*a.Next(step_a)) {
    ASSERT_TRUE(*b.Next(step_b));
    ASSERT_EQ(step_a.decode.slots, step_b.decode.slots);
    ASSERT_EQ(step_a.decode.keys, step_b.decode.keys);
    ASSERT_EQ(step_a.prefill.slots, step_b.prefill.slots);
  }
  ASSERT_FALSE(*b.Next(step_b));
}

TEST(SchedulerTest, RefusesWhatCannotRun) {
  const std::vector<TraceRequest> trace = {{0, 100, 1, {0}}, {0, 1000, 25, {1, 2}}};
  const auto error = [&](auto change) {
    SchedulerOptions options = Options();
    change(options);
    const absl::Status status = Scheduler::Check(trace, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(error([](auto& o) { o.block_size = 12; }), HasSubstr("block size is 12"));
  EXPECT_THAT(error([](auto& o) { o.block_size = 1024; }), HasSubstr("block size is 1024"));
  EXPECT_THAT(error([](auto& o) { o.block_size = 0; }), HasSubstr("block size is 0"));
  EXPECT_THAT(error([](auto& o) { o.concurrency = 0; }), HasSubstr("concurrency is 0"));
  EXPECT_THAT(error([](auto& o) { o.chunk_tokens = 0; }), HasSubstr("chunk tokens is 0"));
  EXPECT_THAT(error([](auto& o) { o.k = -1; }), HasSubstr("k is -1"));
  EXPECT_THAT(error([](auto& o) { o.blocks = 64; }), HasSubstr("request 1 needs 64 blocks"));
  SchedulerOptions options = Options();
  options.blocks = 65;
  EXPECT_TRUE(Scheduler::Check(trace, options).ok());
}

}  // namespace
}  // namespace kvsummary
