// Counters that requests name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kvsummary/v1/cache.pb.h"
#include "server/session/references.h"
#include "server/session/session.h"

namespace kvsummary {

// A counter in a buffer of the session, and a value of it.
struct CounterPlace {
  std::uint64_t buffer_id = 0;
  std::int64_t offset = 0;  // bytes
  std::uint64_t value = 0;
};

// The counter of the request's `field`; nothing where there is none.
absl::StatusOr<std::optional<Counter>> FindCounter(const Session& session,
                                                   const std::optional<CounterPlace>& place,
                                                   const std::string& field);
absl::StatusOr<std::optional<Counter>> FindCounter(const Session& session, bool present,
                                                   const v1::CounterValue& counter, const std::string& field);
// What a wait has ended with, in the terms of a request that has its session in `session_id`.
absl::Status OfCounter(const absl::Status& outcome);

}  // namespace kvsummary
