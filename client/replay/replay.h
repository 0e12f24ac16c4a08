// summaryctl replay: drives a daemon with the traffic of a trace as a continuously batching engine would,
// and checks the bytes that it keeps.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvsummary {

struct ReplayOptions {
  std::string trace;              // path; required
  std::int64_t requests = 0;      // the trace's first ones; 0: all
  std::int32_t concurrency = 64;  // running requests at most
  std::int32_t layers = 1;
  std::int32_t k = 0;                                // drafts of a verify step; 0: decode steps
  std::int32_t block_size = 64;                      // tokens
  std::int64_t blocks = 0;                           // 0: as many as cache_bytes holds
  std::int64_t cache_bytes = std::int64_t{2} << 30;  // of summary pages
  std::int32_t chunk_tokens = 8192;                  // prefill tokens of a step at most
  std::int64_t sample = -1;                          // requests checked; -1: one in 50, at least 8
  std::uint64_t seed = 1;
  std::string device;  // empty: the daemon's default
  bool json = false;   // print one JSON object and nothing else
};

// One line a flag, for a usage text.
extern const char kReplayUsage[];

// From "--name=value", "--name value" and "--json". INVALID_ARGUMENT names the flag and its value.
absl::StatusOr<ReplayOptions> ParseReplayFlags(const std::vector<std::string>& args);

// Makes a cache, replays, prints the report on `out` and what went wrong on `err`, deletes the cache.
// SIGINT and SIGTERM end it early, cleanly. Returns the exit status: 0; 1 after an error or a mismatch;
// 130 when interrupted. Calls in several threads at once would share the signals.
int RunReplay(const ReplayOptions& options, Client& client, std::FILE* out, std::FILE* err);

}  // namespace kvsummary
