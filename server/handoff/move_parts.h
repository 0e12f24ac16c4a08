// Where a request lies in a cache, and the movement of its parts' bytes between there and a dense array.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/handoff/plan.h"
#include "server/store/types.h"

namespace kvsummary {

// A request in a cache. Of the blocks only those that move need be there.
struct PartPlace {
  Cache* cache = nullptr;
  const BoundCache* bound = nullptr;  // for `groups`
  RequestBlocks blocks = {};
  std::map<std::int32_t, RequestBlocks> groups = {};
  std::int64_t ring_block = 0;
  std::int64_t regions = 0;    // those from here on do not move
  std::int64_t rows_from = 0;  // nor do rows of positions below, or from rows_to on
  std::int64_t rows_to = 0;
};

enum class Toward { kDense, kCache };

// What a movement has done, and how long the device took.
struct MovedPart {
  std::int64_t bytes = 0;
  std::chrono::nanoseconds time{0};
};

// (executor of `device`) Moves what the place has of a chunk, between the cache and the chunk's bytes at
// `dense`, which the device can address. Checks that the cache is still
// what it was.
absl::StatusOr<MovedPart> MovePart(Device& device, const PartPlace& place, const Part& part,
                                   const Chunk& chunk, char* dense, Toward toward);

// Whether ids are blocks of a cache of so many, none the null block: NULL_BLOCK, BLOCK_OUT_OF_RANGE.
absl::Status CheckIds(std::span<const std::int64_t> ids, std::int64_t cache_blocks, const std::string& field);
// Also whether they hold regions [from, to): SIZE_MISMATCH.
absl::Status CheckBlocks(const CacheGeometry& geometry, const RequestBlocks& blocks, std::int64_t from,
                         std::int64_t to, const std::string& field);
// NULL_RING_BLOCK, RING_OUT_OF_RANGE.
absl::Status CheckRingBlock(const CacheGeometry& geometry, std::int64_t ring_block, const std::string& field);
// Whether the group is one of a namespace's, of pages that can be handed over: GROUP_OUT_OF_RANGE,
// RING_GROUP; FIELD_MISSING when the cache is not bound to a namespace.
absl::Status CheckGroup(const BoundCache* bound, std::span<const GroupSpec> groups, std::int32_t group,
                        const std::string& field);

}  // namespace kvsummary
