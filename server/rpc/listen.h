// Addresses that a daemon listens on, and the lock that guards a Unix socket.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvsummary {

// Where to listen, in gRPC's form.
struct ListenAddress {
  std::string grpc;  // "unix:/abs/path" or "127.0.0.1:50051"
  std::string path;  // of the socket; empty for TCP
};

// "unix:PATH", "HOST:PORT" or ":PORT" (the loopback host), without any '%'. INVALID_ARGUMENT says what is
// wrong, also with a path that does not fit a socket address (107 bytes).
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text);

// The right to a socket path: an flock on PATH.lock, held for the object's life (and given up by the kernel
// when the process dies, however it dies). The lock file stays.
class SocketLock {
 public:
  // Takes the lock and removes a stale socket. FAILED_PRECONDITION when another process serves the path,
  // or when something other than a socket is there; nothing is removed then.
  static absl::StatusOr<SocketLock> Take(const std::string& path);
  SocketLock(SocketLock&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  SocketLock& operator=(SocketLock&&) = delete;
  ~SocketLock();

 private:
  explicit SocketLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace kvsummary
