// The client's end of the descriptor socket (proto/descriptor_socket.h). Neither gRPC nor Abseil: it is part
// of libkvsummary.so.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "client/plain_status.h"

namespace kvsummary {

// A file descriptor that is closed when its owner goes.
class OwnedDescriptor {
 public:
  OwnedDescriptor() = default;
  explicit OwnedDescriptor(int fd) : fd_(fd) {}
  OwnedDescriptor(OwnedDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedDescriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A pidfd of this process; invalid, with errno set, where the kernel gives none.
OwnedDescriptor OpenSelfPidfd();

struct Redeemed {
  OwnedDescriptor descriptor;  // invalid when the reply brought none
  std::uint64_t size_bytes = 0;
};

// Sends the ticket with one descriptor, and waits for the answer, ten seconds at most. `ticket` has
// kTicketBytes. A refusal has the daemon's code and reason; UNAVAILABLE: nobody listens at the path, or the
// daemon hung up; DEADLINE_EXCEEDED; INTERNAL: the answer is not one of this protocol.
PlainStatus RedeemTicket(const std::string& socket_path, const std::uint8_t* ticket, int descriptor,
                         Redeemed* redeemed);

}  // namespace kvsummary
