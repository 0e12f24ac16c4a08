#include <grpcpp/grpcpp.h>

#include "kvsummary/v1/admin.grpc.pb.h"
#include "server/rpc/handoff_calls.h"
#include "server/rpc/prefix_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"

namespace kvsummary {
namespace {

// Answers at once and also while draining: an operator wants to look.
class AdminService final : public v1::AdminService::CallbackService {
 public:
  AdminService(const ServiceContext& context, const AdminConfig& config)
      : context_(context), config_(config) {}

  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext* call,
                                      const v1::GetConfigRequest* /*request*/,
                                      v1::GetConfigResponse* reply) override {
    reply->set_version(config_.version);
    reply->set_default_device(context_.caches.default_device().name());
    reply->set_max_message_bytes(config_.max_message_bytes);
    return Done(call);
  }

  grpc::ServerUnaryReactor* ListDevices(grpc::CallbackServerContext* call,
                                        const v1::ListDevicesRequest* /*request*/,
                                        v1::ListDevicesResponse* reply) override {
    for (const auto& device : context_.caches.devices()) {
      auto* info = reply->add_devices();
      info->set_name(device->name());
      info->set_description(device->description());
      info->set_uuid(device->uuid());
      info->set_budget_bytes(device->budget().limit_bytes());
      info->set_used_bytes(device->budget().used_bytes());
      const auto overhead = device->overhead();
      info->set_overhead_bytes(overhead.device_bytes);
      info->set_pinned_host_bytes(overhead.pinned_host_bytes);
      info->set_unusable_reason(std::string(device->health().message()));
    }
    return Done(call);
  }

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* call,
                                     const v1::GetStatsRequest* /*request*/,
                                     v1::GetStatsResponse* reply) override {
    const Stats& s = context_.stats;
    reply->set_uptime_seconds(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - s.start).count());
    reply->set_caches(static_cast<std::int64_t>(context_.caches.List().size()));
    reply->set_decode_steps(s.decode_steps);
    reply->set_verify_steps(s.verify_steps);
    reply->set_prefill_steps(s.prefill_steps);
    reply->set_refused_steps(s.refused_steps);
    reply->set_token_layers(s.token_layers);
    reply->set_summaries_written(s.summaries_written);
    reply->set_bytes_read(s.bytes_read);
    reply->set_bytes_written(s.bytes_written);
    FillStats(context_.store.stats(), reply->mutable_store());
    FillStats(context_, reply->mutable_handoff());
    return Done(call);
  }

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* call, const v1::CheckRequest* /*request*/,
                                  v1::CheckResponse* reply) override {
    for (const std::string& fault : context_.store.Check()) reply->add_faults(fault);
    FillStats(context_.store.stats(), reply->mutable_store());
    return Done(call);
  }

  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* call,
                                         const v1::ListSessionsRequest* /*request*/,
                                         v1::ListSessionsResponse* reply) override {
    const auto caches = context_.caches.List();
    for (const auto& session : context_.sessions.List()) {
      auto* info = reply->add_sessions();
      info->set_name(session->name());
      info->set_number(session->number());
      info->set_age_seconds(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - session->opened_at()).count());
      for (const auto& cache : caches) {
        if (cache->session() == session->number()) info->add_caches(cache->name());
      }
      for (const std::string& name : context_.caches.MappedBy(session->number()))
        info->add_mapped_caches(name);
      info->set_tickets(context_.tickets.Count(session->number()));
      const auto buffers = session->buffer_totals();
      info->set_buffers(buffers.count);
      info->set_buffer_bytes(buffers.bytes);
      info->set_waits(context_.waits.Count(*session));
    }
    return Done(call);
  }

 private:
  static grpc::ServerUnaryReactor* Done(grpc::CallbackServerContext* call) {
    auto* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const ServiceContext context_;
  const AdminConfig config_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext& context, const AdminConfig& config) {
  return std::make_unique<AdminService>(context, config);
}

}  // namespace kvsummary
