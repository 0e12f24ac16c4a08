#include "server/memory/descriptor_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/descriptor_socket.h"
#include "server/error.h"
#include "server/memory/descriptor_message.h"
#include "server/memory/pidfd.h"

namespace kvsummary {
namespace {

constexpr int kBacklog = 128;
// After an accept that failed for want of descriptors or memory: the time until the next one.
constexpr int kAcceptRetryMs = 100;

absl::Status Failed(const std::string& path, const char* call) {
  return absl::UnavailableError(
      absl::StrFormat("cannot serve descriptors on %s: %s: %s", path, call, std::strerror(errno)));
}

bool Reply(int socket, const absl::StatusOr<DescriptorAnswer>& answer) {
  DescriptorReply reply;
  int descriptor = -1;
  if (answer.ok()) {
    reply.size_bytes = static_cast<std::uint64_t>(answer->size_bytes);
    descriptor = answer->descriptor.get();
  } else {
    reply.code = static_cast<std::uint32_t>(answer.status().code());
    const std::string reason = RefusalReason(answer.status());
    reason.copy(reply.reason, sizeof(reply.reason) - 1);
  }
  return SendMessage(socket, &reply, sizeof(reply), descriptor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(Options options) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options.path.empty() || options.path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the descriptor socket's path \"%s\" has %d bytes, not 1 to %d", options.path,
                        options.path.size(), sizeof(address.sun_path) - 1));
  }
  options.path.copy(address.sun_path, options.path.size());
  auto lock = SocketLock::Take(options.path);
  if (!lock.ok()) return lock.status();
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener) return Failed(options.path, "socket");
  {
    PrivateUmask umask;
    if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return Failed(options.path, "bind");
    }
  }
  // Nobody can connect before listen: the socket has its mode by then.
  if (auto s = ApplySocketAccess(options.path, options.access); !s.ok()) return s;
  if (listen(listener.get(), kBacklog) != 0) return Failed(options.path, "listen");
  Descriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop) return Failed(options.path, "eventfd");
  return std::unique_ptr<DescriptorServer>(
      new DescriptorServer(std::move(options), *std::move(lock), std::move(listener), std::move(stop)));
}

DescriptorServer::DescriptorServer(Options options, SocketLock lock, Descriptor listener, Descriptor stop)
    : options_(std::move(options)),
      lock_(std::move(lock)),
      listener_(std::move(listener)),
      stop_(std::move(stop)),
      thread_([this] { Run(); }) {}

DescriptorServer::~DescriptorServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
  unlink(options_.path.c_str());
}

void DescriptorServer::Run() {
  pthread_setname_np(pthread_self(), "descriptors");
  std::vector<pollfd> polled;
  while (true) {
    polled.clear();
    polled.push_back({stop_.get(), POLLIN, 0});
    const bool accepting = peers_.size() < kMaxDescriptorPeers && !accept_failed_;
    polled.push_back({accepting ? listener_.get() : -1, POLLIN, 0});
    for (const Peer& peer : peers_) polled.push_back({peer.socket.get(), POLLIN, 0});
    const int timeout = PollTimeout();
    accept_failed_ = false;
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    const auto now = options_.now();
    auto entry = polled.begin() + 2;
    for (auto peer = peers_.begin(); peer != peers_.end(); ++entry) {
      const bool goes_on = (entry->revents == 0 || Serve(*peer)) && now < peer->deadline;
      peer = goes_on ? std::next(peer) : peers_.erase(peer);
    }
    if (polled[1].revents != 0) Accept();
  }
}

int DescriptorServer::PollTimeout() const {
  if (accept_failed_) return kAcceptRetryMs;
  if (peers_.empty()) return -1;
  const auto first = std::min_element(peers_.begin(), peers_.end(),
                                      [](const Peer& a, const Peer& b) { return a.deadline < b.deadline; });
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(first->deadline - options_.now()).count();
  return static_cast<int>(std::max<std::int64_t>(left, 0));
}

void DescriptorServer::Accept() {
  Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    accept_failed_ = errno != EAGAIN && errno != EINTR && errno != ECONNABORTED;
    return;
  }
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return;
  peers_.push_back({std::move(socket), IsAllowed(peer.uid), peer.pid, options_.now() + kDescriptorSilence});
}

bool DescriptorServer::IsAllowed(uid_t peer) const {
  return options_.access.mode != kPrivateSocketMode || peer == options_.own_uid || peer == 0;
}

bool DescriptorServer::Serve(Peer& peer) {
  DescriptorRequest request;
  std::vector<Descriptor> descriptors;
  switch (ReceiveMessage(peer.socket.get(), &request, sizeof(request), descriptors)) {
    case ReceiveResult::kNothing:
      return true;
    case ReceiveResult::kClosed:
    case ReceiveResult::kBad:
      return false;
    case ReceiveResult::kMessage:
      break;
  }
  if (request.magic != kDescriptorMagic || request.reserved != 0) return false;
  if (!peer.allowed) {
    Reply(peer.socket.get(), Refuse(Reason::PEER_NOT_ALLOWED, "", "the daemon runs under another user"));
    return false;
  }
  if (descriptors.size() != 1) {
    return Reply(peer.socket.get(),
                 Refuse(Reason::DESCRIPTOR_MISSING, "", "a request brings exactly one descriptor"));
  }
  if (const pid_t pid = PidOf(descriptors.front().get()).value_or(0);
      pid > 0 && peer.pid > 0 && pid != peer.pid) {
    return Reply(peer.socket.get(),
                 Refuse(Reason::DESCRIPTOR_MISSING, "", "the pidfd is of another process than the peer"));
  }
  const std::string ticket(reinterpret_cast<const char*>(request.ticket), sizeof(request.ticket));
  const auto answer = options_.redeem(ticket, std::move(descriptors.front()));
  if (answer.ok()) peer.deadline = options_.now() + kDescriptorSilence;
  return Reply(peer.socket.get(), answer);
}

}  // namespace kvsummary
