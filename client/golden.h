// Golden files: recorded update steps of an engine's own kernels, with the state they left.
//
// A file is one case, on a cache of a single layer: its geometry and first state, a list of steps and
// the SHA-256 of summaries and ring after each (tests/data/golden/README.md describes the format). A
// case that was read is consistent: every array has the size that the geometry and the step's rows ask
// for, and the sizes fit the file. The *values* of slots, positions and ring bases are not checked; that
// is the business of whoever runs the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvsummary {

struct GoldenStep {
  enum class Kind { kDecode, kVerify, kPrefill };

  Kind kind = Kind::kDecode;
  std::int64_t rows = 0;
  std::vector<std::uint16_t> key;             // bf16 [rows][256]
  std::vector<std::uint16_t> z;               // bf16 [rows][256]
  std::vector<std::int64_t> slots;            // [rows], negative: padding
  std::vector<std::int64_t> positions;        // [rows]; empty for verify
  std::vector<std::int64_t> ring_bases;       // [rows], negative: padding
  std::vector<std::int32_t> query_start_loc;  // [requests + 1]; empty for decode
  std::vector<std::int32_t> seq_lens;         // [requests]; verify only

  // Lower-case hexadecimal SHA-256 of the state after the step.
  std::string mean_sha256;     // the summaries alone, [blocks][block_size / 8][256]
  std::string backing_sha256;  // the whole backing, bytes between blocks included
  std::string ring_sha256;

  // Requests of a verify or prefill step.
  std::int64_t requests() const { return static_cast<std::int64_t>(query_start_loc.size()) - 1; }
};

// "decode", "verify" or "prefill".
const char* GoldenKindName(GoldenStep::Kind kind);

struct GoldenCase {
  std::string name;   // of the file, without folder and extension
  std::string about;  // what it covers
  std::int32_t block_size = 0;
  std::int64_t blocks = 0;
  std::int64_t block_stride_bytes = 0;
  std::int64_t ring_blocks = 0;
  std::int64_t ring_rows_per_block = 0;
  std::int32_t ring_capacity = 0;
  std::vector<std::uint8_t> initial_backing;  // [blocks * block_stride_bytes]
  std::vector<std::uint16_t> initial_ring;    // [ring_rows()][512]
  std::vector<GoldenStep> steps;
  std::vector<std::uint8_t> final_backing;
  std::vector<std::uint16_t> final_ring;

  // Bytes of a block's summaries; block_stride_bytes is at least this.
  std::int64_t page_bytes() const { return std::int64_t{block_size} / 8 * 256; }
  // The last ring block ends with its last row in use.
  std::int64_t ring_rows() const { return (ring_blocks - 1) * ring_rows_per_block + ring_capacity; }
};

// NOT_FOUND when there is no such file, INVALID_ARGUMENT when it is not a golden file (the message names
// the file and the offending header field or tensor). Never crashes, whatever the file holds, and never
// allocates more than a small multiple of the file's size.
absl::StatusOr<GoldenCase> ReadGolden(const std::string& path);

}  // namespace kvsummary
