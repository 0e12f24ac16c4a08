// The calls of PrefixService that answer at once: parse, validate, call the store, map its answer.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvsummary/v1/admin.pb.h"
#include "kvsummary/v1/prefix.pb.h"
#include "server/rpc/context.h"
#include "server/rpc/prefix_sessions.h"
#include "server/store/page_store.h"

namespace kvsummary {

struct PrefixContext {
  const ServiceContext& service;
  PrefixSessions& sessions;
};

absl::Status DeclareNamespace(const PrefixContext& context, const v1::DeclareNamespaceRequest& request,
                              v1::DeclareNamespaceResponse& reply);
absl::Status BindCache(const PrefixContext& context, const v1::BindCacheRequest& request);
absl::Status Lookup(const PrefixContext& context, const v1::LookupRequest& request,
                    v1::LookupResponse& reply);
absl::Status RenewLease(const PrefixContext& context, const v1::RenewLeaseRequest& request,
                        v1::RenewLeaseResponse& reply);
absl::Status ReleaseLease(const PrefixContext& context, const v1::ReleaseLeaseRequest& request);
void ListNamespaces(const PrefixContext& context, v1::ListNamespacesResponse& reply);

// A cache that the session may use, as it is bound to the namespace; keeps its memory.
absl::StatusOr<std::shared_ptr<const BoundCache>> FindBound(const PrefixContext& context,
                                                            std::uint64_t session, NamespaceId name_space,
                                                            const v1::CacheRef& cache);

PublishArgs ToArgs(const v1::PublishRequest& request);
LoadArgs ToArgs(const v1::LoadRequest& request);
void FillReply(const PublishResult& result, v1::PublishResponse* reply);
void FillReply(const LoadResult& result, const v1::LoadRequest& request, v1::LoadResponse* reply);
void FillStats(const StoreStats& stats, v1::StoreStats* out);

}  // namespace kvsummary
