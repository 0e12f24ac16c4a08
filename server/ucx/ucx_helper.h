// Fetches staged bytes of other daemons through UCX, and lends them ours.
//
// UCX runs in a process of its own, summaryd-ucx: a host that reaches UCX's port can write to any memory of
// the process behind it (its TCP transport does not check), and UCX ends the process when it meets what it
// does not expect. The helper maps what it is given here and nothing else: staging memory, which peers may
// fetch from, for reading only; landing memory, which fetches write to. UCX neither authenticates nor
// encrypts: whoever reaches the port may change what lies in landing memory at any time, so checksums there
// find damage, not malice, and only a private network should reach it. Tokens, 64 random bits, keep honest
// peers apart.
//
// Thread-safe. Callbacks run on the helper's thread here and must not block; one runs before the call that
// brought it returns, when the call is refused or the process has ended.
//
// The process may die. Then alive() is false for good, every fetch under way ends with UNAVAILABLE (when it
// is certain that nothing is written any more), and the owner may Start another. A process that says nothing
// for more than twice the progress deadline while something is under way is ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/descriptor.h"
#include "server/ucx/protocol.h"
#include "server/ucx/spawn.h"

namespace kvsummary {

class UcxHelper {
 public:
  struct Options {
    std::string binary;      // path of summaryd-ucx
    std::string net_device;  // interface to listen and connect on, as "eth0"; it needs an IPv4 address
    // A source of which no chunk has come for so long is given up. Also how long Revoke waits for sends
    // before it breaks the connections that they are on.
    std::chrono::milliseconds progress_deadline{2000};
    std::chrono::milliseconds start_deadline{10000};
  };

  // A range of a peer's staging memory, and where it goes.
  struct Range {
    std::string peer;           // address() of the peer's helper
    std::uint64_t token = 0;    // that the peer lends the range under
    std::uint32_t staging = 0;  // the peer's number of the memory
    std::int64_t from = 0;      // offset there
    std::int64_t bytes = 0;     // 1 to kMaxUcxFetchBytes
    std::uint32_t landing = 0;  // our number of the memory
    std::int64_t to = 0;        // offset there
  };

  using Done = absl::AnyInvocable<void(absl::Status) &&>;

  // Waits until the helper listens. UNIMPLEMENTED: it was built without UCX. NOT_FOUND: no such binary or
  // interface. UNAVAILABLE: it ended, or said nothing in time.
  static absl::StatusOr<std::unique_ptr<UcxHelper>> Start(const Options& options);
  // Ends the process; everything under way ends with UNAVAILABLE before this returns.
  ~UcxHelper();

  // HOST:PORT, for peers' Fetch.
  const std::string& address() const { return address_; }
  // UCX's, as "1.13.1". Two helpers understand each other for certain only if theirs are the same.
  const std::string& version() const { return version_; }
  bool alive() const;
  pid_t pid() const { return process_.pid; }

  // Gives the process a memory, of at least `bytes`, whose size must not shrink. Answers its number. It stays
  // mapped until the process ends; the descriptor may be closed. Staging memory has to be sealed against
  // writing, else INVALID_ARGUMENT. These two block, for as long as mmap takes: not to be called from a
  // callback.
  absl::StatusOr<std::uint32_t> AddStaging(int fd, std::int64_t bytes);
  absl::StatusOr<std::uint32_t> AddLanding(int fd, std::int64_t bytes);

  // Peers that name `token` may fetch within this range from now on. Any number of ranges for each token.
  absl::Status Lend(std::uint64_t token, std::uint32_t staging, std::int64_t offset, std::int64_t bytes);
  // Takes back all ranges of the token. `done`, once no send from them is under way any more: at once as a
  // rule, and not much later than after the progress deadline, whatever peers do. Does not block.
  void Revoke(std::uint64_t token, absl::AnyInvocable<void() &&> done);

  // `done` once, with OK when the bytes are there. Otherwise nothing writes to the place any more, and:
  // NOT_FOUND: the peer lends nothing under the token. OUT_OF_RANGE: it lends other ranges under it.
  // RESOURCE_EXHAUSTED: it has too many requests of ours. DEADLINE_EXCEEDED: no chunk came for the progress
  // deadline; every other fetch from this peer ends with it. UNAVAILABLE: the peer cannot be reached or broke
  // the connection (likewise), or the process died. INVALID_ARGUMENT: the range is none.
  // Any number at a time: each peer gets eight, the others wait for their turn in the order that they came.
  void Fetch(const Range& range, Done done);

 private:
  struct Unsent {
    UcxCommand command;
    Descriptor descriptor;
  };

  UcxHelper(UcxProcess process, std::chrono::milliseconds silence);
  absl::Status WaitUntilListening(std::chrono::milliseconds deadline);
  absl::StatusOr<std::uint32_t> Add(UcxCommandKind kind, Descriptor descriptor, std::int64_t bytes);
  // Gives the command an id and sends it; `done` gets its answer.
  void Ask(UcxCommand command, Descriptor descriptor, Done done);
  void Send(const UcxCommand& command, Descriptor descriptor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();
  // False: the connection is over.
  bool ReadEvents();
  void SendUnsent();
  // Until the silence is too long; negative: without end.
  int PollTimeout() const;
  // Ends the process, if it has not ended by itself, and says how it ended.
  std::string Bury();

  const UcxProcess process_;
  const std::chrono::milliseconds silence_;
  const Descriptor wake_;  // an eventfd: there is something unsent
  std::string address_;
  std::string version_;

  mutable absl::Mutex mu_;
  bool alive_ ABSL_GUARDED_BY(mu_) = true;  // the process is not reaped
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<std::uint64_t, Done> pending_ ABSL_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point heard_ ABSL_GUARDED_BY(mu_);  // or since when something is pending
  std::deque<Unsent> unsent_ ABSL_GUARDED_BY(mu_);                // what the socket had no room for, in order
  std::vector<std::int64_t> staging_bytes_ ABSL_GUARDED_BY(mu_);  // of each memory
  std::vector<std::int64_t> landing_bytes_ ABSL_GUARDED_BY(mu_);
  absl::Mutex adding_ ABSL_ACQUIRED_BEFORE(mu_);  // one at a time: memories are numbered as they come

  std::string end_;  // of the process; in Start, then thread_ only
  std::thread thread_;
};

}  // namespace kvsummary
