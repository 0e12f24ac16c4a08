#include "server/memory/socket_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

sockaddr_un SocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Whether something accepts connections at the path. The lock is held, so it is not a summaryd of ours.
absl::StatusOr<bool> IsServed(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::InternalError(absl::StrFormat("socket: %s", std::strerror(errno)));
  const sockaddr_un address = SocketAddress(path);
  const int result = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  close(fd);
  // EAGAIN: its backlog is full. EPROTOTYPE: it is of another type, but it lives.
  if (result == 0 || error == EAGAIN || error == EPROTOTYPE) return true;
  if (error == ECONNREFUSED || error == ENOENT) return false;
  return absl::FailedPreconditionError(
      absl::StrFormat("cannot tell whether %s is in use: %s", path, std::strerror(error)));
}

absl::Status RemoveStaleSocket(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path, std::strerror(errno)));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrFormat("%s exists and is not a socket", path));
  }
  const auto served = IsServed(path);
  if (!served.ok()) return served.status();
  if (*served) return absl::FailedPreconditionError(absl::StrFormat("another process serves %s", path));
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot remove the stale socket %s: %s", path, std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketLock> SocketLock::Take(const std::string& path) {
  const std::string lock_path = path + ".lock";
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot open %s: %s%s", lock_path, std::strerror(errno),
                        errno == ENOENT ? " (make the folder, or use another --listen=unix:PATH)" : ""));
  }
  SocketLock lock(fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return absl::FailedPreconditionError(
          absl::StrFormat("cannot lock %s: %s", lock_path, std::strerror(errno)));
    }
    return absl::FailedPreconditionError(
        absl::StrFormat("another summaryd serves %s (it holds %s)", path, lock_path));
  }
  if (auto s = RemoveStaleSocket(path); !s.ok()) return s;
  return lock;
}

SocketLock::~SocketLock() {
  if (fd_ >= 0) close(fd_);
}

absl::Status ApplySocketAccess(const std::string& path, const SocketAccess& access) {
  const auto failed = [&](const char* call) {
    return absl::FailedPreconditionError(absl::StrFormat("%s %s: %s", call, path, std::strerror(errno)));
  };
  // The group first: the wider mode must never hold for the wrong one.
  if (access.group.has_value() && chown(path.c_str(), static_cast<uid_t>(-1), *access.group) != 0) {
    return failed("chown");
  }
  if (access.mode != kPrivateSocketMode && chmod(path.c_str(), access.mode) != 0) return failed("chmod");
  return absl::OkStatus();
}

}  // namespace kvsummary
