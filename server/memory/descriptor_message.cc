#include "server/memory/descriptor_message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvsummary {
namespace {

constexpr std::size_t kMaxReceived = 8;  // more are cut off by the kernel, which closes them

}  // namespace

ReceiveResult ReceiveMessage(int socket, void* data, std::size_t bytes,
                             std::vector<Descriptor>& descriptors) {
  char excess = 0;
  iovec parts[] = {{data, bytes}, {&excess, 1}};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxReceived * sizeof(int))];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = std::size(parts);
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = 0;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return errno == EAGAIN ? ReceiveResult::kNothing : ReceiveResult::kClosed;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      descriptors.emplace_back(fd);
    }
  }
  if (received == 0) return ReceiveResult::kClosed;
  const bool whole =
      static_cast<std::size_t>(received) == bytes && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  return whole ? ReceiveResult::kMessage : ReceiveResult::kBad;
}

bool SendMessage(int socket, const void* data, std::size_t bytes, int descriptor) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes);
}

}  // namespace kvsummary
