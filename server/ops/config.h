// The daemon's flags.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/handoff/peers.h"

namespace kvsummary {

struct Config {
  std::vector<std::string> listen;  // --listen, repeatable
  std::int64_t host_bytes = 0;      // --host-bytes; 0: 80 % of what the host or its control group has free
  std::int64_t device_bytes =
      0;  // --device-bytes, of each CUDA device; 0: 80 % of what is free at its first use
  std::int64_t host_store_bytes = 0;                     // --host-store-bytes; 0: none
  std::int64_t gpu_store_bytes = 0;                      // --gpu-store-bytes, of each CUDA device; 0: none
  bool s3fifo = false;                                   // --store-policy
  std::int64_t namespace_quota_bytes = 0;                // --namespace-quota-bytes; 0: none
  std::chrono::seconds max_lease{60};                    // --max-lease
  std::int64_t handoff_bytes = std::int64_t{512} << 20;  // --handoff-bytes, of each device; 0: none
  std::chrono::seconds handoff_lifetime{60};             // --handoff-lifetime
  std::string advertise;                                 // --advertise; empty: the first --listen
  Peers peers;                                           // --peers, repeatable
  std::string tls_cert;                                  // --tls-cert; empty: none, as all of these
  std::string tls_key;                                   // --tls-key
  std::string tls_client_ca;                             // --tls-client-ca
  std::string tls_peer_ca;                               // --tls-peer-ca
  bool same_host = true;                                 // --same-host
  std::string ucx_device;                                // --ucx-device; empty: no UCX
  std::string ucx_helper;                                // --ucx-helper; empty: beside the daemon
  std::chrono::seconds drain_timeout{30};                // --drain-timeout
  std::chrono::seconds cache_grace{600};                 // --cache-grace
  std::string descriptor_socket;                         // --descriptor-socket; empty: the default
  mode_t socket_mode = 0600;                             // --socket-mode
  std::optional<gid_t> socket_group;                     // --socket-group
  std::string log_level = "info";                        // --log-level
  bool help = false;
  bool version = false;
};

// For --help.
extern const char kUsage[];

// `arguments` without the program's name: --name=value or --name value. INVALID_ARGUMENT names the flag.
absl::StatusOr<Config> ParseConfig(std::span<const char* const> arguments);

}  // namespace kvsummary
