#include "server/memory/pidfd.h"

#include <fcntl.h>
#include <poll.h>

#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvsummary {

bool IsPidfd(int descriptor) {
  constexpr int kPidfdThread = O_EXCL;  // PIDFD_THREAD of the kernel's headers
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0 || (flags & kPidfdThread) != 0) return false;
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", descriptor));
  for (std::string line; std::getline(info, line);) {
    if (absl::StartsWith(line, "Pid:")) return true;
  }
  return false;
}

bool HasEnded(int pidfd) {
  pollfd polled{pidfd, POLLIN, 0};
  return poll(&polled, 1, 0) != 0;
}

}  // namespace kvsummary
