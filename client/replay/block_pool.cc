#include "client/replay/block_pool.h"

namespace kvsummary {

BlockPool::BlockPool(std::int64_t blocks) : blocks_(static_cast<std::size_t>(blocks)) {
  for (std::int64_t block = 1; block < blocks; ++block) {
    LinkAfter(at(0).previous, static_cast<std::int32_t>(block));
  }
}

std::optional<std::int64_t> BlockPool::Allocate() {
  const std::int32_t block = at(0).next;
  if (block == 0) return std::nullopt;
  Unlink(block);
  Block& b = at(block);
  if (b.key) by_key_.erase(*b.key);
  b.key.reset();
  b.references = 1;
  return block;
}

std::optional<std::int64_t> BlockPool::Acquire(std::uint64_t key) {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return std::nullopt;
  Block& b = at(it->second);
  if (b.references == 0) Unlink(it->second);
  ++b.references;
  return it->second;
}

void BlockPool::Publish(std::int64_t block, std::uint64_t key) {
  if (by_key_.try_emplace(key, static_cast<std::int32_t>(block)).second) at(block).key = key;
}

void BlockPool::Release(std::int64_t block) {
  Block& b = at(block);
  if (--b.references > 0) return;
  LinkAfter(b.key ? at(0).previous : 0, static_cast<std::int32_t>(block));
}

void BlockPool::LinkAfter(std::int32_t place, std::int32_t block) {
  Block& b = at(block);
  b.previous = place;
  b.next = at(place).next;
  at(b.next).previous = block;
  at(place).next = block;
  ++free_;
}

void BlockPool::Unlink(std::int32_t block) {
  Block& b = at(block);
  at(b.previous).next = b.next;
  at(b.next).previous = b.previous;
  --free_;
}

}  // namespace kvsummary
