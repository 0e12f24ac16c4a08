#include "server/rpc/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/listen.h"
#include "server/rpc/services.h"

namespace kvsummary {
namespace {

constexpr const char* kServiceNames[] = {"kvsummary.v1.CacheService", "kvsummary.v1.UpdateService",
                                         "kvsummary.v1.AdminService"};

// What messages may take while they are being received, of all clients together. gRPC slows clients down as
// this fills, and beyond it closes connections and ends calls with RESOURCE_EXHAUSTED.
constexpr std::size_t kMaxReceivingBytes = std::size_t{1} << 30;

// What clients get to notice a shutdown once no call works on a cache any more.
constexpr std::chrono::seconds kLinger{1};

void InstallPlugins() {
  static const bool installed = [] {
    // Held for the life of the process: gRPC's own shutdown, when its last object goes, can wait ten
    // seconds for its poller.
    grpc_init();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
    return true;
  }();
  static_cast<void>(installed);
}

// A socket is never connectable for others, not even between its bind and a chmod.
class PrivateUmask {
 public:
  PrivateUmask() : old_(umask(0177)) {}
  ~PrivateUmask() { umask(old_); }
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  mode_t old_;
};

}  // namespace

struct Server::Impl {
  explicit Impl(CacheManager& caches) : context{caches, stats, drain} {}

  Stats stats;
  class Drain drain;
  ServiceContext context;
  std::vector<SocketLock> locks;
  std::vector<std::unique_ptr<grpc::Service>> services;
  std::vector<std::string> addresses;
  std::unique_ptr<grpc::Server> server;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, CacheManager& caches) {
  InstallPlugins();
  auto impl = std::make_unique<Impl>(caches);
  impl->services.push_back(MakeCacheService(impl->context));
  impl->services.push_back(MakeUpdateService(impl->context));
  impl->services.push_back(
      MakeAdminService(impl->context, {.version = kVersion, .max_message_bytes = options.max_message_bytes}));

  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetResourceQuota(grpc::ResourceQuota("summaryd").Resize(kMaxReceivingBytes));
  for (const auto& service : impl->services) builder.RegisterService(service.get());

  std::vector<ListenAddress> addresses;
  for (const std::string& text : options.listen) {
    auto address = ParseListenAddress(text);
    if (!address.ok()) return address.status();
    if (!address->path.empty()) {
      auto lock = SocketLock::Take(address->path);
      if (!lock.ok()) return lock.status();
      impl->locks.push_back(*std::move(lock));
    }
    addresses.push_back(*std::move(address));
  }
  std::vector<int> ports(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    builder.AddListeningPort(addresses[i].grpc, grpc::InsecureServerCredentials(), &ports[i]);
  }
  {
    PrivateUmask umask;
    impl->server = builder.BuildAndStart();
  }
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (impl->server == nullptr || ports[i] == 0) {
      if (impl->server == nullptr && ports[i] != 0) continue;  // another address was at fault
      return absl::UnavailableError(absl::StrFormat("cannot listen on %s", addresses[i].grpc));
    }
    std::string address = addresses[i].grpc;
    if (addresses[i].path.empty()) {
      address = absl::StrFormat("%s:%d", address.substr(0, address.rfind(':')), ports[i]);
    }
    impl->addresses.push_back(std::move(address));
  }
  if (impl->server == nullptr) return absl::UnavailableError("the gRPC server does not start");
  auto* health = impl->server->GetHealthCheckService();
  health->SetServingStatus(true);
  for (const char* name : kServiceNames) health->SetServingStatus(name, true);
  for (const auto& device : caches.devices()) {
    device->set_on_broken([health] { health->SetServingStatus(false); });
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::~Server() {
  Drain(std::chrono::milliseconds(0));
  for (const auto& device : impl_->context.caches.devices()) device->set_on_broken(nullptr);
}

const std::vector<std::string>& Server::addresses() const { return impl_->addresses; }
const Stats& Server::stats() const { return impl_->stats; }

void Server::Drain(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::system_clock::now() + timeout;
  impl_->server->GetHealthCheckService()->SetServingStatus(false);
  impl_->drain.Begin();
  impl_->drain.Await(deadline);
  // Left are watches of the health and connections whose clients do not look: they end by being closed.
  impl_->server->Shutdown(std::min(deadline, std::chrono::system_clock::now() + kLinger));
}

}  // namespace kvsummary
