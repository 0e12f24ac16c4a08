// A daemon's end of the descriptor socket for tests: on a socket of its own, answers as it is told.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/descriptor_client.h"
#include "proto/descriptor_socket.h"

namespace kvsummary {

// What is sent for one request: the first `bytes` of the reply, with the descriptors. 0 bytes: hangs up.
struct FakeAnswer {
  DescriptorReply reply;
  std::size_t bytes = sizeof(DescriptorReply);
  std::vector<int> descriptors = {};
};

// A memfd of `bytes`, sealed as the daemon's are.
inline OwnedDescriptor MakeMemfd(std::int64_t bytes) {
  OwnedDescriptor fd(memfd_create("kvs-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (ftruncate(fd.get(), bytes) != 0) std::abort();
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) std::abort();
  return fd;
}

class FakeDescriptorSocket {
 public:
  // Called on the socket's thread; `descriptor` is what the client sent, invalid when it sent none.
  using Handler = std::function<FakeAnswer(const DescriptorRequest&, OwnedDescriptor descriptor)>;

  explicit FakeDescriptorSocket(Handler handler) : handler_(std::move(handler)) {
    char folder[] = "/tmp/kvs-XXXXXX";
    if (mkdtemp(folder) == nullptr) std::abort();
    folder_ = folder;
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path().c_str(), sizeof(address.sun_path) - 1);
    listener_ = OwnedDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) std::abort();
    if (listen(listener_.get(), 8) != 0) std::abort();
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeDescriptorSocket() {
    shutdown(listener_.get(), SHUT_RDWR);  // ends accept
    thread_.join();
    unlink(path().c_str());
    rmdir(folder_.c_str());
  }

  std::string path() const { return folder_ + "/fd"; }

 private:
  void Serve() {
    for (;;) {
      const OwnedDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!connection.valid()) return;
      while (ServeOne(connection.get())) {
      }
    }
  }

  bool ServeOne(int connection) {
    DescriptorRequest request;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec part = {&request, sizeof(request)};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof(request)) return false;
    int fd = -1;
    if (const cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr) std::memcpy(&fd, CMSG_DATA(h), sizeof(fd));
    const FakeAnswer answer = handler_(request, OwnedDescriptor(fd));
    return answer.bytes > 0 && Send(connection, answer);
  }

  static bool Send(int connection, const FakeAnswer& answer) {
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    iovec part = {const_cast<DescriptorReply*>(&answer.reply), answer.bytes};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const std::size_t bytes = answer.descriptors.size() * sizeof(int);
    if (bytes > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(bytes);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(bytes);
      std::memcpy(CMSG_DATA(header), answer.descriptors.data(), bytes);
    }
    return sendmsg(connection, &message, MSG_NOSIGNAL) >= 0;
  }

  const Handler handler_;
  std::string folder_;
  OwnedDescriptor listener_;
  std::thread thread_;
};

}  // namespace kvsummary
