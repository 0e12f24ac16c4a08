// The services of kvsummary.v1: parse, validate, call, map the status. Each needs the context for life.
#pragma once

#include <grpcpp/impl/codegen/service_type.h>

#include <memory>
#include <string>

#include "server/rpc/context.h"

namespace kvsummary {

std::unique_ptr<grpc::Service> MakeCacheService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeHandoffService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakePrefixService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeSessionService(const ServiceContext& context);
std::unique_ptr<grpc::Service> MakeUpdateService(const ServiceContext& context);

struct AdminConfig {
  std::string version;
  std::int64_t max_message_bytes = 0;
};
std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext& context, const AdminConfig& config);

}  // namespace kvsummary
