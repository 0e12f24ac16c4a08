// The gRPC server: the services of kvsummary.v1, health (grpc.health.v1), reflection and channelz.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/handoff/offers.h"
#include "server/handoff/peers.h"
#include "server/memory/socket_file.h"
#include "server/ops/stats.h"
#include "server/rpc/pull_links.h"
#include "server/rpc/ucx_transport.h"
#include "server/session/session.h"
#include "server/session/waits.h"
#include "server/store/page_store.h"

namespace kvsummary {

inline constexpr char kVersion[] = "0.1.0";

class Server {
 public:
  struct Options {
    std::vector<std::string> listen;  // see ParseListenAddress
    int max_message_bytes = 64 << 20;
    // Path of the descriptor socket. Empty: that of the first Unix socket of `listen` with ".fds" behind it,
    // or none where there is no such.
    std::string descriptor_socket = {};
    SocketAccess socket_access = {};  // of the Unix sockets
    // A peer is pinged when nothing has come from it for this long, and is gone when it does not answer in as
    // long again: so the session of a host that has vanished ends after twice this time.
    std::chrono::milliseconds keepalive{4500};
    Waits::Options waits = {};
    PageStore::Options store = {};
    Offers::Options handoff = {};
    PullLinks::Options pull = {};  // same_host: also of those that pull from here
    // Where other daemons reach this one, as it stands in hand-offs. Empty: the first address of `listen`.
    std::string advertise = {};
    Peers peers = {};  // daemons whose hand-offs may be accepted
    // Of the TCP addresses of `listen`, and of daemons that are dialled over TCP; Unix sockets are plain.
    // Paths, empty: none.
    struct Tls {
      std::string cert = {};       // of this daemon, shown to clients and to daemons that it dials
      std::string key = {};        // of cert
      std::string client_ca = {};  // clients need a certificate that it signed
      std::string peer_ca = {};    // signed those of the daemons dialled. Empty: client_ca
    };
    Tls tls = {};
    // UCX between daemons, where a network interface is named: its helper is started, or the server is not.
    UcxTransport::Options ucx = {};
  };

  // INVALID_ARGUMENT where an address or a setting of TLS is not one, which is named as summaryd's flag.
  // Makes the page store, or says why there is no room for it; starts UCX if it is wanted. Listens on every
  // address, or on none and says why. Unix sockets are made with mode 0600 before they get another, a port is
  // never shared. `caches` must outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options, CacheManager& caches);

  // Stops at once what is under way.
  ~Server();

  // Addresses in gRPC's form, ports chosen by the system filled in.
  const std::vector<std::string>& addresses() const;
  SessionManager& sessions();
  // What has been done so far.
  const Stats& stats() const;

  // Health turns to NOT_SERVING, new calls get UNAVAILABLE, sessions are told and ended, calls under way may
  // end until the timeout and are cancelled then. Returns when none is left.
  void Drain(std::chrono::milliseconds timeout);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvsummary
