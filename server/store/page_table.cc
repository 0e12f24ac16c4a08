#include "server/store/page_table.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace kvsummary {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Records are touched at random: with pages of 4 KiB most of the time would go into page tables.
char* AllocateRecords(std::size_t bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kLine;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
  return static_cast<char*>(memory);
}

}  // namespace

Entry PageTable::Add(const char* hash) {
  Entry e = end_;
  if (!free_.empty()) {
    e = free_.back();
    free_.pop_back();
  } else {
    if (const Place place = PlaceOf(e); place.chunk == records_.size()) {
      const std::size_t count = std::size_t{1} << (place.chunk + kFirstBits);
      records_.emplace_back(AllocateRecords(count * stride_));
      extras_.emplace_back(AllocateRecords(count * sizeof(PageExtra)));
    }
    ++end_;
  }
  new (At(e)) PageRecord;
  std::memcpy(At(e) + sizeof(PageRecord), hash, width_);
  new (ExtraAt(e)) PageExtra;
  return e;
}

void PageTable::Remove(Entry entry) {
  record(entry).life = PageLife::kFree;
  free_.push_back(entry);
}

}  // namespace kvsummary
