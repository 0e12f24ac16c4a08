// What a call adds to an offer, as the engine names it, and the parts (plan.h) that come of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/layout.h"
#include "server/handoff/plan.h"
#include "server/store/types.h"

namespace kvsummary {

struct Addition {
  // What ends a request: where its rows are.
  struct Tail {
    std::int64_t ring_block = 0;
    std::optional<std::int64_t> highest_stored = std::nullopt;  // nothing: committed_tokens - 1 + k
  };

  struct Group {
    std::int32_t group = 0;
    std::int64_t first = 0;
    std::vector<std::int64_t> blocks;
  };

  LayerSpan layers;
  std::int64_t committed_tokens = 0;  // of these layers, so far
  std::int64_t first_block = 0;       // of `blocks`, in the request
  std::vector<std::int64_t> blocks;
  std::vector<Group> groups = {};
  std::optional<Tail> tail = std::nullopt;  // nothing: more follows
};

// How far an offer has been planned, of which less may be staged.
struct Progress {
  std::vector<std::int64_t> regions;                // by layer, from the first on
  std::map<std::int32_t, std::int64_t> group_ends;  // first block that is not there, by group
  std::int32_t parts = 0;
  bool complete = false;
};

// What an offer is of.
struct OfferedCache {
  const CacheGeometry& geometry;
  const BoundCache* bound = nullptr;     // of the namespace of `groups`; none without one
  const std::vector<GroupSpec>& groups;  // of that namespace
  std::int64_t back_off = 0;
};

struct PlannedAddition {
  std::vector<Part> parts;
  Progress progress;  // with them
};

// Checks an addition against what there is already. LAYERS_OUT_OF_RANGE, POSITION_OUT_OF_RANGE,
// HANDOFF_INCOMPLETE, SIZE_MISMATCH (too few blocks), NULL_BLOCK, BLOCK_OUT_OF_RANGE, COUNT_OUT_OF_RANGE,
// GROUP_OUT_OF_RANGE, RING_OUT_OF_RANGE, NULL_RING_BLOCK, HANDOFF_LIMIT.
absl::StatusOr<PlannedAddition> PlanAddition(const OfferedCache& from, const Progress& so_far,
                                             const Addition& addition);

}  // namespace kvsummary
