// The engines of a replay: some at a time, each with a connection and a cache of its own, and each killed and
// replaced by a new one every so often.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/plane.h"
#include "client/replay/engine.h"
#include "client/replay/trace.h"

namespace kvsummary {

struct EnginesOptions {
  EngineOptions engine;  // of each; `order`, `stop_after` and `prefixes` are set here
  std::string address;
  TlsFiles tls;
  PlaneKind plane = PlaneKind::kInline;
  std::string device;              // of the caches; empty: the daemon's default
  std::int64_t engines = 1;        // engine e of n runs requests e, e + n, e + 2n ...
  std::int64_t restart_every = 0;  // finished requests of an engine; 0: never
  bool prefix = false;             // prefixes come from the daemon's page store
};

// Runs until all requests have finished or `stop` is set; a request that its engine's death interrupts starts
// again. Caches are deleted, also after an error, of which the first is answered. `progress` is called on the
// engines' threads, one at a time.
absl::StatusOr<ReplayReport> RunEngines(std::span<const TraceRequest> requests, const EnginesOptions& options,
                                        const ReplayProgress& progress, const std::atomic<bool>& stop);

}  // namespace kvsummary
