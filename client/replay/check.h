// Compares what the daemon keeps of a finished request with an independent computation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/replay/scheduler.h"
#include "client/replay/target.h"
#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

struct Mismatch {
  std::int64_t request = 0;  // index in the trace
  std::int32_t layer = 0;
  std::int64_t region = 0;
  std::int64_t ring_position = -1;  // of the row that differs; -1: the summary does

  // "request 17, layer 0, region 3 (positions 24 to 31): summary differs, first in channel 5: ..."
  std::string what;
};

struct CheckResult {
  std::int64_t regions = 0;         // summaries compared
  std::int64_t loaded_regions = 0;  // of them in blocks that came from the prefix store
  std::int64_t ring_rows = 0;       // rows compared
  std::vector<Mismatch> mismatches;
};

// Reads the request's pages, shared ones included, and its ring rows, and compares every closed region
// and every row of the open region in every layer. An error is one of reading.
absl::StatusOr<CheckResult> CheckRequest(const FinishedRequest& finished, const TraceRequest& request,
                                         const CacheGeometry& geometry, std::uint64_t seed, Target& target);

}  // namespace kvsummary
