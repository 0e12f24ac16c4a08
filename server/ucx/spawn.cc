#include "server/ucx/spawn.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/ucx/protocol.h"

namespace kvsummary {
namespace {

struct Setting {
  const char* name;
  const char* value;
};

constexpr Setting kSettings[] = {
    {"UCX_TLS", "tcp"},  // within a host the daemon has a better way than UCX
    // Bytes go through UCX's buffers. Without these two it sends them from their place, at 1.5 times the
    // rate, and ends the process now and then (1.13.1: assertions at tcp_ep.c:939 and uct_iface.h:884) when a
    // peer has stalled or died while it was sent to.
    {"UCX_TCP_PUT_ENABLE", "n"},
    {"UCX_ZCOPY_THRESH", "inf"},
    // 8 KiB by default, which quarters the rate.
    {"UCX_TCP_TX_SEG_SIZE", "64K"},
    {"UCX_TCP_RX_SEG_SIZE", "64K"},
    // To notice a dead peer sooner than in a quarter of an hour. USER_TIMEOUT exists from 1.22 on.
    {"UCX_KEEPALIVE_INTERVAL", "1s"},
    {"UCX_TCP_KEEPIDLE", "1s"},
    {"UCX_TCP_KEEPINTVL", "500ms"},
    {"UCX_TCP_KEEPCNT", "3"},
    {"UCX_TCP_USER_TIMEOUT", "3s"},
    // No signal handlers, no patched mmap and munmap, no files under /tmp.
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_DEBUG_SIGNO", "0"},
    {"UCX_MEM_EVENTS", "n"},
    {"UCX_VFS_ENABLE", "n"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_LOG_LEVEL", "warn"},
};

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

// posix_spawn's two attribute objects, with what every start needs.
class SpawnSettings {
 public:
  explicit SpawnSettings(int socket) {
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, socket, kUcxControlFd);
    posix_spawn_file_actions_addclosefrom_np(&actions, kUcxControlFd + 1);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

}  // namespace

std::vector<std::string> UcxEnvironment(const std::string& net_device) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  const auto add = [&](const std::string& name, const std::string& value) {
    const std::string start = name + "=";
    const bool present = std::any_of(variables.begin(), variables.end(), [&](const std::string& v) {
      return v.compare(0, start.size(), start) == 0;
    });
    if (!present) variables.push_back(start + value);
  };
  add("UCX_NET_DEVICES", net_device);
  for (const Setting& setting : kSettings) add(setting.name, setting.value);
  return variables;
}

absl::StatusOr<UcxProcess> SpawnUcx(const std::string& binary, const std::string& net_device,
                                    std::chrono::milliseconds progress_deadline) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return absl::InternalError(absl::StrFormat("socketpair: %s", std::strerror(errno)));
  }
  Descriptor ours(ends[0]), theirs(ends[1]);
  std::vector<std::string> arguments = {binary, net_device, absl::StrCat(progress_deadline.count())};
  std::vector<std::string> environment = UcxEnvironment(net_device);
  UcxProcess process;
  SpawnSettings settings(theirs.get());
  const int error = posix_spawn(&process.pid, binary.c_str(), &settings.actions, &settings.attributes,
                                Pointers(arguments).data(), Pointers(environment).data());
  if (error != 0) {
    return absl::NotFoundError(absl::StrFormat("cannot run %s: %s", binary, std::strerror(error)));
  }
  process.pidfd = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  if (!process.pidfd) {
    const int reason = errno;
    kill(process.pid, SIGKILL);
    waitpid(process.pid, nullptr, 0);
    return absl::InternalError(absl::StrFormat("pidfd_open: %s", std::strerror(reason)));
  }
  process.socket = std::move(ours);
  return process;
}

}  // namespace kvsummary
