// The descriptor socket: proto/descriptor_socket.h, served by one thread.
//
// Who may use it: the daemon's own user and root; when the socket's mode is wider than its owner's, every
// peer that it lets connect, for then its mode and group are the decision. Others' first request is answered
// with PEER_NOT_ALLOWED.
// A pidfd that comes has to be of the peer itself, as far as this process can number both: one of a process
// that outlives the peer would keep memory for ever, one of a process that does not would free it too early.
// (Across containers there is no number, and the peer is trusted.)
//
// A peer can cost a connection for kDescriptorSilence and no more: there are at most kMaxDescriptorPeers
// (later ones wait in the kernel's queue), a peer that redeems nothing for that long, sends anything but a
// request, or does not take its reply is cut off. Descriptors that come with a bad message are closed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"
#include "server/memory/socket_file.h"

namespace kvsummary {

inline constexpr std::size_t kMaxDescriptorPeers = 256;
inline constexpr std::chrono::seconds kDescriptorSilence{5};

// What a ticket is answered with.
struct DescriptorAnswer {
  Descriptor descriptor;        // sent when it has one
  std::int64_t size_bytes = 0;  // of the memory
};

class DescriptorServer {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  // On the server's thread: must not block. `descriptor` is the one that came with the ticket.
  using Redeem =
      std::function<absl::StatusOr<DescriptorAnswer>(const std::string& ticket, Descriptor descriptor)>;

  struct Options {
    std::string path;
    SocketAccess access;
    Redeem redeem;
    Clock now = std::chrono::steady_clock::now;
    uid_t own_uid = geteuid();
  };

  // Listens, or says why not. The path is locked and a stale socket removed as SocketLock does.
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Start(Options options);
  // Closes every connection; removes the socket.
  ~DescriptorServer();

  const std::string& path() const { return options_.path; }

 private:
  struct Peer {
    Descriptor socket;
    bool allowed = false;
    pid_t pid = 0;  // 0: of another PID namespace
    std::chrono::steady_clock::time_point deadline;
  };
  DescriptorServer(Options options, SocketLock lock, Descriptor listener, Descriptor stop);
  void Run();
  int PollTimeout() const;
  void Accept();
  // False: the connection is over.
  bool Serve(Peer& peer);
  bool IsAllowed(uid_t peer) const;

  const Options options_;
  const SocketLock lock_;
  const Descriptor listener_;
  const Descriptor stop_;  // an eventfd
  bool accept_failed_ = false;
  std::list<Peer> peers_;  // thread_ only
  std::thread thread_;
};

}  // namespace kvsummary
