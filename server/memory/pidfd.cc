#include "server/memory/pidfd.h"

#include <fcntl.h>
#include <poll.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace kvsummary {

std::optional<pid_t> PidOf(int descriptor) {
  constexpr int kPidfdThread = O_EXCL;  // PIDFD_THREAD of the kernel's headers
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0 || (flags & kPidfdThread) != 0) return std::nullopt;
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", descriptor));
  std::string key;
  pid_t pid = 0;
  for (std::string rest; info >> key; std::getline(info, rest)) {
    if (key == "Pid:" && info >> pid) return pid;
  }
  return std::nullopt;
}

bool HasEnded(int pidfd) {
  pollfd polled{pidfd, POLLIN, 0};
  return poll(&polled, 1, 0) > 0;  // a poll that fails tells nothing: it may write still
}

}  // namespace kvsummary
