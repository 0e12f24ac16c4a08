// Which of a tier's queues has the oldest victim: of all, and of those whose pages are of one size.
//
// A queue's victim changes only when its policy is told of a page, which is announced by NoteChange, or when
// the victim has become ineligible, which is seen when it would be answered: then the next victim is a
// younger one. (S3-FIFO may turn to its other list, and have an older one; that is found when the queue
// changes.) So an answer takes the time of what has changed since the last one, not of the number of queues.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "server/store/eviction_policy.h"
#include "server/store/page_table.h"

namespace kvsummary {

struct Namespace;

// The pages of one group in one tier. Stays where it is while an EvictionOrder knows it.
struct EvictionQueue {
  Namespace* name_space = nullptr;
  const PageTable* pages = nullptr;
  std::int64_t slot_bytes = 0;
  std::unique_ptr<EvictionPolicy> policy;
  Entry victim = kNoEntry;  // of a queue that Oldest or OldestOf has answered: its policy's victim
  // The order's.
  std::uint64_t stamp = 0;  // of the victim; 0: none
  bool changed = false;
};

class EvictionOrder {
 public:
  // The queue's policy is told something, before or after this.
  void NoteChange(EvictionQueue& queue) {
    if (queue.changed) return;
    queue.changed = true;
    changed_.push_back(&queue);
  }
  // The queue is not known any more.
  void Forget(EvictionQueue& queue);

  // Null when no page of the tier, or none of this size, is eligible.
  EvictionQueue* Oldest();
  EvictionQueue* OldestOf(std::int64_t slot_bytes);

 private:
  using ByStamp = std::map<std::uint64_t, EvictionQueue*>;

  void TakeOut(EvictionQueue& queue);
  // Asks the queue for its victim.
  void Sort(EvictionQueue& queue);
  void SortChanged();

  ByStamp all_;
  std::map<std::int64_t, ByStamp> by_size_;
  std::vector<EvictionQueue*> changed_;
};

}  // namespace kvsummary
