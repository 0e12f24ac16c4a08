// The puller's end of HandoffService.Pull: one stream to each daemon that something is pulled from, shared by
// all that is.
//
// A stream that breaks is opened anew, and what is being pulled goes on with the chunks that have not come.
// It fails when streams have broken for Options::give_up without bringing anything of it, or standing: for
// that long, or until the source has answered whether it is there. A stream whose source says nothing for
// Options::silence, though it is asked, counts as broken. Chunks that come damaged are asked for again.
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "client/tls.h"
#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/peers.h"
#include "server/ops/stats.h"

namespace grpc {
class ChannelCredentials;
}

namespace kvsummary {

class PullLink;
class UcxTransport;  // server/rpc/ucx_transport.h

class PullLinks {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::chrono::milliseconds give_up{10'000};
    std::chrono::milliseconds silence{5'000};            // a link that takes longer for a chunk is none
    std::int64_t credit_bytes = std::int64_t{32} << 20;  // of chunks under way, of a stream
    bool same_host = true;                               // whether memory may be mapped
    UcxTransport* ucx = nullptr;                         // null: none; it must outlive the links
    Peers peers = {};                                    // whose UCX helpers may be fetched from
    TlsFiles tls = {};                                   // to daemons over TCP
  };

  // What is being pulled, until it is destroyed (or the acceptance is over: then it does nothing more).
  class Pulling {
   public:
    ~Pulling();
    Pulling(const Pulling&) = delete;
    Pulling& operator=(const Pulling&) = delete;
    v1::HandoffTransport transport() const { return transport_; }
    int reconnects() const { return reconnects_; }
    std::int64_t damaged_chunks() const { return damaged_; }
    // Whether the bytes that have all come by now are right, whatever the source says of the offer then. If
    // not, its memory has been read itself, for longer than it is lent: it may have been used for something
    // else.
    bool certain() const { return Clock::now() < uncertain_from_.load(); }
    // Says that the consumer has the offer, and ends; `done` gets the source's answer, or PEER_UNREACHABLE.
    // Once.
    void Acknowledge(std::function<void(absl::Status)> done);

   private:
    friend class IncomingPull;
    friend class PullLink;
    Pulling() = default;
    std::shared_ptr<PullLink> link_;
    std::uint64_t key_ = 0;
    std::atomic<v1::HandoffTransport> transport_ = v1::HANDOFF_TRANSPORT_UNSPECIFIED;
    std::atomic<Clock::time_point> uncertain_from_ = Clock::time_point::max();
    std::atomic<int> reconnects_ = 0;
    std::atomic<std::int64_t> damaged_ = 0;
  };

  PullLinks(const Options& options, Stats& stats);
  ~PullLinks() { Close(); }
  // Ends every stream, and waits for it. What is being pulled fails with PEER_UNREACHABLE, as will what
  // comes.
  void Close();

  // Pulls an offer into the acceptance, which fails with PEER_UNREACHABLE, CHUNK_DAMAGED or what the source
  // says. HANDOFF_LIMIT when something is being pulled from too many daemons.
  absl::StatusOr<std::shared_ptr<Pulling>> Pull(const std::string& address, const std::string& secret,
                                                const std::string& transfer,
                                                const std::shared_ptr<Acceptance>& acceptance);

 private:
  absl::StatusOr<std::shared_ptr<PullLink>> Find(const std::string& address);

  const Options options_;
  Stats& stats_;
  const std::shared_ptr<grpc::ChannelCredentials> tcp_;
  std::mutex mutex_;
  bool closed_ = false;
  std::map<std::string, std::shared_ptr<PullLink>> links_;  // by address
  std::vector<std::shared_ptr<PullLink>> closing_;          // that made room for others
};

}  // namespace kvsummary
