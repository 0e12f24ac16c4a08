// The source's end of HandoffService.Pull.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "kvsummary/v1/handoff.pb.h"
#include "server/rpc/context.h"

namespace kvsummary {

// Serves one stream: takes turns between the offers that are pulled on it, chunk by chunk, for as long as the
// puller has room; deletes itself when the stream has ended.
// `local`: the puller has come over a Unix socket, and may share memory.
grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* NewPullSource(const ServiceContext& context,
                                                                          bool local);

}  // namespace kvsummary
