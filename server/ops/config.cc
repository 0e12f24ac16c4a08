#include "server/ops/config.h"

#include <grp.h>

#include <charconv>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/units.h"
#include "server/handoff/address.h"

namespace kvsummary {

const char kUsage[] =
    R"(summaryd: owns Step-5 index summaries and tail rings, and keeps them up to date

  --listen=ADDRESS       unix:PATH, HOST:PORT or :PORT (of 127.0.0.1); repeatable.
                         Default: unix:/run/summaryd/summaryd.sock
  --host-bytes=SIZE      memory that caches may take of the host, as 8GiB.
                         Default: 80 % of what the host or its control group has free
  --device-bytes=SIZE    memory that caches may take of each CUDA device.
                         Default: 80 % of what is free at the device's first use
  --host-store-bytes=SIZE  page store's tier in host memory, part of --host-bytes. Default: 0, none
  --gpu-store-bytes=SIZE   page store's tier in memory of each CUDA device, part of --device-bytes;
                         without such a device another tier in host memory. Default: 0, none
  --store-policy=POLICY  what the page store evicts first: lru, or s3fifo, which resists scans.
                         Default: lru
  --namespace-quota-bytes=SIZE  what a namespace's pages may take, over all tiers.
                         Default: 0, no limit but the tiers'
  --max-lease=SECONDS    longest lease on stored pages. Default: 60
  --handoff-bytes=SIZE   memory of each device (part of its budget, taken at the first offer) for
                         requests that are handed over. 0: none. Default: 512MiB
  --handoff-lifetime=SECONDS  how long an offer is kept at most. Default: 60
  --advertise=ADDRESS    where other daemons reach this one: HOST:PORT or unix:/PATH.
                         Default: the first --listen, unless that is a wildcard as 0.0.0.0
  --peers=PEER           daemons whose hand-offs may be accepted, besides this one's own: a network
                         as 10.0.0.0/8, an address, a host, either with :PORT, or unix:PATH;
                         repeatable. Default: none
  --same-host=on|off     whether hand-offs of other daemons of this host are read from their memory,
                         where it can be mapped. Default: on
  --tls-cert=FILE, --tls-key=FILE  TLS on every TCP --listen with this certificate (its chain behind it)
                         and key, in PEM; read again when they change. Unix sockets are plain
  --tls-client-ca=FILE   clients over TCP must present a certificate that one of these has signed
  --tls-peer-ca=FILE     daemons that hand-offs are fetched from over TCP are dialled with TLS, must have
                         a certificate for the host that they advertise, signed by one of these, and
                         are shown --tls-cert. Default: --tls-client-ca; with neither, no TLS
  --ucx-device=INTERFACE let other daemons fetch hand-offs by UCX on this network interface, which
                         neither authenticates nor encrypts: for private networks. Default: off
  --ucx-helper=PATH      the process that UCX runs in. Default: summaryd-ucx beside summaryd
  --descriptor-socket=PATH  socket that passes memory to clients on this host.
                         Default: the path of the first unix: address and ".fds"
  --socket-mode=MODE     of the Unix sockets, octal, within 0666. Default: 0600
  --socket-group=GROUP   of the Unix sockets, a name or a number
  --cache-grace=SECONDS  how long a cache is kept when its session has ended. Default: 600
  --drain-timeout=SECONDS  what calls under way get on SIGTERM. Default: 30
  --log-level=LEVEL      trace, debug, info, warning, error or off. Default: info
  --help, --version

SIGTERM or SIGINT: takes no new calls, finishes those under way, exits with 0.
A Unix socket is for its owner and root alone, unless --socket-mode lets others in. A TCP address is
for everybody who reaches it, unless --tls-client-ca says who may come in.
)";

namespace {

absl::Status SetMode(const std::string& value, Config& config) {
  unsigned mode = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), mode, 8);
  if (error != std::errc() || end != value.data() + value.size() || (mode & ~0666u) != 0 ||
      (mode & 0600u) != 0600u) {
    return absl::InvalidArgumentError("must be octal, within 0666, and let the owner in (0600)");
  }
  config.socket_mode = mode;
  return absl::OkStatus();
}

absl::Status SetGroup(const std::string& value, Config& config) {
  gid_t number = 0;
  if (absl::SimpleAtoi(value, &number)) {
    config.socket_group = number;
    return absl::OkStatus();
  }
  const group* found = getgrnam(value.c_str());  // before any other thread is made
  if (found == nullptr) return absl::InvalidArgumentError("there is no such group");
  config.socket_group = found->gr_gid;
  return absl::OkStatus();
}

// Where the value of a flag that names a file goes; null: it is no such flag.
std::string* FileOf(std::string_view flag, Config& config) {
  if (flag == "--tls-cert") return &config.tls_cert;
  if (flag == "--tls-key") return &config.tls_key;
  if (flag == "--tls-client-ca") return &config.tls_client_ca;
  if (flag == "--tls-peer-ca") return &config.tls_peer_ca;
  if (flag == "--descriptor-socket") return &config.descriptor_socket;
  return nullptr;
}

absl::Status Set(std::string_view flag, const std::string& value, Config& config) {
  const auto bytes_from = [&](std::int64_t least, std::int64_t& out) -> absl::Status {
    auto parsed = ParseBytes(value);
    if (!parsed.ok()) return parsed.status();
    if (*parsed < least) return absl::InvalidArgumentError("must be above 0");
    out = *parsed;
    return absl::OkStatus();
  };
  const auto bytes = [&](std::int64_t& out) { return bytes_from(1, out); };
  const auto bytes_or_none = [&](std::int64_t& out) { return bytes_from(0, out); };
  if (flag == "--listen") {
    config.listen.push_back(value);
    return absl::OkStatus();
  }
  if (flag == "--host-bytes") return bytes(config.host_bytes);
  if (flag == "--device-bytes") return bytes(config.device_bytes);
  const auto seconds = [&](std::chrono::seconds& out) -> absl::Status {
    int parsed = 0;
    if (!absl::SimpleAtoi(value, &parsed) || parsed < 0) {
      return absl::InvalidArgumentError("must be a number of seconds");
    }
    out = std::chrono::seconds(parsed);
    return absl::OkStatus();
  };
  if (flag == "--host-store-bytes") return bytes_or_none(config.host_store_bytes);
  if (flag == "--gpu-store-bytes") return bytes_or_none(config.gpu_store_bytes);
  if (flag == "--namespace-quota-bytes") return bytes_or_none(config.namespace_quota_bytes);
  if (flag == "--store-policy") {
    if (value != "lru" && value != "s3fifo") return absl::InvalidArgumentError("must be lru or s3fifo");
    config.s3fifo = value == "s3fifo";
    return absl::OkStatus();
  }
  if (flag == "--max-lease") {
    if (auto s = seconds(config.max_lease); !s.ok()) return s;
    return config.max_lease.count() > 0 ? absl::OkStatus() : absl::InvalidArgumentError("must be above 0");
  }
  if (flag == "--handoff-bytes") return bytes_or_none(config.handoff_bytes);
  if (flag == "--handoff-lifetime") {
    if (auto s = seconds(config.handoff_lifetime); !s.ok()) return s;
    return config.handoff_lifetime.count() > 0 ? absl::OkStatus()
                                               : absl::InvalidArgumentError("must be above 0");
  }
  if (flag == "--advertise") {
    if (auto s = CheckDialled(value); !s.ok()) return s;
    config.advertise = value;
    return absl::OkStatus();
  }
  if (flag == "--same-host") {
    if (value != "on" && value != "off") return absl::InvalidArgumentError("must be on or off");
    config.same_host = value == "on";
    return absl::OkStatus();
  }
  if (flag == "--ucx-device" || flag == "--ucx-helper") {
    if (value.empty()) return absl::InvalidArgumentError("must be named");
    (flag == "--ucx-device" ? config.ucx_device : config.ucx_helper) = value;
    return absl::OkStatus();
  }
  if (flag == "--peers") return config.peers.Allow(value);
  if (flag == "--drain-timeout") return seconds(config.drain_timeout);
  if (flag == "--cache-grace") return seconds(config.cache_grace);
  if (std::string* file = FileOf(flag, config); file != nullptr) {
    if (value.empty()) return absl::InvalidArgumentError("needs a path");
    *file = value;
    return absl::OkStatus();
  }
  if (flag == "--socket-mode") return SetMode(value, config);
  if (flag == "--socket-group") return SetGroup(value, config);
  if (flag == "--log-level") {
    for (const char* level : {"trace", "debug", "info", "warning", "error", "off"}) {
      if (value == level) {
        config.log_level = value;
        return absl::OkStatus();
      }
    }
    return absl::InvalidArgumentError("must be trace, debug, info, warning, error or off");
  }
  return absl::InvalidArgumentError("there is no such flag");
}

}  // namespace

absl::StatusOr<Config> ParseConfig(std::span<const char* const> arguments) {
  Config config;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string argument = arguments[i];
    if (argument == "--help") {
      config.help = true;
      continue;
    }
    if (argument == "--version") {
      config.version = true;
      continue;
    }
    const auto equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (flag.starts_with("--") && i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": a flag without its value, or no flag"));
    }
    if (auto s = Set(flag, value, config); !s.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": ", s.message()));
    }
  }
  if (config.listen.empty()) config.listen.push_back("unix:/run/summaryd/summaryd.sock");
  return config;
}

}  // namespace kvsummary
