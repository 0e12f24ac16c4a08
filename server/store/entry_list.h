// A list of entries from old to new, through their PageExtra, with a mark of how far a search for a victim
// has got.
//
// Invariant: stamps rise along the list, and no entry older than the mark was eligible when it was last
// considered.
#pragma once

#include <cstdint>

#include "server/store/eviction_policy.h"

namespace kvsummary {

class EntryList {
 public:
  explicit EntryList(const PolicyContext& context) : context_(context) {}

  // Becomes the newest.
  void Append(Entry entry) {
    PageExtra& extra = context_.pages->extra(entry);
    extra.stamp = ++*context_.clock;
    extra.older = newest_;
    extra.newer = kNoEntry;
    (newest_ == kNoEntry ? oldest_ : context_.pages->extra(newest_).newer) = entry;
    newest_ = entry;
    if (mark_ == kNoEntry) mark_ = entry;
    ++size_;
  }
  void Remove(Entry entry) {
    const PageExtra& extra = context_.pages->extra(entry);
    if (mark_ == entry) mark_ = extra.newer;
    (extra.older == kNoEntry ? oldest_ : context_.pages->extra(extra.older).newer) = extra.newer;
    (extra.newer == kNoEntry ? newest_ : context_.pages->extra(extra.newer).older) = extra.older;
    --size_;
  }
  void Reconsider(Entry entry) {
    if (mark_ == kNoEntry || context_.pages->extra(entry).stamp < context_.pages->extra(mark_).stamp) {
      mark_ = entry;
    }
  }
  // The oldest entry that has not been passed over, or kNoEntry.
  Entry next() const { return mark_; }
  // Passes over next(), which is not eligible.
  void PassOver() { mark_ = context_.pages->extra(mark_).newer; }
  std::int64_t size() const { return size_; }

 private:
  const PolicyContext& context_;  // of the policy that has the list
  Entry oldest_ = kNoEntry;
  Entry newest_ = kNoEntry;
  Entry mark_ = kNoEntry;  // kNoEntry: every entry has been passed over
  std::int64_t size_ = 0;
};

}  // namespace kvsummary
