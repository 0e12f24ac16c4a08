#include "server/store/event_log.h"

#include <algorithm>
#include <utility>

namespace kvsummary {

std::size_t EventLog::BytesOf(const StoreEvent& event) {
  return sizeof(event) + event.hashes.size() + event.parent_hash.size();
}

void EventLog::Add(StoreEvent event) {
  event.sequence = next_++;
  bytes_ += BytesOf(event);
  events_.push_back(std::move(event));
  while (bytes_ > limit_bytes_ && events_.size() > 1) {
    bytes_ -= BytesOf(events_.front());
    events_.pop_front();
  }
}

EventBatch EventLog::Read(std::uint64_t from, std::size_t max_events) const {
  EventBatch batch;
  const std::uint64_t oldest = next_ - events_.size();
  if (from != 0 && from < oldest) batch.gap = EventGap{from, oldest};
  const std::uint64_t begin = std::max(from, oldest);
  batch.next = std::max(begin, from);
  for (std::uint64_t s = begin; s < next_ && batch.events.size() < max_events; ++s) {
    batch.events.push_back(events_[s - oldest]);
    batch.next = s + 1;
  }
  return batch;
}

}  // namespace kvsummary
