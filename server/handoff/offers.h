// Offers of this daemon: requests frozen in staging memory until their consumers have them.
//
//   offers.Open({.cache = cache, .part = {.layers = {0, 23}, .committed_tokens = n, .blocks = ids,
//                                         .tail = {{ring_block, n - 1}}}}, done);  // answers the secret
//   auto offer = offers.Bind(secret, transfer);         // the consumer's daemon pulls
//   offers.Acknowledge(secret, transfer);               // the last one frees it
//
// An offer is made of parts (plan.h), which are only added, never changed. It ends when every consumer has
// acknowledged it, when it is cancelled, at its deadline, or with its session; who is reading a part then
// keeps its memory until he lets go. All of it is thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/handoff/arena.h"
#include "server/handoff/plan.h"
#include "server/store/types.h"

namespace kvsummary {

inline constexpr int kMaxOffers = 4096;    // of a daemon
inline constexpr int kMaxConsumers = 256;  // of an offer

// Bytes of an offer, immutable. Keeps them.
struct StagedPart {
  std::int32_t number = 0;
  Part part;
  Arena::Extent extent;
  // Where they lie, addressable by the arena's device.
  char* data() const { return static_cast<char*>(extent.arena()->memory()->data()) + extent.offset(); }
};

// (executor of the arena's device) A chunk's bytes.
absl::Status ReadChunk(const StagedPart& staged, const Chunk& chunk, std::string& bytes);

// What a puller sees of an offer.
class Offer {
 public:
  // Parts from one on, and how it stands.
  struct View {
    std::vector<std::shared_ptr<const StagedPart>> parts;
    bool complete = false;              // no more parts will come
    std::int64_t committed_tokens = 0;  // when complete
    absl::Status ended;                 // not OK: why it has ended; nobody waits for more
  };

  // `device` is where its parts lie.
  Offer(Device& device, std::int32_t layers, std::int32_t block_size, std::vector<GroupSpec> groups)
      : device_(device), layers_(layers), block_size_(block_size), groups_(std::move(groups)) {}

  Device& device() const { return device_; }
  std::int32_t layers() const { return layers_; }
  std::int32_t block_size() const { return block_size_; }
  // Of the namespace whose groups it may have blocks of; none without one.
  const std::vector<GroupSpec>& groups() const { return groups_; }
  View Look(std::size_t from) const;
  // Calls `listener` after every change, on the thread that makes it; it must not call Listen or Forget. Not
  // any more when Forget has returned.
  using Key = std::pair<const void*, std::uint32_t>;  // whoever listens, and his number for it
  void Listen(Key key, std::function<void()> listener);
  void Forget(Key key);

 private:
  friend class Offers;
  void Tell();

  Device& device_;
  const std::int32_t layers_;
  const std::int32_t block_size_;
  const std::vector<GroupSpec> groups_;
  mutable std::mutex mutex_;  // of what View has
  std::vector<std::shared_ptr<const StagedPart>> parts_;
  bool complete_ = false;
  std::int64_t committed_tokens_ = 0;
  absl::Status ended_;
  std::mutex listeners_mutex_;
  std::map<Key, std::function<void()>> listeners_;
};

class Offers {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::int64_t bytes_per_device = std::int64_t{512} << 20;  // of staging; 0: nothing is handed over
    std::chrono::milliseconds lifetime{60'000};               // the default, and the longest
    std::function<Clock::time_point()> now = Clock::now;
  };

  // What ends a request: where its rows are.
  struct Tail {
    std::int64_t ring_block = 0;
    std::optional<std::int64_t> highest_stored = std::nullopt;  // nothing: committed_tokens - 1 + k
  };

  struct Group {
    std::int32_t group = 0;
    std::int64_t first = 0;
    std::vector<std::int64_t> blocks;
  };

  struct PartArgs {
    LayerSpan layers;
    std::int64_t committed_tokens = 0;  // of these layers, so far
    std::int64_t first_block = 0;       // of `blocks`, in the request
    std::vector<std::int64_t> blocks;
    std::vector<Group> groups = {};
    std::optional<Tail> tail = std::nullopt;  // nothing: more parts follow
  };

  struct OpenArgs {
    std::uint64_t session = 0;
    std::shared_ptr<Cache> cache;
    std::shared_ptr<const BoundCache> bound = nullptr;  // of the namespace of part.groups
    std::vector<GroupSpec> group_specs = {};            // of that namespace
    int consumers = 1;
    bool detached = false;
    std::chrono::milliseconds lifetime{0};  // 0: the default
    std::int64_t back_off = kDefaultBackOff;
    PartArgs part;
  };

  struct Opened {
    std::uint64_t number = 0;  // names it in calls of its session
    std::string secret;
    std::chrono::milliseconds lifetime{0};
    std::int64_t staged_bytes = 0;
    std::int64_t committed_tokens = -1;  // when it is complete
    std::chrono::nanoseconds device_time{
        0};  // of the movement into staging memory, as the device measures it
  };

  struct Stats {
    std::int64_t offers = 0, staged_bytes = 0;
    std::int64_t offered = 0, completed = 0, expired = 0, cancelled = 0;  // since the start
  };

  // `devices` must outlive it.
  Offers(const std::vector<std::unique_ptr<Device>>& devices, Options options);
  // No call may come any more, no puller be left.
  ~Offers();

  // Stages a part and answers an offer of it. The cache may change once `done` is called, which is on its
  // device's executor, or before the call returns when it is refused; then nothing is kept. HANDOFF_OFF,
  // HANDOFF_LIMIT, HANDOFF_BUDGET_EXCEEDED, COUNT_OUT_OF_RANGE, LAYERS_OUT_OF_RANGE, POSITION_OUT_OF_RANGE,
  // SIZE_MISMATCH (too few blocks), NULL_BLOCK, BLOCK_OUT_OF_RANGE, RING_OUT_OF_RANGE, NULL_RING_BLOCK,
  // GROUP_OUT_OF_RANGE, QUEUE_FULL, SESSION_ENDED, and what devices fail with.
  void Open(OpenArgs args, absl::AnyInvocable<void(absl::StatusOr<Opened>) &&> done);
  // Adds a part; answers the bytes that are staged of the offer. HANDOFF_NOT_FOUND, HANDOFF_COMPLETE,
  // HANDOFF_INCOMPLETE, and as Open. When a device fails the offer ends.
  void Append(std::uint64_t session, std::uint64_t number, PartArgs part,
              absl::AnyInvocable<void(absl::StatusOr<std::int64_t>) &&> done);
  // Of the cache that it is of. HANDOFF_NOT_FOUND.
  absl::StatusOr<CacheGeometry> GeometryOf(std::uint64_t session, std::uint64_t number) const;
  // Idempotent.
  void Cancel(std::uint64_t session, std::uint64_t number);
  void Cancel(const std::string& secret);

  // The offer, for a consumer. HANDOFF_NOT_FOUND, HANDOFF_EXPIRED, HANDOFF_CANCELLED, HANDOFF_TAKEN.
  absl::StatusOr<std::shared_ptr<Offer>> Bind(const std::string& secret, const std::string& transfer);
  // The consumer has it. Idempotent; refuses as Bind when the offer ended before that, or the consumer is not
  // one of it: what was read of its memory itself may be wrong.
  absl::Status Acknowledge(const std::string& secret, const std::string& transfer);

  // Ends the session's offers that are not detached. Idempotent.
  void EndSession(std::uint64_t session);
  // Ends offers whose deadline is past. (A thread does at every deadline.)
  void Expire();
  Stats stats() const;
  // The device's. For who reads its memory as a whole.
  const Arena* arena(const Device& device) const;

 private:
  struct Entry;
  struct Staging;
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // session, number

  // With mutex_ held.
  static absl::Status PlanPart(const Entry& entry, PartArgs args, Staging& staging);
  absl::Status Start(const std::shared_ptr<Staging>& staging, absl::AnyInvocable<void() &&> work);
  std::shared_ptr<Entry> RemoveLocked(const std::string& secret, const absl::Status& why);
  absl::StatusOr<std::shared_ptr<Entry>> FindLocked(const std::string& secret) const;
  absl::StatusOr<std::shared_ptr<Entry>> FindLocked(std::uint64_t session, std::uint64_t number) const;
  // (executor)
  static absl::Status Stage(Staging& staging);
  absl::StatusOr<std::int64_t> Publish(Staging& staging);

  // Tells the pullers of an offer that was removed. With no lock held.
  static void Tell(Entry& entry, const absl::Status& why);
  void Run();

  const Options options_;
  std::map<const Device*, std::unique_ptr<Arena>> arenas_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::uint64_t next_number_ = 1;
  std::map<std::string, std::shared_ptr<Entry>> entries_;          // by secret
  std::map<Key, std::string> secrets_;                             // of all entries
  std::set<std::pair<Clock::time_point, std::string>> deadlines_;  // of all entries, with their secrets
  struct Ended {
    std::string secret;
    absl::Status why;
    std::map<std::string, bool> transfers;  // as of an entry
  };
  std::deque<Ended> ended_;  // the last ones
  Stats stats_;
  std::thread thread_;
};

}  // namespace kvsummary
