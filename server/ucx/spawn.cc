#include "server/ucx/spawn.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/exec_pointers.h"
#include "server/ucx/environment.h"
#include "server/ucx/protocol.h"

namespace kvsummary {
namespace {

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
                                ExecPointers(arguments).data(), ExecPointers(environment).data());
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
