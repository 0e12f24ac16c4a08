// The calls by which memory is shared, both ways: what they do, and the descriptor socket's part.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "kvsummary/v1/cache.pb.h"
#include "kvsummary/v1/update.pb.h"
#include "server/rpc/context.h"

namespace kvsummary {

// The end of the session detaches what the caches have of it by then. Called whenever the session has got a
// cache or a mapping; when the session has ended meanwhile, that is undone at once.
void DetachAtEnd(const ServiceContext& context, const std::shared_ptr<Session>& session);

absl::Status ExportMemory(const ServiceContext& context, const v1::ExportMemoryRequest& request,
                          v1::ExportMemoryResponse& reply);
absl::Status ReleaseMemory(const ServiceContext& context, const v1::ReleaseMemoryRequest& request);

// `done` is called once; request and reply live until then.
using CallDone = std::function<void(const absl::Status&)>;
void RegisterBuffer(const ServiceContext& context, const v1::RegisterBufferRequest& request,
                    v1::RegisterBufferResponse& reply, const CallDone& done);
// `done` comes when the last kernel that uses the buffer has ended.
void UnregisterBuffer(const ServiceContext& context, const v1::UnregisterBufferRequest& request,
                      CallDone done);

absl::Status OpenQueue(const ServiceContext& context, const v1::OpenQueueRequest& request,
                       v1::OpenQueueResponse& reply);

}  // namespace kvsummary
