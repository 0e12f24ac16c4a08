// All that is pulled from one other daemon: over one stream, which is opened anew when it breaks for as long
// as there is something to pull. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "server/handoff/acceptance.h"
#include "server/ops/stats.h"
#include "server/rpc/peer_memory.h"
#include "server/rpc/pull_links.h"

namespace kvsummary {

class IncomingPull;
class PullStream;

class PullLink : public std::enable_shared_from_this<PullLink> {
 public:
  // `tcp`: where the address is none of a Unix socket.
  PullLink(std::string address, const PullLinks::Options& options,
           const std::shared_ptr<grpc::ChannelCredentials>& tcp, Stats& stats);

  // Null: it is closed.
  std::shared_ptr<PullLinks::Pulling> Pull(const std::string& secret, const std::string& transfer,
                                           std::shared_ptr<Acceptance> acceptance);
  // Ends the stream, unless something is being pulled; whether it does.
  bool CloseIfIdle();
  // Whether nothing of it is under way.
  bool closed() const;
  // Ends the stream and what is being pulled, and returns when nothing of the stream is left.
  void Close();

  // For what is being pulled.
  const PullLinks::Options& options() const { return options_; }
  Stats& stats() { return stats_; }
  absl::Status Unreachable(std::string_view why) const;
  // Of Pulling: it wants no more.
  void End(std::uint64_t key);
  // Nor does it then, and has it all. On the stream, or in a call of its own when that has broken.
  void Acknowledge(std::uint64_t key, std::function<void(absl::Status)> done);
  // Begins a pull again, over the stream alone: the way that it took has failed, and is not taken for a
  // while.
  void FallBack(std::uint32_t number, v1::HandoffTransport failed, const std::string& why);
  // Sends a request, if its pull is still one of the stream's.
  void SendOf(std::uint32_t number, v1::PullRequest request);
  // Of a pull's chunks that came on a stream: lets the source send as many bytes more.
  void GiveCredit(std::uint64_t stream, std::uint32_t pull, std::int64_t bytes);

  // For streams. A message; on the stream's thread.
  void Take(PullStream* stream, std::shared_ptr<v1::PullResponse> message);
  // It cannot be used any more.
  void Broken(PullStream* stream);
  // The number-th is over, and nothing of it is left. `heard`: something had come.
  void Ended(std::uint64_t number, const grpc::Status& status, bool heard);

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    std::string secret;
    std::string transfer;
    std::shared_ptr<Acceptance> acceptance;
    std::weak_ptr<PullLinks::Pulling> pulling;
    std::uint32_t number = 0;  // in the present stream; 0: none
    bool same_host = true;     // what may be tried
    bool ucx = true;
    Clock::time_point went_on;  // last: it has brought something, or a stream has stood
  };
  // A pull of the present stream.
  struct Numbered {
    std::uint64_t key = 0;
    std::shared_ptr<IncomingPull> incoming;
  };

  // What has been acknowledged on the stream, and is not answered yet.
  struct Acknowledged {
    std::string secret;
    std::string transfer;
    std::function<void(absl::Status)> done;
    Clock::time_point until;  // then it is said in a call, though the source says other things
  };

  void CallAcknowledge(Acknowledged acknowledged);
  // Looks now and then, while something is awaited, whether the source says something.
  void Watch();
  // UCX's version, or nothing. May wait for its helper: without the lock.
  std::string UcxVersion() const;
  void Reopen();
  // With mutex_ held.
  void OpenLocked(const std::string& ucx_version);
  void BeginLocked(std::uint64_t key, Entry& entry);
  void ReopenLocked();
  void WatchLocked();
  void LookLocked();

  const std::string address_;
  const PullLinks::Options options_;
  Stats& stats_;
  const std::string boot_id_;
  const std::unique_ptr<v1::HandoffService::Stub> stub_;
  PeerMemory memory_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  bool closed_ = false;
  bool waiting_ = false;  // for the time to open a stream again
  bool watching_ = false;
  int streams_ = 0;                       // that are not done, or about to be opened
  std::map<std::uint64_t, Entry> pulls_;  // by key
  std::uint64_t next_key_ = 1;
  std::uint32_t next_number_ = 1;
  Clock::time_point no_same_host_until_;
  Clock::time_point no_ucx_until_;
  std::chrono::milliseconds delay_;

  // The present stream.
  PullStream* stream_ = nullptr;  // that can be used
  std::uint64_t opened_ = 0;      // its number
  Clock::time_point opened_at_;
  Clock::time_point stream_heard_;             // it, last
  bool taking_ = false;                        // a message of it is being taken: what follows has to wait
  bool probed_ = false;                        // since then
  bool answered_ = false;                      // it has been probed, and has answered
  bool silenced_ = false;                      // it ends because it has said nothing
  bool overdrawn_ = false;                     // or has sent more than it had credit for
  std::map<std::uint32_t, Numbered> numbers_;  // its pulls, by number
  std::map<std::uint32_t, Acknowledged> acknowledged_;  // by number
  std::map<std::uint32_t, std::int64_t> owed_;          // credit, by number; 0: of none of its pulls
  std::int64_t owed_bytes_ = 0;                         // all of it
  std::int64_t held_bytes_ = 0;                         // of chunks whose credit the source does not have
};

}  // namespace kvsummary
