// What the services share.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "server/cache/cache.h"
#include "server/handoff/bounce.h"
#include "server/handoff/offers.h"
#include "server/handoff/peers.h"
#include "server/ops/stats.h"
#include "server/session/session.h"
#include "server/session/tickets.h"
#include "server/session/waits.h"
#include "server/store/page_store.h"

namespace kvsummary {

// Turns new calls away while the daemon ends, and waits for those under way. Thread-safe.
class Drain {
 public:
  // A call that works on caches, for its whole life. Admitted, or DRAINING from Begin on.
  class Call {
   public:
    explicit Call(Drain& drain) : drain_(drain), admitted_(drain.Enter()) {}
    ~Call() {
      if (admitted_.ok()) drain_.Leave();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    const absl::Status& admitted() const { return admitted_; }

   private:
    Drain& drain_;
    const absl::Status admitted_;
  };

  // From now on no call is admitted, and every listener is told.
  void Begin();
  // Returns when no admitted call is left, or at the deadline.
  void Await(std::chrono::system_clock::time_point deadline);

  // Calls `listener` at Begin, at once when that has been; not any more once Forget has returned.
  void Listen(const void* key, std::function<void()> listener);
  void Forget(const void* key);

 private:
  absl::Status Enter();
  void Leave();

  std::mutex mutex_;
  std::condition_variable idle_;
  bool draining_ = false;
  std::int64_t calls_ = 0;
  std::map<const void*, std::function<void()>> listeners_;
};

// The streams that sessions live by. Thread-safe.
class SessionStreams {
 public:
  // Called with the lock held: must call nothing of this class.
  class Stream {
   public:
    virtual ~Stream() = default;
    virtual void CacheLost(const std::string& name, std::uint64_t generation) = 0;
    virtual void Draining() = 0;
    // The daemon ends the stream, and with it the session.
    virtual void End() = 0;
  };

  // Tells the stream at once what it has missed. It is not called any more once Remove has returned.
  void Add(std::uint64_t session, Stream* stream);
  void Remove(std::uint64_t session);

  void TellLost(std::uint64_t session, const std::string& name, std::uint64_t generation);
  void TellDraining();
  void EndAll();

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, Stream*> streams_;
  bool draining_ = false;
  bool ending_ = false;
};

class UpdateQueues;    // server/rpc/update_queue.h
class PrefixSessions;  // server/rpc/prefix_sessions.h
class PullLinks;       // server/rpc/pull_links.h
class UcxTransport;    // server/rpc/ucx_transport.h

// Who this daemon is for others that hand-offs bring here, and whom it may pull from.
struct HandoffIdentity {
  std::string instance;  // of this life: random
  std::string address;   // where others reach it; empty: not known
  Peers peers;
  bool shares_memory = true;  // with daemons of this host that pull
  // How long one that pulls may take for a message before it counts as gone.
  std::chrono::milliseconds longest_write{10'000};
  // The first bytes of the instance, as a number.
  std::uint64_t generation() const;
};

struct ServiceContext {
  CacheManager& caches;
  Stats& stats;
  Drain& drain;
  SessionManager& sessions;
  Tickets& tickets;
  SessionStreams& streams;
  const std::string& descriptor_socket;  // its path; empty: there is none
  Waits& waits;
  UpdateQueues& queues;
  PageStore& store;
  PrefixSessions& prefixes;
  Offers& offers;
  Bounces& bounces;
  PullLinks& links;
  const HandoffIdentity& handoff;
  UcxTransport* ucx;  // null: off
};

}  // namespace kvsummary
