// UCX for hand-offs: its helper process, started anew when it has died, and the landing memory that fetches
// write to. What has come is copied out of there by a thread of this object before anybody looks at it: who
// reaches UCX's port can write to landing memory at any time, also after it was checked. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/handoff/offers.h"
#include "server/memory/memory.h"
#include "server/ucx/ucx_helper.h"

namespace kvsummary {

class UcxTransport {
 public:
  struct Options {
    std::string net_device;  // empty: no UCX
    std::string binary;      // of the helper
  };

  // Starts the helper, or says why it cannot be.
  static absl::StatusOr<std::unique_ptr<UcxTransport>> Start(Options options);

  // Waits for the fetches under way, which fail.
  ~UcxTransport();

  // UCX's version; empty while the helper is dead.
  std::string version();

  // The source's side: ranges of staging memory lent under one token, until it is destroyed. What was lent is
  // kept until nothing is sent of it any more.
  class Loan {
   public:
    ~Loan();
    const std::string& address() const { return address_; }
    std::uint64_t token() const { return token_; }
    std::uint32_t staging() const { return staging_; }
    // Whether the part can be fetched now.
    bool Lend(const std::shared_ptr<const StagedPart>& staged);

   private:
    friend class UcxTransport;
    Loan() = default;
    std::shared_ptr<UcxHelper> helper_;
    std::string address_;
    std::uint64_t token_ = 0;
    std::uint32_t staging_ = 0;
    std::vector<std::shared_ptr<const StagedPart>> parts_;
  };
  // Null where the memory cannot be lent, or the helper is dead.
  std::unique_ptr<Loan> Borrow(const Memory& staging);

  // The target's side: brings a chunk, at most kChunkBytes. `done` gets its bytes, which live on their own,
  // on the thread that has copied them: they are in the cache of its processor.
  using Bytes = std::shared_ptr<const char>;
  using Done = absl::AnyInvocable<void(absl::StatusOr<Bytes>) &&>;
  struct Place {
    std::string peer;
    std::uint64_t token = 0;
    std::uint32_t staging = 0;
    std::int64_t offset = 0;
  };
  void Fetch(const Place& place, std::int64_t bytes, Done done);

 private:
  struct Waiting {
    Place place;
    std::int64_t bytes = 0;
    Done done;
  };
  struct Landed {
    absl::Status status;
    std::int64_t slot = kNoSlot;
    std::int64_t bytes = 0;
    Done done;
  };
  class Buffers;
  static constexpr std::int64_t kNoSlot = -1;

  explicit UcxTransport(Options options);
  absl::Status StartHelper();
  // With mutex_ held, as the next. Null while there is none; one is started meanwhile.
  std::shared_ptr<UcxHelper> LiveHelper();
  // The number that the live helper knows the memory by, which it is given now where it does not have it.
  // Blocks for as long as the helper takes, so mutex_ is not held.
  std::optional<std::uint32_t> Staged(const Memory& staging, std::shared_ptr<UcxHelper>& helper);
  void Next();
  // From any thread, whatever it holds.
  void Land(Landed landed);
  void Run();
  void Deliver(Landed landed);

  const Options options_;
  const std::shared_ptr<Buffers> buffers_;
  std::mutex adding_;  // staging memory; taken before mutex_
  std::mutex mutex_;
  std::shared_ptr<UcxHelper> helper_;  // null: all is over
  bool starting_ = false;
  std::chrono::steady_clock::time_point started_;
  std::map<const Memory*, std::uint32_t> staging_;  // that the helper has
  std::unique_ptr<Memory> landing_memory_;
  std::uint32_t landing_ = 0;
  std::vector<std::int64_t> free_slots_;  // of kChunkBytes; the last that came back is the next to be used
  std::deque<Waiting> waiting_;           // for a slot
  std::condition_variable idle_;
  std::mutex landed_mutex_;  // no other is taken while it is held
  std::condition_variable landed_wake_;
  std::deque<Landed> landed_;
  bool over_ = false;  // nothing lands any more
  std::thread thread_;
};

}  // namespace kvsummary
