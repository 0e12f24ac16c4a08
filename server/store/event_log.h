// The last events of a namespace, in order, as many as fit into a number of bytes. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "server/store/types.h"

namespace kvsummary {

class EventLog {
 public:
  EventLog(std::uint64_t first_sequence, std::size_t limit_bytes)
      : next_(first_sequence), limit_bytes_(limit_bytes) {}

  // Numbers the event and keeps it; forgets the oldest ones beyond the limit.
  void Add(StoreEvent event);
  // At most `max_events` from a sequence on, as PageStore::ReadEvents.
  EventBatch Read(std::uint64_t from, std::size_t max_events) const;
  std::uint64_t next_sequence() const { return next_; }

 private:
  static std::size_t BytesOf(const StoreEvent& event);

  std::uint64_t next_;
  const std::size_t limit_bytes_;
  std::size_t bytes_ = 0;
  std::deque<StoreEvent> events_;  // of consecutive sequences, up to next_
};

}  // namespace kvsummary
