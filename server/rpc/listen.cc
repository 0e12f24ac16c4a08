#include "server/rpc/listen.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
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
  if (result == 0 || error == EAGAIN) return true;  // EAGAIN: its backlog is full
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

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text) {
  constexpr std::string_view kUnix = "unix:";
  // gRPC decodes %XX in an address: it would listen elsewhere than the lock says.
  if (absl::StrContains(text, "%")) {
    return absl::InvalidArgumentError(absl::StrFormat("\"%s\" has a %%, which no address may have", text));
  }
  // Anybody can connect to an abstract socket: it has no mode.
  if (absl::StartsWith(text, "unix-abstract:")) {
    return absl::InvalidArgumentError("abstract sockets are not supported: use unix:PATH");
  }
  if (absl::StartsWith(text, "unix:")) {
    ListenAddress address{.grpc = text, .path = text.substr(kUnix.size())};
    if (address.path.empty()) return absl::InvalidArgumentError("unix: needs a path");
    if (address.path.size() >= sizeof(sockaddr_un::sun_path)) {
      return absl::InvalidArgumentError(absl::StrFormat("the socket path %s has %d bytes; at most %d fit",
                                                        address.path, address.path.size(),
                                                        sizeof(sockaddr_un::sun_path) - 1));
    }
    return address;
  }
  const auto colon = text.rfind(':');
  int port = -1;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\" is not unix:PATH, HOST:PORT or :PORT with a port from 0 to 65535", text));
  }
  const std::string host = colon == 0 ? "127.0.0.1" : text.substr(0, colon);
  return ListenAddress{.grpc = absl::StrFormat("%s:%d", host, port), .path = ""};
}

absl::StatusOr<SocketLock> SocketLock::Take(const std::string& path) {
  const std::string lock_path = path + ".lock";
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot open %s: %s", lock_path, std::strerror(errno)));
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

}  // namespace kvsummary
