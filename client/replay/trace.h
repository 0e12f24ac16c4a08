// Request traces: one JSON object a line,
//   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 tokens]}
// Equal hash ids mean an equal prompt up to and including that chunk. Other fields are ignored.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvsummary {

inline constexpr int kTraceChunkTokens = 512;  // tokens that one hash id stands for

struct TraceRequest {
  std::int64_t timestamp_ms = 0;
  std::int32_t input_length = 0;       // tokens, at least 1
  std::int32_t output_length = 0;      // tokens, at least 1
  std::vector<std::int64_t> hash_ids;  // ceil(input_length / 512)

  // The last output token is never fed back, so it has no row.
  std::int64_t rows() const { return std::int64_t{input_length} + output_length - 1; }
};

// The first `limit` requests of the file, all if `limit` is 0. An unreadable file is NOT_FOUND or
// FAILED_PRECONDITION; a line that is not such a request is INVALID_ARGUMENT with file, line, field and
// value; so is a file without requests.
absl::StatusOr<std::vector<TraceRequest>> ReadTrace(const std::string& path, std::int64_t limit);

}  // namespace kvsummary
