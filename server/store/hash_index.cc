#include "server/store/hash_index.h"

#include <utility>

namespace kvsummary {
namespace {

constexpr int kFirstBits = 6;

}  // namespace

void HashIndex::Place(std::uint64_t slot) {
  std::size_t i = Home(slot >> 32);
  while (slots_[i] != 0) i = (i + 1) & mask_;
  slots_[i] = slot;
}

void HashIndex::Grow() {
  const int bits = slots_.empty() ? kFirstBits : 32 - shift_ + 1;
  std::vector<std::uint64_t> old(std::size_t{1} << bits);
  std::swap(old, slots_);
  mask_ = slots_.size() - 1;
  shift_ = 32 - bits;
  for (const std::uint64_t slot : old) {
    if (slot != 0) Place(slot);
  }
}

void HashIndex::Insert(std::uint64_t key, Entry entry) {
  if (size_ + 1 > slots_.size() / 8 * 5) Grow();
  ++size_;
  Place(Tag(key) << 32 | (std::uint64_t{entry} + 1));
}

void HashIndex::Erase(std::uint64_t key, Entry entry) {
  const std::uint64_t slot = Tag(key) << 32 | (std::uint64_t{entry} + 1);
  std::size_t hole = Home(Tag(key));
  while (slots_[hole] != slot) hole = (hole + 1) & mask_;
  // What follows may have been pushed on by this one: close the gap.
  for (std::size_t i = (hole + 1) & mask_; slots_[i] != 0; i = (i + 1) & mask_) {
    const std::size_t home = Home(slots_[i] >> 32);
    if (((i - home) & mask_) >= ((i - hole) & mask_)) {
      slots_[hole] = slots_[i];
      hole = i;
    }
  }
  slots_[hole] = 0;
  --size_;
}

}  // namespace kvsummary
