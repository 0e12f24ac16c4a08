// The replay's engine: plans steps, makes their rows, applies them to a target and checks a sample of
// the finished requests. One thread plans and makes rows, a few calls ahead; the caller's makes the calls,
// one after the other, so a request's pages are read before its blocks are used again, and every latency
// is that of one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/check.h"
#include "client/replay/scheduler.h"
#include "client/replay/target.h"
#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

struct EngineOptions {
  CacheGeometry geometry;             // of the target's cache; k > 0: verify steps instead of decode
  std::int32_t concurrency = 64;      // at most ring_blocks - 1
  std::int32_t chunk_tokens = 8192;   // prefill rows of a step at most
  std::int64_t sampled_requests = 0;  // how many are checked
  std::uint64_t seed = 0;
};

// Latencies of calls, in microseconds.
struct LatencySummary {
  std::int64_t calls = 0;
  double p50_us = 0;
  double p99_us = 0;
};

struct ReplayReport {
  SchedulerCounts counts;
  std::int64_t steps = 0;
  std::int64_t regions_closed = 0;  // in each layer, as the target counted them; repeated ones repeatedly
  double wall_seconds = 0;
  LatencySummary prefill;
  LatencySummary decode;  // or verify
  std::int64_t sampled_requests = 0;
  std::int64_t checked_regions = 0;    // over all layers
  std::int64_t checked_ring_rows = 0;  // over all layers
  std::int64_t mismatch_count = 0;
  std::vector<Mismatch> mismatches;  // the first kMaxMismatches
  bool interrupted = false;          // by `stop`: the report covers the steps before

  static constexpr std::size_t kMaxMismatches = 20;
};

// Called after every step; `done` and `total` count token rows.
using ReplayProgress = std::function<void(std::int64_t done, std::int64_t total, const SchedulerCounts&)>;

// INVALID_ARGUMENT for options that no engine could run these requests with.
absl::Status CheckReplay(std::span<const TraceRequest> requests, const EngineOptions& options);

// Runs until all requests have finished or `stop` is set. An error is one of CheckReplay, of the target,
// or INTERNAL when the target counts other rows or regions than were sent.
absl::StatusOr<ReplayReport> ReplayTrace(std::span<const TraceRequest> requests, const EngineOptions& options,
                                         Target& target, const ReplayProgress& progress,
                                         const std::atomic<bool>& stop);

}  // namespace kvsummary
