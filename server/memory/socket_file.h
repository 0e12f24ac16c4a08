// A Unix socket's file: who has the path, and who may connect.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

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

// While it lives, sockets are made with mode 0600: never connectable for others, not even between bind and a
// chmod. Of the whole process: for the start, when no other thread makes files.
class PrivateUmask {
 public:
  PrivateUmask() : old_(umask(0177)) {}
  ~PrivateUmask() { umask(old_); }
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  mode_t old_;
};

inline constexpr mode_t kPrivateSocketMode = 0600;

// Who may connect.
struct SocketAccess {
  mode_t mode = kPrivateSocketMode;
  std::optional<gid_t> group;  // none: as the process makes it
};

// Widens a socket made under PrivateUmask. FAILED_PRECONDITION.
absl::Status ApplySocketAccess(const std::string& path, const SocketAccess& access);

}  // namespace kvsummary
