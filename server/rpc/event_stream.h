// The WatchEvents call.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "server/rpc/prefix_calls.h"

namespace kvsummary {

// Owns itself. Ends with the client, with the session, and when the daemon drains. What `context` refers to
// is needed until the call has ended.
grpc::ServerWriteReactor<v1::WatchEventsResponse>* NewEventStream(const PrefixContext& context,
                                                                  const v1::WatchEventsRequest& request);

}  // namespace kvsummary
