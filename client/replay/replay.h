// summaryctl replay: drives a daemon with the traffic of a trace as a continuously batching engine would,
// and checks the bytes that it keeps. With --disaggregate two of them: client/replay/run_disaggregate.h.
//
// The cache is made for the replay, with a name of its own, and deleted at its end, also after an error or
// an interruption.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/command_line.h"
#include "client/replay/engine.h"
#include "client/replay/trace.h"

namespace kvsummary {

std::vector<Flag> ReplayFlags();

// INVALID_ARGUMENT, with the flag and its value, for flags that make no sense whatever the requests are.
absl::Status CheckReplayFlags(const Invocation& invocation);

// What the flags mean for these requests, on one daemon. INVALID_ARGUMENT names the flag and its value.
//
// Unless --blocks says otherwise the cache has the blocks that --cache-bytes holds, but no more than the
// requests would fill if none was used twice.
absl::StatusOr<EngineOptions> ReplayOptions(const Invocation& invocation,
                                            std::span<const TraceRequest> requests);

// The command. Prints the report to stdout and mismatches to stderr. 0; kFailure after an error or a
// mismatch; 130 when SIGINT or SIGTERM ended it early.
int RunReplay(const Invocation& invocation);

}  // namespace kvsummary
