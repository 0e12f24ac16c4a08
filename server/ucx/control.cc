#include "server/ucx/control.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace kvsummary {

std::optional<UcxControl::Received> UcxControl::Receive() {
  Received received;
  iovec bytes{&received.command, sizeof(received.command)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    got = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return std::nullopt;
  if (got != sizeof(received.command)) {
    closed_ = true;
    return std::nullopt;
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    received.descriptor = Descriptor(fd);
  }
  return received;
}

void UcxControl::Refuse(const absl::Status& why) {
  Send(UcxEventKind::kRefused, 0, why.code(), std::string(why.message()));
}

void UcxControl::Answer(std::uint64_t id, const absl::Status& status) {
  Send(UcxEventKind::kDone, id, status.code(), std::string(status.message()));
}

void UcxControl::SendUnsent() {
  while (!unsent_.empty() && SendOne(unsent_.front())) unsent_.pop_front();
}

void UcxControl::Send(UcxEventKind kind, std::uint64_t id, absl::StatusCode code, const std::string& text) {
  UcxEvent event{};
  event.kind = kind;
  event.id = id;
  event.code = static_cast<std::int32_t>(code);
  text.copy(event.text, sizeof(event.text) - 1);
  if (!unsent_.empty() || !SendOne(event)) unsent_.push_back(event);
}

bool UcxControl::SendOne(const UcxEvent& event) {
  while (send(socket_.get(), &event, sizeof(event), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) return false;
    closed_ = true;
    break;
  }
  return true;
}

}  // namespace kvsummary
