#include "client/client.h"

#include <grpc/grpc.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/status.h"
#include "client/tls_credentials.h"
#include "client/unary_call.h"
#include "client/update_message.h"

namespace kvsummary {
namespace {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const TlsFiles& tls) {
  // Held for the life of the process: gRPC's own shutdown, when its last object goes, can wait ten seconds
  // for its poller.
  static const bool initialised = (grpc_init(), true);
  static_cast<void>(initialised);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Clients of one process do not share a connection, nor its back-off.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A daemon that starts, or starts again, is found soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Also what an attempt may take.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, tls.ca.empty() ? 100 : kTlsConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return grpc::CreateCustomChannel(address, CredentialsFor(address, TcpCredentials(tls)), arguments);
}

// What is not going to change while a connection is waited for.
absl::Status CheckAddress(const std::string& address) {
  if (!absl::StartsWith(address, "unix:")) {
    if (absl::StrContains(address, ':') && !absl::StrContains(address, '/')) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is no address: write unix:PATH or HOST:PORT"));
  }
  const std::string path = address.substr(std::strlen("unix:"));
  if (access(path.c_str(), W_OK) == 0 || errno != EACCES) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("this user may not use ", path,
                   ": --socket-mode and --socket-group of summaryd say who besides its own may"));
}

absl::StatusOr<v1::UpdateResult> SendUpdate(const Client::Options& options, v1::UpdateService::Stub& stub,
                                            const v1::StreamUpdatesRequest& message) {
  using Stub = v1::UpdateService::Stub;
  const auto call = [&](auto method, const auto& request, auto response) -> absl::StatusOr<v1::UpdateResult> {
    if (auto status = Call(options, stub, method, request, &response); !status.ok()) return status;
    return response.result();
  };
  switch (message.update_case()) {
    case v1::StreamUpdatesRequest::kDecode:
      return call(&Stub::UpdateDecode, message.decode(), v1::UpdateDecodeResponse());
    case v1::StreamUpdatesRequest::kVerify:
      return call(&Stub::UpdateVerify, message.verify(), v1::UpdateVerifyResponse());
    case v1::StreamUpdatesRequest::kPrefill:
      return call(&Stub::UpdatePrefill, message.prefill(), v1::UpdatePrefillResponse());
    case v1::StreamUpdatesRequest::UPDATE_NOT_SET:
      break;
  }
  return absl::InternalError("a message without an update");
}

absl::StatusOr<UpdateResult> Update(const Client::Options& options, v1::UpdateService::Stub& stub,
                                    const Cache& cache, LayerSpan layers, const UpdateArrays& arrays,
                                    Progress* progress) {
  if (progress != nullptr) *progress = {};
  const auto plan = PlanUpdate(cache, layers, arrays, options.max_message_bytes);
  if (!plan.ok()) return plan.status();
  UpdateResult sum;
  v1::StreamUpdatesRequest message;
  for (std::size_t i = 0; i < plan->size(); ++i) {
    FillMessage(cache, layers, arrays, *plan, i, &message);
    const auto result = SendUpdate(options, stub, message);
    if (!result.ok()) return result.status();
    const UpdateResult part = Contribution((*plan)[i], *result);
    sum.rows += part.rows;
    sum.regions_closed += part.regions_closed;
    if (progress != nullptr) *progress = ProgressAfter(*plan, i + 1);
  }
  return sum;
}

}  // namespace

Cache FromProto(const v1::CacheInfo& info) {
  const v1::CacheGeometry& g = info.geometry();
  return {.name = info.cache().name(),
          .generation = info.cache().generation(),
          .device = info.device(),
          .geometry = {.layers = g.layers(),
                       .blocks = g.blocks(),
                       .block_size = g.block_size(),
                       .block_stride = g.block_stride(),
                       .ring_blocks = g.ring_blocks(),
                       .capacity = g.capacity(),
                       .rows_per_layer = g.rows_per_layer(),
                       .k = g.k()}};
}

v1::CreateCacheRequest MakeCreateRequest(const std::string& name, const std::string& device,
                                         const CacheGeometry& geometry) {
  v1::CreateCacheRequest request;
  request.set_name(name);
  request.set_device(device);
  v1::CacheGeometry* g = request.mutable_geometry();
  g->set_layers(geometry.layers);
  g->set_blocks(geometry.blocks);
  g->set_block_size(geometry.block_size);
  g->set_block_stride(geometry.block_stride);
  g->set_ring_blocks(geometry.ring_blocks);
  g->set_capacity(geometry.capacity);
  g->set_rows_per_layer(geometry.rows_per_layer);
  g->set_k(geometry.k);
  return request;
}

std::chrono::system_clock::time_point DeadlineOf(const Client::Options& options) {
  return std::chrono::system_clock::now() + options.timeout;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& address) {
  return Connect(address, Options());
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& address, const Options& options) {
  if (!options.tls.cert.empty() && options.tls.ca.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("tls.cert=", options.tls.cert, ": needs tls.ca"));
  }
  if (auto s = CheckAddress(address); !s.ok()) return s;
  if (auto s = CheckTlsFiles(options.tls, {"tls.ca", "tls.cert", "tls.key"}); !s.ok()) return s;
  const auto channel = MakeChannel(address, options.tls);
  const bool connected =
      channel->WaitForConnected(std::chrono::system_clock::now() + options.connect_timeout);
  auto impl = std::make_unique<Impl>(channel, options);
  if (!connected) {
    // A call that does not wait for the connection says why there is none.
    v1::GetConfigResponse response;
    const auto status =
        Call(options, impl->admin, &v1::AdminService::Stub::GetConfig, v1::GetConfigRequest(), &response);
    return absl::UnavailableError(absl::StrCat("no daemon answers at ", address,
                                               HowDialled(address, options.tls), " within ",
                                               options.connect_timeout.count(), " ms: ", status.message()));
  }
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

absl::StatusOr<ServerInfo> Client::GetServerInfo() {
  v1::GetConfigResponse config;
  v1::ListDevicesResponse devices;
  absl::Status status =
      Call(impl_->options, impl_->admin, &v1::AdminService::Stub::GetConfig, v1::GetConfigRequest(), &config);
  if (!status.ok()) return status;
  status = Call(impl_->options, impl_->admin, &v1::AdminService::Stub::ListDevices, v1::ListDevicesRequest(),
                &devices);
  if (!status.ok()) return status;
  ServerInfo info{.version = config.version(),
                  .default_device = config.default_device(),
                  .max_message_bytes = config.max_message_bytes(),
                  .devices = {}};
  for (const auto& device : devices.devices()) {
    info.devices.push_back({.name = device.name(),
                            .description = device.description(),
                            .uuid = device.uuid(),
                            .budget_bytes = device.budget_bytes(),
                            .used_bytes = device.used_bytes(),
                            .overhead_bytes = device.overhead_bytes(),
                            .pinned_host_bytes = device.pinned_host_bytes(),
                            .unusable_reason = device.unusable_reason()});
  }
  return info;
}

absl::StatusOr<Cache> Client::CreateCache(const std::string& name, const std::string& device,
                                          const CacheGeometry& geometry) {
  v1::CreateCacheResponse response;
  const auto status = Call(impl_->options, impl_->caches, &v1::CacheService::Stub::CreateCache,
                           MakeCreateRequest(name, device, geometry), &response);
  if (!status.ok()) return status;
  return FromProto(response.info());
}

absl::StatusOr<Cache> Client::GetCache(const std::string& name) {
  v1::GetCacheRequest request;
  request.set_name(name);
  v1::GetCacheResponse response;
  const auto status =
      Call(impl_->options, impl_->caches, &v1::CacheService::Stub::GetCache, request, &response);
  if (!status.ok()) return status;
  return FromProto(response.info());
}

absl::StatusOr<std::vector<Cache>> Client::ListCaches() {
  v1::ListCachesResponse response;
  const auto status = Call(impl_->options, impl_->caches, &v1::CacheService::Stub::ListCaches,
                           v1::ListCachesRequest(), &response);
  if (!status.ok()) return status;
  std::vector<Cache> caches;
  for (const auto& info : response.caches()) caches.push_back(FromProto(info));
  return caches;
}

absl::StatusOr<std::vector<SessionSummary>> Client::ListSessions() {
  v1::ListSessionsResponse response;
  const auto status = Call(impl_->options, impl_->admin, &v1::AdminService::Stub::ListSessions,
                           v1::ListSessionsRequest(), &response);
  if (!status.ok()) return status;
  std::vector<SessionSummary> sessions;
  for (const auto& s : response.sessions()) {
    sessions.push_back({.name = s.name(),
                        .number = s.number(),
                        .age_seconds = s.age_seconds(),
                        .caches = {s.caches().begin(), s.caches().end()},
                        .mapped_caches = {s.mapped_caches().begin(), s.mapped_caches().end()},
                        .tickets = s.tickets(),
                        .buffers = s.buffers(),
                        .buffer_bytes = s.buffer_bytes(),
                        .waits = s.waits()});
  }
  return sessions;
}

absl::Status Client::DeleteCache(const Cache& cache) {
  v1::DeleteCacheRequest request;
  request.mutable_cache()->set_name(cache.name);
  request.mutable_cache()->set_generation(cache.generation);
  v1::DeleteCacheResponse response;
  return Call(impl_->options, impl_->caches, &v1::CacheService::Stub::DeleteCache, request, &response);
}

absl::StatusOr<UpdateResult> Client::Decode(const Cache& cache, LayerSpan layers, const DecodeUpdate& update,
                                            Progress* progress) {
  return Update(impl_->options, *impl_->updates, cache, layers, UpdateArrays(update), progress);
}

absl::StatusOr<UpdateResult> Client::Verify(const Cache& cache, LayerSpan layers, const VerifyUpdate& update,
                                            Progress* progress) {
  return Update(impl_->options, *impl_->updates, cache, layers, UpdateArrays(update), progress);
}

absl::StatusOr<UpdateResult> Client::Prefill(const Cache& cache, LayerSpan layers,
                                             const PrefillUpdate& update, Progress* progress) {
  return Update(impl_->options, *impl_->updates, cache, layers, UpdateArrays(update), progress);
}

}  // namespace kvsummary
