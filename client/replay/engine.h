// The replay's engine: plans steps, makes their rows, applies them to a target and checks a sample of
// the finished requests. One thread plans and makes rows, a few calls ahead; the caller's makes the calls,
// one after the other, so a request's pages are read before its blocks are used again, and every latency
// is that of one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/check.h"
#include "client/replay/prefix_store.h"
#include "client/replay/scheduler.h"
#include "client/replay/target.h"
#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

struct EngineOptions {
  CacheGeometry geometry;             // of the target's cache; k > 0: verify steps instead of decode
  std::int32_t concurrency = 64;      // at most ring_blocks - 1
  std::int32_t chunk_tokens = 8192;   // prefill rows of a step at most
  std::int64_t sampled_requests = 0;  // how many of all are checked
  std::uint64_t seed = 0;
  std::vector<std::int64_t> order = {};  // indices of the requests that are run; empty: all
  std::int64_t stop_after = 0;      // finished requests, then the engine leaves everything as it is; 0: never
  PrefixStore* prefixes = nullptr;  // where prefixes are found and left, besides the target
  bool publish_output = false;      // see SchedulerOptions
};

// What went to and came from the prefix store.
struct PrefixReport {
  struct Tier {
    std::string name;
    std::int64_t evicted_pages = 0;   // dropped
    std::int64_t demoted_pages = 0;   // copied to the tier below
    std::int64_t promoted_pages = 0;  // brought up
  };

  std::int64_t engines = 0;  // lives of engines
  std::int64_t stored_pages = 0;
  std::int64_t present_pages = 0;
  std::int64_t dropped_pages = 0;  // for want of room
  std::int64_t loaded_pages = 0;
  std::int64_t loaded_bytes = 0;
  std::int64_t bad_pages = 0;    // found, but not good when they were to be loaded
  std::vector<Tier> tiers = {};  // of the daemon, during the replay
};

// What an engine has done, or by Add several.
struct ReplayReport {
  void Add(const ReplayReport& other);

  SchedulerCounts counts;
  std::int64_t steps = 0;
  std::int64_t regions_closed = 0;     // in each layer, as the target counted them; repeated ones repeatedly
  double wall_seconds = 0;             // not added: lives and engines overlap
  std::vector<double> prefill_us;      // latencies of calls, in microseconds
  std::vector<double> decode_us;       // or of verify
  std::vector<std::int64_t> finished;  // indices of requests
  std::int64_t sampled_requests = 0;
  std::int64_t checked_regions = 0;         // over all layers
  std::int64_t checked_loaded_regions = 0;  // of them in blocks from the prefix store
  std::int64_t checked_ring_rows = 0;       // over all layers
  std::int64_t mismatch_count = 0;
  std::vector<Mismatch> mismatches;    // the first kMaxMismatches
  std::optional<PrefixReport> prefix;  // where prefixes came from a store
  bool interrupted = false;            // by `stop`: the report covers the steps before

  static constexpr std::size_t kMaxMismatches = 20;
};

// Called after every step; `done` and `total` count token rows.
using ReplayProgress = std::function<void(std::int64_t done, std::int64_t total, const SchedulerCounts&)>;

// INVALID_ARGUMENT for options that no engine could run these requests with.
absl::Status CheckReplay(std::span<const TraceRequest> requests, const EngineOptions& options);

// Runs until all requests have finished, `stop_after` of them have, or `stop` is set. An error is one of
// CheckReplay, of the target, of the prefix store, or INTERNAL when the target counts other rows or regions
// than were sent.
absl::StatusOr<ReplayReport> ReplayTrace(std::span<const TraceRequest> requests, const EngineOptions& options,
                                         Target& target, const ReplayProgress& progress,
                                         const std::atomic<bool>& stop);

}  // namespace kvsummary
