// What a replay drives: all layers of one cache. Errors are the daemon's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvsummary {

class Target {
 public:
  virtual ~Target() = default;
  virtual absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& update) = 0;
  virtual absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& update) = 0;
  virtual absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& update) = 0;
  // [blocks][layers][block_size/8][256], all layers.
  virtual absl::StatusOr<std::vector<std::uint8_t>> ReadPages(std::span<const std::int64_t> blocks) = 0;
  // [layers][capacity][512], all layers.
  virtual absl::StatusOr<std::vector<std::uint16_t>> ReadRing(std::int64_t ring_block) = 0;
};

}  // namespace kvsummary
