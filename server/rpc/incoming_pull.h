// What comes of one offer over one stream: each message of the source's, and what it does to the acceptance.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/acceptance.h"
#include "server/rpc/peer_memory.h"
#include "server/rpc/pull_links.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {

// A message of a stream. When nobody needs it any more (a chunk: when it has been written to the cache), the
// credit that it took is given back.
class HeldMessage {
 public:
  HeldMessage(std::shared_ptr<PullLink> link, std::uint64_t stream, std::shared_ptr<v1::PullResponse> message)
      : link_(std::move(link)), stream_(stream), message_(std::move(message)) {}
  ~HeldMessage();
  HeldMessage(const HeldMessage&) = delete;
  HeldMessage& operator=(const HeldMessage&) = delete;
  const v1::PullResponse& operator*() const { return *message_; }
  const v1::PullResponse* operator->() const { return message_.get(); }
  // What it takes, in bytes; the source's word, within bounds.
  std::int64_t credit() const;

  UcxTransport::Bytes fetched = nullptr;  // a chunk's bytes, where the message has none

 private:
  const std::shared_ptr<PullLink> link_;
  const std::uint64_t stream_;  // that it came on
  const std::shared_ptr<v1::PullResponse> message_;
};

class IncomingPull : public std::enable_shared_from_this<IncomingPull> {
 public:
  // Ways that the source may choose, besides the stream.
  struct Ways {
    bool same_host = false;
    bool ucx = false;
  };

  // `number` is the pull's in its stream. `memory` is the link's.
  IncomingPull(std::shared_ptr<PullLink> link, PeerMemory& memory, std::uint32_t number, Ways ways,
               std::shared_ptr<Acceptance> acceptance, std::weak_ptr<PullLinks::Pulling> pulling)
      : link_(std::move(link)),
        memory_(memory),
        number_(number),
        ways_(ways),
        acceptance_(std::move(acceptance)),
        pulling_(std::move(pulling)) {}

  // What the source is to be asked.
  v1::PullRequest Begin(const std::string& secret, const std::string& transfer) const;
  // A message of the source's. On the stream's thread alone.
  void Take(const std::shared_ptr<HeldMessage>& message);

  // Whether anything has come that had not come before. Any thread.
  bool has_brought() const { return brought_; }

 private:
  // Whether what comes behind it is to be taken.
  bool TakeAccepted(const v1::PullAccepted& accepted, PullLinks::Pulling& pulling);
  bool TakePart(const v1::PullPart& part);
  void TakeChunk(const std::shared_ptr<HeldMessage>& message, PullLinks::Pulling& pulling);
  void TakeFailed(const v1::PullFailed& failed);
  // Writes a chunk's bytes, which `message` keeps, or asks for them again.
  void CheckChunk(const std::shared_ptr<HeldMessage>& message, std::string_view data,
                  PullLinks::Pulling& pulling);
  // These two end it, and answer false.
  bool Malformed(std::string_view field, std::string_view what);
  bool FallBack(v1::HandoffTransport failed, const std::string& why);

  const std::shared_ptr<PullLink> link_;
  PeerMemory& memory_;
  const std::uint32_t number_;
  const Ways ways_;
  const std::shared_ptr<Acceptance> acceptance_;
  const std::weak_ptr<PullLinks::Pulling> pulling_;
  const PullLinks::Clock::time_point begun_ = PullLinks::Clock::now();
  std::atomic<bool> brought_ = false;
  // Where the bytes are, as the source has said; neither: in the stream.
  std::shared_ptr<const PeerMemory::View> view_;
  UcxTransport::Place ucx_;                         // its peer is empty where it is not UCX
  std::map<std::int32_t, std::int64_t> offsets_{};  // UCX: of parts
  std::mutex mutex_;
  std::set<std::pair<std::int32_t, std::int64_t>> fetching_;  // UCX: chunks
};

}  // namespace kvsummary
