// From hashes to entries: one open-addressing table a group of a namespace.
//
// A slot holds 32 bits of the hash's key beside the entry, so that a lookup reads one line here and, of the
// records, only the one that it answers. Whether that record has the whole hash is compared by the caller.
// Keys are seeded at random: no engine can choose hashes that collide. Not thread-safe.
#pragma once

#include <cstdint>

#include "server/store/huge_memory.h"
#include "server/store/page_table.h"

namespace kvsummary {

class HashIndex {
 public:
  // The entry under `key` of which same(entry) holds, or kNoEntry.
  template <typename Same>
  Entry Find(std::uint64_t key, Same same) const {
    if (slots_ == nullptr) return kNoEntry;
    for (std::size_t i = Home(Tag(key)); slots_[i] != 0; i = (i + 1) & mask_) {
      if (slots_[i] >> 32 != Tag(key)) continue;
      const Entry entry = static_cast<Entry>(slots_[i]) - 1;
      if (same(entry)) return entry;
    }
    return kNoEntry;
  }
  // The first entry under a key as short as the slots', not compared further: for prefetching.
  Entry Guess(std::uint64_t key) const {
    if (slots_ == nullptr) return kNoEntry;
    for (std::size_t i = Home(Tag(key)); slots_[i] != 0; i = (i + 1) & mask_) {
      if (slots_[i] >> 32 == Tag(key)) return static_cast<Entry>(slots_[i]) - 1;
    }
    return kNoEntry;
  }
  void Prefetch(std::uint64_t key) const {
    if (slots_ != nullptr) __builtin_prefetch(&slots_[Home(Tag(key))]);
  }

  // The key must not be there with this entry yet.
  void Insert(std::uint64_t key, Entry entry);
  // Of an entry that is there.
  void Erase(std::uint64_t key, Entry entry);

  std::size_t size() const { return size_; }

 private:
  static std::uint64_t Tag(std::uint64_t key) { return key >> 32; }
  std::size_t Home(std::uint64_t tag) const { return tag >> shift_; }
  void Grow();
  void Place(std::uint64_t slot);

  HugeArray<std::uint64_t> slots_;  // tag, entry + 1; 0: empty
  std::size_t slot_count_ = 0;      // a power of two
  std::size_t mask_ = 0;
  int shift_ = 32;  // of a tag to its home
  std::size_t size_ = 0;
};

}  // namespace kvsummary
