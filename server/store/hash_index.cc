#include "server/store/hash_index.h"

#include <algorithm>
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
  const int bits = slots_ == nullptr ? kFirstBits : 32 - shift_ + 1;
  const HugeArray<std::uint64_t> old = std::move(slots_);
  const std::size_t old_count = slot_count_;
  slot_count_ = std::size_t{1} << bits;
  slots_.reset(static_cast<std::uint64_t*>(AllocateHuge(slot_count_ * sizeof(std::uint64_t))));
  std::fill_n(slots_.get(), slot_count_, 0);
  mask_ = slot_count_ - 1;
  shift_ = 32 - bits;
  for (std::size_t i = 0; i < old_count; ++i) {
    if (old[i] != 0) Place(old[i]);
  }
}

void HashIndex::Insert(std::uint64_t key, Entry entry) {
  if (size_ + 1 > slot_count_ / 8 * 5) Grow();
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
