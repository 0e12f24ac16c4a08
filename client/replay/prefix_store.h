// Where a replayed engine finds prefixes instead of in its own cache, and leaves its blocks for later: the
// daemon's page store.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

// Blocks of a request that hold committed tokens only, and all of them.
struct PublishedBlocks {
  std::int64_t request = 0;      // index in the trace
  std::int64_t first_block = 0;  // in the request
  std::vector<std::int64_t> blocks;
  std::int64_t committed_tokens = 0;  // of the request
};

// Whole leading blocks of a prompt.
struct FoundPrefix {
  std::int64_t blocks = 0;  // that the store has
  std::int64_t ever = 0;    // that a store without bounds would have
};

// Find, Load and Drop are called by the thread that plans, never while an update is under way; Publish by the
// one that makes the updates.
class PrefixStore {
 public:
  virtual ~PrefixStore() = default;
  // Looks the prompt up, and keeps what was found until the Load or Drop that follows.
  virtual absl::StatusOr<FoundPrefix> Find(std::int64_t request) = 0;
  // Copies the first blocks that were found into these of the cache. Answers how many leading ones are good.
  virtual absl::StatusOr<std::int64_t> Load(std::span<const std::int64_t> blocks) = 0;
  virtual absl::Status Drop() = 0;
  virtual absl::Status Publish(const PublishedBlocks& published) = 0;
};

}  // namespace kvsummary
