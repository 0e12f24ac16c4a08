// Blocks with a prefix cache, as vLLM's block pool keeps them.
//
// A block is used (referenced by running requests) or free. A block that carries a key can be found by
// it, used or free; a free one keeps its key, and its pages, until it is allocated anew. Free blocks
// without a key are allocated first, then those with one, the longest unused first. So, always:
// used + free = blocks - 1; block 0, the null block, is neither; a key names at most one block; and a
// block that Allocate returned has one owner until someone finds it by a key.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kvsummary {

class BlockPool {
 public:
  // Blocks 0 .. blocks - 1; blocks >= 1.
  explicit BlockPool(std::int64_t blocks);

  std::int64_t free_blocks() const { return free_; }
  std::int64_t used_blocks() const { return static_cast<std::int64_t>(blocks_.size()) - 1 - free_; }
  std::int64_t cached_blocks() const { return static_cast<std::int64_t>(by_key_.size()); }

  // A free block with one reference, its former key forgotten; nothing when none is free.
  std::optional<std::int64_t> Allocate();
  // The block of this key with one more reference; nothing when no block carries it.
  std::optional<std::int64_t> Acquire(std::uint64_t key);
  // Lets `block`, which is used, be found by `key`. Without effect when another block carries the key.
  void Publish(std::int64_t block, std::uint64_t key);
  // Gives up one reference of a used block.
  void Release(std::int64_t block);

 private:
  // Links of the ring of free blocks; block 0 is its head.
  struct Block {
    std::int32_t references = 0;
    std::int32_t next = 0;
    std::int32_t previous = 0;
    std::optional<std::uint64_t> key;
  };

  Block& at(std::int64_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  void LinkAfter(std::int32_t place, std::int32_t block);
  void Unlink(std::int32_t block);

  std::vector<Block> blocks_;
  absl::flat_hash_map<std::uint64_t, std::int32_t> by_key_;
  std::int64_t free_ = 0;
};

}  // namespace kvsummary
