#include "server/rpc/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/tls_credentials.h"
#include "server/cache/reaper.h"
#include "server/handoff/address.h"
#include "server/handoff/handoff_text.h"
#include "server/memory/descriptor_server.h"
#include "server/memory/socket_file.h"
#include "server/rpc/listen.h"
#include "server/rpc/prefix_sessions.h"
#include "server/rpc/services.h"
#include "server/rpc/update_queue.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

constexpr const char* kServiceNames[] = {"kvsummary.v1.SessionService", "kvsummary.v1.CacheService",
                                         "kvsummary.v1.UpdateService",  "kvsummary.v1.PrefixService",
                                         "kvsummary.v1.HandoffService", "kvsummary.v1.AdminService"};

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

// A peer that is gone without a word (its host, or the network, has vanished) is found out by pings, with or
// without calls; and a client's own pings are not held against it.
void SetKeepalive(grpc::ServerBuilder& builder, std::chrono::milliseconds keepalive) {
  const int ms = static_cast<int>(keepalive.count());
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
}

TlsFiles ListenTls(const Server::Options::Tls& tls) {
  return {.ca = tls.client_ca, .cert = tls.cert, .key = tls.key};
}
TlsFiles PeerTls(const Server::Options::Tls& tls) {
  return {.ca = tls.peer_ca.empty() ? tls.client_ca : tls.peer_ca, .cert = tls.cert, .key = tls.key};
}

absl::Status CheckTls(const Server::Options& options) {
  const Server::Options::Tls& tls = options.tls;
  if (!tls.client_ca.empty() && tls.cert.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--tls-client-ca=%s: needs --tls-cert and --tls-key", tls.client_ca));
  }
  if (auto s = CheckTlsFiles(ListenTls(tls), {"--tls-client-ca", "--tls-cert", "--tls-key"}); !s.ok())
    return s;
  if (auto s = CheckTlsFiles({.ca = tls.peer_ca}, {.ca = "--tls-peer-ca", .cert = "", .key = ""}); !s.ok()) {
    return s;
  }
  if (!tls.cert.empty() && PeerTls(tls).ca.empty() && options.peers.any_host()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--tls-cert=%s: hand-offs come from --peers by TLS too, which takes --tls-peer-ca or --tls-client-ca",
        tls.cert));
  }
  return absl::OkStatus();
}

// Where others reach a daemon that listens there: empty, and said so in the log, where they cannot.
std::string DialledAt(const std::string& address, const Server::Options::Tls& tls) {
  if (const auto s = CheckDialled(address); !s.ok()) {
    spdlog::warn("other daemons cannot accept hand-offs from this one without --advertise: {} {}", address,
                 std::string(s.message()));
    return "";
  }
  const auto split = SplitHostPort(address);
  if (!tls.cert.empty() && split && !split->port.empty() && !CertificateNames(tls.cert, split->host)) {
    spdlog::warn("other daemons cannot accept hand-offs from this one: the certificate in {} is not for {}",
                 tls.cert, split->host);
  }
  return address;
}

}  // namespace

struct Server::Impl {
  Impl(const Options& options, CacheManager& caches, std::unique_ptr<PageStore> page_store,
       std::unique_ptr<UcxTransport> ucx_transport)
      : store(std::move(page_store)),
        ucx(std::move(ucx_transport)),
        waits(options.waits),
        queues(caches, stats, drain, options.waits),
        bounces(caches.devices()),
        offers(caches.devices(), options.handoff),
        links(PullOptions(options, ucx.get()), stats),
        handoff{.instance = "",
                .address = "",
                .peers = options.peers,
                .shares_memory = options.pull.same_host,
                .longest_write = 2 * options.pull.silence},
        context{.caches = caches,
                .stats = stats,
                .drain = drain,
                .sessions = sessions,
                .tickets = tickets,
                .streams = streams,
                .descriptor_socket = descriptor_socket,
                .waits = waits,
                .queues = queues,
                .store = *store,
                .prefixes = prefixes,
                .offers = offers,
                .bounces = bounces,
                .links = links,
                .handoff = handoff,
                .ucx = ucx.get()} {}

  static PullLinks::Options PullOptions(const Options& options, UcxTransport* ucx) {
    PullLinks::Options pull = options.pull;
    pull.ucx = ucx;
    pull.peers = options.peers;
    pull.tls = PeerTls(options.tls);
    return pull;
  }

  Stats stats;
  class Drain drain;
  SessionManager sessions;
  Tickets tickets;
  SessionStreams streams;
  std::string descriptor_socket;  // its path, set before any service is made
  const std::unique_ptr<PageStore> store;
  const std::unique_ptr<UcxTransport> ucx;  // null: off
  Waits waits;
  UpdateQueues queues;
  PrefixSessions prefixes;
  Bounces bounces;
  Offers offers;
  PullLinks links;
  HandoffIdentity handoff;  // set before any service is made, but for the address, which needs the ports
  ServiceContext context;
  std::vector<SocketLock> locks;
  std::vector<std::unique_ptr<grpc::Service>> services;
  std::vector<std::string> addresses;
  std::unique_ptr<DescriptorServer> descriptors;
  std::unique_ptr<Reaper> reaper;
  std::unique_ptr<grpc::Server> server;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, CacheManager& caches) {
  InstallPlugins();
  if (auto s = CheckTls(options); !s.ok()) return s;
  auto store = PageStore::Create(caches.devices(), options.store);
  if (!store.ok()) return store.status();
  std::unique_ptr<UcxTransport> ucx;
  if (!options.ucx.net_device.empty()) {
    auto started = UcxTransport::Start(options.ucx);
    if (!started.ok()) return started.status();
    ucx = *std::move(started);
  }
  auto impl = std::make_unique<Impl>(options, caches, *std::move(store), std::move(ucx));
  std::vector<ListenAddress> addresses;
  impl->descriptor_socket = options.descriptor_socket;
  for (const std::string& text : options.listen) {
    auto address = ParseListenAddress(text);
    if (!address.ok()) return address.status();
    if (!address->path.empty()) {
      auto lock = SocketLock::Take(address->path);
      if (!lock.ok()) return lock.status();
      impl->locks.push_back(*std::move(lock));
      if (impl->descriptor_socket.empty()) impl->descriptor_socket = address->path + ".fds";
    }
    addresses.push_back(*std::move(address));
  }
  if (!impl->descriptor_socket.empty()) {
    auto descriptors = DescriptorServer::Start(
        {.path = impl->descriptor_socket,
         .access = options.socket_access,
         .redeem = [&tickets = impl->tickets](const std::string& ticket, Descriptor d) {
           return tickets.Redeem(ticket, std::move(d));
         }});
    if (!descriptors.ok()) return descriptors.status();
    impl->descriptors = *std::move(descriptors);
  }

  auto instance = RandomBytes(kInstanceBytes);
  if (!instance.ok()) return instance.status();
  impl->handoff.instance = *std::move(instance);

  impl->services.push_back(MakeSessionService(impl->context));
  impl->services.push_back(MakeCacheService(impl->context));
  impl->services.push_back(MakeUpdateService(impl->context));
  impl->services.push_back(MakePrefixService(impl->context));
  impl->services.push_back(MakeHandoffService(impl->context));
  impl->services.push_back(
      MakeAdminService(impl->context, {.version = kVersion, .max_message_bytes = options.max_message_bytes}));
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetResourceQuota(grpc::ResourceQuota("summaryd").Resize(kMaxReceivingBytes));
  SetKeepalive(builder, options.keepalive);
  for (const auto& service : impl->services) builder.RegisterService(service.get());
  const auto credentials = ListenCredentials(ListenTls(options.tls));
  std::vector<int> ports(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    builder.AddListeningPort(addresses[i].grpc,
                             addresses[i].path.empty() ? credentials : grpc::InsecureServerCredentials(),
                             &ports[i]);
  }
  {
    PrivateUmask umask;
    impl->server = builder.BuildAndStart();
  }
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (impl->server != nullptr && ports[i] != 0 && !addresses[i].path.empty()) {
      if (auto s = ApplySocketAccess(addresses[i].path, options.socket_access); !s.ok()) return s;
    }
    if (impl->server == nullptr || ports[i] == 0) {
      if (impl->server == nullptr && ports[i] != 0) continue;  // another address was at fault
      return absl::UnavailableError(absl::StrFormat(
          "cannot listen on %s: the address is in use, or not one of this host's", addresses[i].grpc));
    }
    std::string address = addresses[i].grpc;
    if (addresses[i].path.empty()) {
      address = absl::StrFormat("%s:%d", address.substr(0, address.rfind(':')), ports[i]);
    }
    impl->addresses.push_back(std::move(address));
  }
  if (impl->server == nullptr) return absl::UnavailableError("the gRPC server does not start");
  const std::string& advertised =
      options.advertise.empty() && !impl->addresses.empty() ? impl->addresses[0] : options.advertise;
  if (!advertised.empty() && options.handoff.bytes_per_device > 0) {
    impl->handoff.address = DialledAt(advertised, options.tls);
  }
  auto* health = impl->server->GetHealthCheckService();
  health->SetServingStatus(true);
  for (const char* name : kServiceNames) health->SetServingStatus(name, true);
  for (const auto& device : caches.devices()) {
    device->set_on_broken([health] { health->SetServingStatus(false); });
  }
  caches.set_on_lost(
      [&streams = impl->streams](std::uint64_t session, const std::string& name, std::uint64_t generation) {
        streams.TellLost(session, name, generation);
      });
  impl->reaper = std::make_unique<Reaper>(caches);
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::~Server() {
  Drain(std::chrono::milliseconds(0));
  for (const auto& device : impl_->context.caches.devices()) device->set_on_broken(nullptr);
  impl_->context.caches.set_on_lost(nullptr);
}

const std::vector<std::string>& Server::addresses() const { return impl_->addresses; }
SessionManager& Server::sessions() { return impl_->sessions; }
const Stats& Server::stats() const { return impl_->stats; }

void Server::Drain(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::system_clock::now() + timeout;
  impl_->server->GetHealthCheckService()->SetServingStatus(false);
  impl_->drain.Begin();
  impl_->streams.TellDraining();
  impl_->drain.Await(deadline);
  impl_->streams.EndAll();
  impl_->links.Close();  // hand-offs under way fail now: the server waits for their calls
  // Left are watches of the health and connections whose clients do not look: they end by being closed.
  impl_->server->Shutdown(std::min(deadline, std::chrono::system_clock::now() + kLinger));
}

}  // namespace kvsummary
