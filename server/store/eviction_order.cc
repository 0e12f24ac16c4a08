#include "server/store/eviction_order.h"

#include <algorithm>

namespace kvsummary {

void EvictionOrder::TakeOut(EvictionQueue& queue) {
  if (queue.stamp == 0) return;
  all_.erase(queue.stamp);
  const auto of_size = by_size_.find(queue.slot_bytes);
  of_size->second.erase(queue.stamp);
  if (of_size->second.empty()) by_size_.erase(of_size);
  queue.stamp = 0;
}

void EvictionOrder::Sort(EvictionQueue& queue) {
  TakeOut(queue);
  queue.victim = queue.policy->Victim();
  if (queue.victim == kNoEntry) return;
  queue.stamp = queue.pages->extra(queue.victim).stamp;
  all_.emplace(queue.stamp, &queue);
  by_size_[queue.slot_bytes].emplace(queue.stamp, &queue);
}

void EvictionOrder::SortChanged() {
  for (EvictionQueue* queue : changed_) {
    queue->changed = false;
    Sort(*queue);
  }
  changed_.clear();
}

void EvictionOrder::Forget(EvictionQueue& queue) {
  TakeOut(queue);
  if (queue.changed) changed_.erase(std::find(changed_.begin(), changed_.end(), &queue));
}

EvictionQueue* EvictionOrder::Oldest() {
  SortChanged();
  while (!all_.empty()) {
    EvictionQueue& queue = *all_.begin()->second;
    if (queue.policy->Victim() == queue.victim) return &queue;
    Sort(queue);
  }
  return nullptr;
}

EvictionQueue* EvictionOrder::OldestOf(std::int64_t slot_bytes) {
  SortChanged();
  while (true) {
    const auto of_size = by_size_.find(slot_bytes);
    if (of_size == by_size_.end()) return nullptr;
    EvictionQueue& queue = *of_size->second.begin()->second;
    if (queue.policy->Victim() == queue.victim) return &queue;
    Sort(queue);
  }
}

}  // namespace kvsummary
