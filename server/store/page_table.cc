#include "server/store/page_table.h"

#include <new>

namespace kvsummary {

Entry PageTable::Add(const char* hash) {
  Entry e = end_;
  if (!free_.empty()) {
    e = free_.back();
    free_.pop_back();
  } else {
    if (const Place place = PlaceOf(e); place.chunk == records_.size()) {
      const std::size_t count = std::size_t{1} << (place.chunk + kFirstBits);
      records_.emplace_back(static_cast<char*>(AllocateHuge(count * stride_)));
      extras_.emplace_back(static_cast<PageExtra*>(AllocateHuge(count * sizeof(PageExtra))));
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
