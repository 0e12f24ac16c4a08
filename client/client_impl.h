// What the files of the client share. Private to them.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "client/client.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "kvsummary/v1/prefix.grpc.pb.h"
#include "kvsummary/v1/session.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"

namespace kvsummary {

// Of a message that is sent now.
std::chrono::system_clock::time_point DeadlineOf(const Client::Options& options);

Cache FromProto(const v1::CacheInfo& info);
v1::CreateCacheRequest MakeCreateRequest(const std::string& name, const std::string& device,
                                         const CacheGeometry& geometry);

struct Client::Impl {
  Impl(const std::shared_ptr<grpc::Channel>& channel, const Options& client_options)
      : options(client_options),
        caches(channel),
        updates(v1::UpdateService::NewStub(channel)),
        admin(channel),
        sessions(channel),
        prefixes(channel),
        handoffs(channel) {}

  absl::StatusOr<v1::GetStatsResponse> GetStats();  // client_store.cc

  const Options options;
  v1::CacheService::Stub caches;
  const std::shared_ptr<v1::UpdateService::Stub> updates;  // shared: streams may outlive the client
  v1::AdminService::Stub admin;
  v1::SessionService::Stub sessions;
  v1::PrefixService::Stub prefixes;
  v1::HandoffService::Stub handoffs;
};

}  // namespace kvsummary
