#include "client/descriptor_client.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "proto/descriptor_socket.h"

namespace kvsummary {
namespace {

constexpr timeval kTimeout = {.tv_sec = 10, .tv_usec = 0};

// Room for more descriptors than are due, so that all of them are seen and closed.
constexpr std::size_t kControlBytes = CMSG_SPACE(4 * sizeof(int));

PlainStatus SystemError(const std::string& socket_path, const char* call) {
  const int error = errno;
  const bool timeout = error == EAGAIN || error == EWOULDBLOCK || error == EINPROGRESS;
  return {timeout ? kPlainDeadlineExceeded : kPlainUnavailable, "",
          "descriptor socket " + socket_path + ": " + call + ": " +
              (timeout ? "no answer in 10 seconds" : std::strerror(error))};
}

PlainStatus NotOfThisProtocol(const std::string& socket_path, const std::string& what) {
  return {kPlainInternal, "", "descriptor socket " + socket_path + ": " + what};
}

PlainStatus Connect(const std::string& path, OwnedDescriptor* connection) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return {kPlainInvalidArgument, "",
            "descriptor socket '" + path + "': a path has 1 to " +
                std::to_string(sizeof(address.sun_path) - 1) + " bytes"};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  OwnedDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError(path, "socket");
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &kTimeout, sizeof(kTimeout));
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kTimeout, sizeof(kTimeout));
  int result = 0;
  do {
    result = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return SystemError(path, "connect");
  *connection = std::move(fd);
  return {};
}

PlainStatus Send(const std::string& path, int connection, const DescriptorRequest& request, int descriptor) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part = {const_cast<DescriptorRequest*>(&request), sizeof(request)};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  ssize_t sent = 0;
  do {
    sent = sendmsg(connection, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? SystemError(path, "sendmsg") : PlainStatus{};
}

// Takes every descriptor of the message, keeps the first and closes the others.
int TakeDescriptors(msghdr& message, OwnedDescriptor* first) {
  int count = 0;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < n; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      OwnedDescriptor owned(fd);
      if (count++ == 0) *first = std::move(owned);
    }
  }
  return count;
}

PlainStatus Receive(const std::string& path, int connection, DescriptorReply* reply,
                    OwnedDescriptor* descriptor) {
  alignas(cmsghdr) char control[kControlBytes];
  iovec part = {reply, sizeof(*reply)};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t size = 0;
  do {
    size = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0) return SystemError(path, "recvmsg");
  const int descriptors = TakeDescriptors(message, descriptor);
  if (size == 0) return {kPlainUnavailable, "", "descriptor socket " + path + ": the daemon hung up"};
  if (size != sizeof(*reply) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return NotOfThisProtocol(
        path, "an answer of " + std::to_string(size) + " bytes, expected " + std::to_string(sizeof(*reply)));
  }
  if (reply->magic != kDescriptorMagic) return NotOfThisProtocol(path, "an answer of another protocol");
  if (descriptors > 1) {
    return NotOfThisProtocol(path, std::to_string(descriptors) + " descriptors in an answer");
  }
  return {};
}

}  // namespace

OwnedDescriptor::~OwnedDescriptor() {
  if (fd_ >= 0) close(fd_);
}

OwnedDescriptor OpenSelfPidfd() {
  return OwnedDescriptor(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
}

PlainStatus RedeemTicket(const std::string& socket_path, const std::uint8_t* ticket, int descriptor,
                         Redeemed* redeemed) {
  OwnedDescriptor connection;
  if (auto s = Connect(socket_path, &connection); !s.ok()) return s;
  DescriptorRequest request;
  std::memcpy(request.ticket, ticket, kTicketBytes);
  if (auto s = Send(socket_path, connection.get(), request, descriptor); !s.ok()) return s;
  DescriptorReply reply;
  OwnedDescriptor received;
  if (auto s = Receive(socket_path, connection.get(), &reply, &received); !s.ok()) return s;
  if (reply.code != 0) {
    const std::string reason(reply.reason, strnlen(reply.reason, sizeof(reply.reason)));
    return {static_cast<int>(reply.code), reason, "the daemon refuses the ticket: " + reason};
  }
  redeemed->descriptor = std::move(received);
  redeemed->size_bytes = reply.size_bytes;
  return {};
}

}  // namespace kvsummary
