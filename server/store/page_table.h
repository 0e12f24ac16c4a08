// The records of a namespace's pages.
//
// A page's record is in two parts: what a lookup reads lies beside the hash (one cache line for a 32-byte
// hash), the rest apart. Records never move. Entries are reused after Remove. Not thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "server/store/huge_memory.h"
#include "server/store/slot_allocator.h"

namespace kvsummary {

using Entry = std::uint32_t;
inline constexpr Entry kNoEntry = ~Entry{0};

enum class PageLife : std::uint8_t {
  kFree,        // no page
  kPublishing,  // being copied in: in no index
  kStable,      // in the index, and in its tier's policy
  kDemoting,    // in the index; being copied into its slot, which is of the host tier
  kPromoting,   // in the index; being copied up from its slot, which is of the host tier
  kLost,        // in no index: its bytes are not good. Waits for its last pin and child
};

struct PageRecord {
  std::uint64_t parent_key = 0;  // key of the hash of the block before, 0 for block 0
  std::uint32_t block = 0;       // index in its prefix
  Entry parent = kNoEntry;       // of a FULL group: the block before, if it was there at the publish
  Unit unit = kNoUnit;           // its slot in `tier`
  std::uint32_t pins = 0;        // leases and operations
  std::uint32_t children = 0;    // pages whose parent it is
  std::uint8_t tier = 0;
  PageLife life = PageLife::kFree;
  std::uint8_t group = 0;
  bool has_checksum = false;
};
static_assert(sizeof(PageRecord) == 32);

struct PageExtra {
  std::uint64_t checksum = 0;
  // Of the policy.
  std::uint64_t stamp = 0;  // rises along its list
  Entry older = kNoEntry;
  Entry newer = kNoEntry;
  std::uint16_t policy_bits = 0;
  std::uint16_t readers = 0;         // loads that read its slot of the host tier
  std::uint32_t upper_children = 0;  // those of `children` that are in an upper tier
};
static_assert(sizeof(PageExtra) == 32);

inline constexpr std::size_t kUsualWidth = 32;  // of hashes: what compilers are told to be quick for

class PageTable {
 public:
  explicit PageTable(int hash_width)
      : width_(static_cast<std::size_t>(hash_width)), stride_(sizeof(PageRecord) + (width_ + 7) / 8 * 8) {}

  // A new record with this hash.
  Entry Add(const char* hash);
  void Remove(Entry entry);

  PageRecord& record(Entry e) { return *reinterpret_cast<PageRecord*>(At(e)); }
  const PageRecord& record(Entry e) const { return *reinterpret_cast<const PageRecord*>(At(e)); }
  PageExtra& extra(Entry e) { return *ExtraAt(e); }
  const PageExtra& extra(Entry e) const { return *ExtraAt(e); }
  const char* hash(Entry e) const { return At(e) + sizeof(PageRecord); }
  bool HashIs(const PageRecord& record, const char* hash) const {
    const char* own = reinterpret_cast<const char*>(&record) + sizeof(PageRecord);
    return width_ == kUsualWidth ? std::memcmp(own, hash, kUsualWidth) == 0
                                 : std::memcmp(own, hash, width_) == 0;
  }
  bool HashIs(Entry e, const char* hash) const { return HashIs(record(e), hash); }

  // Entries below this have been given out.
  Entry end() const { return end_; }
  std::size_t hash_width() const { return width_; }

 private:
  // Chunk c holds 2^(c + kFirstBits) records: few chunks, and no large one for a few pages.
  static constexpr int kFirstBits = 8;
  struct Place {
    std::size_t chunk;
    std::size_t offset;
  };
  static Place PlaceOf(Entry e) {
    const std::uint64_t i = std::uint64_t{e} + (1U << kFirstBits);
    const int bits = static_cast<int>(std::bit_width(i)) - 1;
    return {static_cast<std::size_t>(bits - kFirstBits), i - (std::uint64_t{1} << bits)};
  }
  PageExtra* ExtraAt(Entry e) const {
    const Place place = PlaceOf(e);
    return extras_[place.chunk].get() + place.offset;
  }
  char* At(Entry e) const {
    const Place place = PlaceOf(e);
    return records_[place.chunk].get() + place.offset * stride_;
  }

  const std::size_t width_;
  const std::size_t stride_;
  std::vector<HugeArray<char>> records_;
  std::vector<HugeArray<PageExtra>> extras_;
  std::vector<Entry> free_;
  Entry end_ = 0;
};

}  // namespace kvsummary
