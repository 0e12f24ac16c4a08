// Update messages in the terms of update_step.h. Each function takes any kind of update: UpdateDecodeRequest,
// UpdateVerifyRequest, UpdatePrefillRequest or StreamUpdatesRequest.
#pragma once

#include "absl/status/statusor.h"
#include "kvsummary/v1/update.pb.h"
#include "server/rpc/update_step.h"

namespace kvsummary {

// What the message's SharedStep names; nothing where it has none.
template <typename Request>
absl::StatusOr<Shared> FindShared(const SessionManager& sessions, const Request& request);

// The message's arrays and rows stay in it.
template <typename Request>
absl::StatusOr<Update> Parse(const CacheManager& caches, const Request& request, Shared shared);

template <typename Request>
bool SlowToParse(const Request& request);

void FillResult(const StepEffect& effect, v1::UpdateResult* result);

}  // namespace kvsummary
