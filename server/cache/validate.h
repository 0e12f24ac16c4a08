// Checks of update steps against a cache's geometry, and of the blocks that reads and writes name. Pure:
// the first fault is answered with its reason and field, in the terms of kvsummary/v1/update.proto.
//
// A step that passes can be given to any UpdateKernels: they take as live the rows that were checked as live,
// skip none of them, and none depends on the order in which requests are handled.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layout.h"

namespace kvsummary {

// The arrays of a step as they were sent; a kind of update leaves the others' empty.
struct StepArrays {
  std::span<const std::int64_t> slots{};            // [rows]
  std::span<const std::int64_t> positions{};        // [rows] decode, prefill
  std::span<const std::int32_t> query_start_loc{};  // [requests + 1] verify, prefill
  std::span<const std::int32_t> seq_lens{};         // [requests] verify
  std::span<const std::int64_t> ring_bases{};       // [rows]
};

// What a valid step will do.
struct StepEffect {
  std::int64_t rows = 0;            // live, not padding
  std::int64_t regions_closed = 0;  // in each layer
};

absl::Status CheckLayers(const CacheGeometry& geometry, LayerSpan layers);

// `row_bytes` is the number of bytes that came as rows: [layers][rows][512] bf16.
absl::StatusOr<StepEffect> CheckDecode(const CacheGeometry& geometry, LayerSpan layers,
                                       const StepArrays& arrays, std::size_t row_bytes);
absl::StatusOr<StepEffect> CheckVerify(const CacheGeometry& geometry, LayerSpan layers,
                                       const StepArrays& arrays, std::size_t row_bytes);
absl::StatusOr<StepEffect> CheckPrefill(const CacheGeometry& geometry, LayerSpan layers,
                                        const StepArrays& arrays, std::size_t row_bytes);

// Blocks (field "blocks") or ring blocks (field "ring_blocks") of a read, or of a write: that one refuses
// block 0 and repeats.
enum class Access { kRead, kWrite };
absl::Status CheckBlocks(const CacheGeometry& geometry, std::span<const std::int64_t> blocks, Access access);
absl::Status CheckRingBlocks(const CacheGeometry& geometry, std::span<const std::int64_t> ring_blocks,
                             Access access);

}  // namespace kvsummary
