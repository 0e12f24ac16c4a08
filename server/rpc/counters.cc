#include "server/rpc/counters.h"

#include <utility>

#include "server/error.h"

namespace kvsummary {

absl::StatusOr<std::optional<Counter>> FindCounter(const Session& session,
                                                   const std::optional<CounterPlace>& place,
                                                   const std::string& field) {
  if (!place) return std::nullopt;
  auto buffer = session.FindBuffer(place->buffer_id);
  if (!buffer.ok()) return AtField(buffer.status(), field);
  auto found = Counter::Find(*std::move(buffer), place->offset, place->value, field);
  if (!found.ok()) return found.status();
  return *std::move(found);
}

absl::StatusOr<std::optional<Counter>> FindCounter(const Session& session, bool present,
                                                   const v1::CounterValue& counter,
                                                   const std::string& field) {
  if (!present) return std::nullopt;
  return FindCounter(session, CounterPlace{counter.buffer_id(), counter.offset_bytes(), counter.value()},
                     field);
}

absl::Status OfCounter(const absl::Status& outcome) {
  const bool ended = RefusalReason(outcome) == ReasonName(Reason::SESSION_ENDED);
  return ended ? AtField(outcome, "session_id") : outcome;
}

}  // namespace kvsummary
