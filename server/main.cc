// summaryd. Exit status: 0 after a drain, 1 when it cannot start, 2 for bad flags.
#include <pthread.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <filesystem>

#include "client/units.h"
#include "server/cache/cache.h"
#include "server/device/device.h"
#include "server/ops/config.h"
#include "server/ops/grpc_log.h"
#include "server/rpc/server.h"

namespace kvsummary {
namespace {

constexpr double kDefaultBudgetShare = 0.8;

std::vector<std::unique_ptr<Device>> MakeDevices(const Config& config) {
  const std::int64_t host_bytes =
      config.host_bytes > 0
          ? config.host_bytes
          : static_cast<std::int64_t>(kDefaultBudgetShare * static_cast<double>(AvailableHostBytes()));
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeHostDevice(HostKernels(), host_bytes));
  for (auto& device : MakeCudaDevices(config.device_bytes)) devices.push_back(std::move(device));
  for (const auto& device : devices) {
    const std::int64_t budget = device->budget().limit_bytes();
    spdlog::info("device {}: {} {}, budget {}", device->name(), device->description(), device->uuid(),
                 budget > 0 ? FormatBytes(budget) : "set at its first use");
  }
  return devices;
}

// Connections, sessions' processes and caches take descriptors. The usual soft limit is one for programs that
// use select(), which nothing here does.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::uint64_t MicrosecondsSinceEpoch() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

std::string UcxHelperPath(const Config& config) {
  if (!config.ucx_helper.empty()) return config.ucx_helper;
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).replace_filename("summaryd-ucx").string();
}

int Run(const Config& config) {
  spdlog::set_default_logger(spdlog::stderr_color_mt("summaryd"));
  spdlog::set_level(spdlog::level::from_str(config.log_level));

  TakeGrpcLog();
  RaiseDescriptorLimit();
  std::signal(SIGPIPE, SIG_IGN);  // a log that nobody reads any more is no reason to end
  // Blocked in every thread made from here on: this one waits for them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  CacheManager caches(MakeDevices(config), MicrosecondsSinceEpoch(), {.grace = config.cache_grace});
  auto server = Server::Start(
      {.listen = config.listen,
       .descriptor_socket = config.descriptor_socket,
       .socket_access = {.mode = config.socket_mode, .group = config.socket_group},
       .store = {.host_bytes = config.host_store_bytes,
                 .device_bytes = config.gpu_store_bytes,
                 .policy = config.s3fifo ? PageStore::Policy::kS3Fifo : PageStore::Policy::kLru,
                 .namespace_quota_bytes = config.namespace_quota_bytes,
                 .max_lease = config.max_lease,
                 .first_sequence = MicrosecondsSinceEpoch()},
       .handoff = {.bytes_per_device = config.handoff_bytes, .lifetime = config.handoff_lifetime},
       .pull = {.same_host = config.same_host},
       .advertise = config.advertise,
       .peers = config.peers,
       .tls = {.cert = config.tls_cert,
               .key = config.tls_key,
               .client_ca = config.tls_client_ca,
               .peer_ca = config.tls_peer_ca},
       .ucx = {.net_device = config.ucx_device, .binary = UcxHelperPath(config)}},
      caches);
  if (!server.ok()) {
    spdlog::error("{}", std::string(server.status().message()));
    return absl::IsInvalidArgument(server.status()) ? 2 : 1;  // 2: a --listen or a file of TLS
  }
  if (config.host_store_bytes > 0 || config.gpu_store_bytes > 0) {
    spdlog::info("page store: {} of the host, {} of each GPU", FormatBytes(config.host_store_bytes),
                 FormatBytes(config.gpu_store_bytes));
  }
  for (const std::string& address : (*server)->addresses()) {
    spdlog::info("listening on {}", address);
    std::printf("listening on %s\n", address.c_str());
  }
  std::fflush(stdout);

  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("{}: draining, for {} s at most", strsignal(signal), config.drain_timeout.count());
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second signal ends the process at once
  (*server)->Drain(config.drain_timeout);
  const Stats& stats = (*server)->stats();
  spdlog::info("drained after {} decode, {} verify and {} prefill steps; {} refused",
               stats.decode_steps.load(), stats.verify_steps.load(), stats.prefill_steps.load(),
               stats.refused_steps.load());
  return 0;
}

int Main(int argc, char** argv) {
  const auto config = ParseConfig(std::span<const char* const>(argv + 1, static_cast<std::size_t>(argc - 1)));
  if (!config.ok()) {
    std::fprintf(stderr, "summaryd: %s\n(--help lists the flags)\n",
                 std::string(config.status().message()).c_str());
    return 2;
  }
  if (config->help || config->version) {
    std::printf("%s%s", config->version ? "summaryd " : kUsage, config->version ? kVersion : "");
    if (config->version) std::printf("\n");
    return 0;
  }
  return Run(*config);
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) { return kvsummary::Main(argc, argv); }
