// Updates by reference as messages.
#pragma once

#include <string>

#include "client/client.h"
#include "client/session.h"
#include "kvsummary/v1/update.pb.h"

namespace kvsummary {

// Fills an empty UpdateDecodeRequest, UpdateVerifyRequest or UpdatePrefillRequest. Whatever `update` holds
// travels: the daemon judges it.
template <typename Request>
void FillShared(const std::string& session_id, const Cache& cache, LayerSpan layers,
                const SharedUpdate& update, Request* request);

}  // namespace kvsummary
