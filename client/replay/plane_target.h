// A cache of a daemon as a replay drives it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/client.h"
#include "client/plane.h"
#include "client/replay/target.h"

namespace kvsummary {

// Updates by the plane; pages and rings are read over gRPC on every one. Both must outlive it.
class PlaneTarget final : public Target {
 public:
  PlaneTarget(Client& client, Plane& plane) : client_(client), plane_(plane) {}

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& update) override {
    return plane_.Decode(layers, update);
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& update) override {
    return plane_.Verify(layers, update);
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& update) override {
    return plane_.Prefill(layers, update);
  }
  absl::StatusOr<std::vector<std::uint8_t>> ReadPages(std::span<const std::int64_t> blocks) override {
    return client_.ReadPages(plane_.cache(), blocks, {0, plane_.cache().geometry.layers});
  }
  absl::StatusOr<std::vector<std::uint16_t>> ReadRing(std::int64_t ring_block) override {
    return client_.ReadRing(plane_.cache(), std::span(&ring_block, 1), {0, plane_.cache().geometry.layers});
  }

 private:
  Client& client_;
  Plane& plane_;
};

}  // namespace kvsummary
