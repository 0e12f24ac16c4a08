// A continuously batching engine's scheduler: which rows go into which step, and where.
//
// As vLLM does it: running requests first, each with a chunk of its prompt or with one token and its
// drafts; then requests are admitted, in the trace's order, while there is prefill budget. Prompts find
// their prefixes in the block pool, whole blocks only and never the last token. When blocks run out the
// youngest running request is preempted: its blocks are freed and it starts over later, through prefill,
// with the tokens it already had. Every block is private to a request until its prompt chunk is
// scheduled, shared after.
//
// With a prefix store every prompt finds its prefix there instead, and the blocks of each step are to be
// published there once the step is applied.
//
// Pure but for the prefix store: no rows, no calls, no clock. The steps must be applied in order.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/block_pool.h"
#include "client/replay/prefix_store.h"
#include "client/replay/rows.h"
#include "client/replay/trace.h"

namespace kvsummary {

struct SchedulerOptions {
  std::int32_t block_size = 64;  // a divisor of kTraceChunkTokens
  std::int64_t blocks = 0;
  std::int32_t concurrency = 64;         // running requests at most; ring blocks 1 .. concurrency
  std::int32_t chunk_tokens = 8192;      // prefill rows of a step at most
  std::int32_t k = 0;                    // drafts of a verify step; 0: decode steps
  std::int64_t ring_rows_per_block = 1;  // ring_base = ring block * this
  std::uint64_t seed = 0;                // of the drafts' acceptance
  std::vector<std::int64_t> order = {};  // indices of the requests that are run; empty: all, in their order
  PrefixStore* prefixes = nullptr;       // instead of the pool's; must outlive the scheduler
  bool publish_output = false;           // blocks with output tokens too; else those of prompts alone
};

// The index arrays of one update, as in client.h, and what its rows are.
struct PlannedUpdate {
  std::vector<std::int64_t> slots, positions, ring_bases;
  std::vector<std::int32_t> query_start_loc = {0};
  std::vector<std::int32_t> seq_lens;
  std::vector<RowKey> keys;
  std::int64_t closing_rows = 0;  // regions that the update closes

  std::int64_t rows() const { return static_cast<std::int64_t>(slots.size()); }
};

struct FinishedRequest {
  std::int64_t request = 0;  // index in the trace
  std::int64_t rows = 0;     // positions 0 .. rows - 1 have been applied
  std::int64_t ring_block = 0;
  std::int64_t loaded_blocks = 0;    // the first ones came from the prefix store
  std::vector<std::int64_t> blocks;  // of positions [i * block_size, (i + 1) * block_size)
};

struct SchedulerCounts {
  std::int64_t started = 0;
  std::int64_t finished = 0;
  std::int64_t prompt_tokens = 0;      // of the started
  std::int64_t prefix_hit_tokens = 0;  // rows that were not computed
  std::int64_t output_tokens = 0;      // of the finished
  std::int64_t computed_rows = 0;      // applied by the steps; includes the next two
  std::int64_t rejected_drafts = 0;
  std::int64_t recomputed_rows = 0;  // after preemptions
  std::int64_t preemptions = 0;
  // Of the started, in whole leading prompt blocks: what the prefix store had, and what one without bounds
  // would have had.
  std::int64_t found_tokens = 0;
  std::int64_t ever_found_tokens = 0;
};

struct Step {
  PlannedUpdate prefill;
  PlannedUpdate decode;  // of decode rows, or of verify requests
  // Requests that end with this step. Their blocks and ring blocks are theirs until the next step.
  std::vector<FinishedRequest> finished;
  // For the prefix store, once the step is applied and before the next one is.
  std::vector<PublishedBlocks> published;
  SchedulerCounts counts;  // with this step
};

class Scheduler {
 public:
  // `requests` must outlive it. Check(requests, options) must be OK.
  Scheduler(std::span<const TraceRequest> requests, const SchedulerOptions& options);
  ~Scheduler();

  // INVALID_ARGUMENT for options that no engine could run with, or a request longer than all blocks.
  static absl::Status Check(std::span<const TraceRequest> requests, const SchedulerOptions& options);

  // Plans the next step; false when all requests have finished. An error is the prefix store's, and the last
  // answer.
  absl::StatusOr<bool> Next(Step& step);

  const SchedulerCounts& counts() const { return counts_; }
  const BlockPool& pool() const { return pool_; }

 private:
  struct Request;

  bool Reserve(Request& r, std::int64_t tokens);
  absl::Status Admit(std::int64_t budget, Step& step);
  std::unique_ptr<Request> NextWaiting();
  // Whether there is room for the first step of the request, which then starts behind the prefix that was
  // found.
  absl::StatusOr<bool> StartWithPrefix(Request& r, std::int64_t budget);
  void AcquirePrefix(Request& r, std::int64_t usable);
  void PublishBlocks(Request& r, Step& step);
  void PreemptYoungest();
  void ReleaseAll(Request& r);
  void PlanPrefill(Request& r, std::int64_t rows, PlannedUpdate& update);
  void PlanDecode(Request& r, PlannedUpdate& update);
  void AppendRow(const Request& r, std::int64_t position, RowKey key, PlannedUpdate& update) const;
  void Finish(Step& step);

  const std::span<const TraceRequest> requests_;
  SchedulerOptions options_;
  BlockPool pool_;
  std::vector<std::int64_t> free_rings_;
  std::vector<std::unique_ptr<Request>> running_;  // the oldest first
  std::deque<std::unique_ptr<Request>> requeued_;  // the oldest first
  std::int64_t next_request_ = 0;
  SchedulerCounts counts_;
};

}  // namespace kvsummary
