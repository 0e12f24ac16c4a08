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
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/handoff/addition.h"
#include "server/handoff/arena.h"
#include "server/handoff/offer.h"
#include "server/store/types.h"

namespace kvsummary {

inline constexpr int kMaxOffers = 4096;    // of a daemon
inline constexpr int kMaxConsumers = 256;  // of an offer

class Offers {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::int64_t bytes_per_device = std::int64_t{512} << 20;  // of staging; 0: nothing is handed over
    std::chrono::milliseconds lifetime{60'000};               // the default, and the longest
    std::function<Clock::time_point()> now = Clock::now;
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
    Addition part;
  };

  struct Opened {
    std::uint64_t number = 0;  // names it in calls of its session
    std::string secret;
    std::chrono::milliseconds lifetime{0};
    std::int64_t staged_bytes = 0;
    std::int64_t committed_tokens = -1;  // when it is complete
    // Of the movement into staging memory, as the device measures it.
    std::chrono::nanoseconds device_time{0};
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
  void Append(std::uint64_t session, std::uint64_t number, Addition part,
              absl::AnyInvocable<void(absl::StatusOr<std::int64_t>) &&> done);
  // Of the cache that it is of. HANDOFF_NOT_FOUND.
  absl::StatusOr<CacheGeometry> GeometryOf(std::uint64_t session, std::uint64_t number) const;
  // Idempotent.
  void Cancel(std::uint64_t session, std::uint64_t number);
  void Cancel(const std::string& secret);

  // The offer, for a consumer. HANDOFF_NOT_FOUND, HANDOFF_EXPIRED, HANDOFF_CANCELLED, HANDOFF_TAKEN.
  absl::StatusOr<std::shared_ptr<Offer>> Bind(const std::string& secret, const std::string& transfer);
  // The consumer has it. Refuses as Bind when the offer ended before that, or the consumer is not one of it:
  // what was read of its memory itself may be wrong. Idempotent for a consumer who has bound it once; if he
  // has more often, what repeats after the offer's end may be another reader than the one it waited for, and
  // is refused.
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
  struct Transfer {
    int binds = 0;
    bool acknowledged = false;
  };
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // session, number

  // With mutex_ held.
  static absl::Status Plan(const Entry& entry, Addition addition, Staging& staging);
  absl::Status Start(const std::shared_ptr<Staging>& staging, absl::AnyInvocable<void() &&> work);
  std::shared_ptr<Entry> RemoveLocked(const std::string& secret, const absl::Status& why);
  absl::StatusOr<std::shared_ptr<Entry>> FindLocked(const std::string& secret) const;
  absl::StatusOr<std::shared_ptr<Entry>> FindLocked(std::uint64_t session, std::uint64_t number) const;
  // (executor)
  static absl::Status Stage(Staging& staging);
  absl::StatusOr<std::int64_t> Publish(Staging& staging);

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
    std::map<std::string, Transfer> transfers;  // as of an entry
  };
  std::deque<Ended> ended_;  // the last ones
  Stats stats_;
  std::thread thread_;
};

}  // namespace kvsummary
