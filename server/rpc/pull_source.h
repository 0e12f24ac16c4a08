// The source's end of HandoffService.Pull.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "kvsummary/v1/handoff.pb.h"
#include "server/rpc/context.h"

namespace kvsummary {

// Serves one stream: takes turns between the offers that are pulled on it, chunk by chunk, for as long as the
// puller has room; deletes itself when the stream has ended. A puller that takes nothing for
// HandoffIdentity::longest_write is cut off.
grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* NewPullSource(const ServiceContext& context,
                                                                          grpc::CallbackServerContext& call);

}  // namespace kvsummary
