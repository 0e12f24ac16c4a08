// The store of immutable pages by hash, so that an engine starts from the summaries of any prefix that any
// engine of this host has published.
//
//   auto store = PageStore::Create(devices, {.host_bytes = 64LL << 30});
//   auto name_space = (*store)->Declare(session, spec);
//   auto cache = (*store)->Bind(session, *name_space, {.device = ..., .groups = ...});
//   (*store)->Publish({.session = session, .name_space = *name_space, .cache = *cache, ...}, done);
//   auto hit = (*store)->Lookup({.session = session, .name_space = *name_space, .hashes = packed});
//   (*store)->Load({.session = session, .lease = hit->lease, .cache = *cache, .groups = ...}, done);
//
// Pages. A page is copied when it is published, becomes visible when all its bytes are there, and never
// changes from then on; it goes when it is evicted. A publish that fails, or whose session ends before it is
// done, leaves nothing. Hashes are compared in full, and a hit follows its prefix: a hash that was published
// at another index or behind another hash does not match.
//
// Tiers. Pages published from a device's cache go to that device's upper tier, if it has one, and otherwise
// to the host tier. A page is in one tier at a time: the upper tier evicts to the host tier (with a checksum,
// taken when a page first gets there), the host tier drops, a load brings a page of the host tier up again,
// after its checksum has been compared. In a FULL group the tail of a prefix goes before its head. What a
// lease pins, and what is being copied, is never evicted. Every tier: pinned + unpinned + free = capacity.
//
// Leases. A hit comes with a lease on its pages. It ends when it is released, at its deadline, or with its
// session; a load that has begun keeps its pages until it ends, whatever becomes of the lease.
//
// Calls. All of them may be called from any thread; none waits for a copy. `done` is called once, on a thread
// of the store's or a device's (or before the call returns, when the call is refused); no lock is held then,
// and it must not block. Refusals carry the field of the arguments at fault, as "hashes" or
// "groups[1].block_ids[3]", and have changed nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/store/types.h"

namespace kvsummary {

class PageStore {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Policy { kLru, kS3Fifo };

  struct Options {
    std::int64_t host_bytes = 0;    // of the host tier, taken at once; 0: none
    std::int64_t device_bytes = 0;  // of each CUDA device's upper tier (without one: of the host's), taken at
                                    // its first publish or load; 0: none
    Policy policy = Policy::kLru;
    std::int64_t namespace_quota_bytes = 0;  // over all tiers; 0: none
    std::chrono::milliseconds max_lease{60'000};
    std::uint64_t first_sequence = 1;  // of events: above all of an earlier life of the daemon
    std::size_t event_log_bytes = std::size_t{1} << 20;  // of a namespace
    // An upper tier above a host tier is emptied in the background from `high` to `low`, shares of its
    // capacity: so that a publish seldom waits for what it displaces.
    double high_watermark = 0.98;
    double low_watermark = 0.97;
    std::function<Clock::time_point()> now = Clock::now;  // for leases
  };

  // `devices` as the CacheManager has them; they must outlive the store. OUT_OF_MEMORY or
  // MEMORY_BUDGET_EXCEEDED when the host has no room for the host tier, COUNT_OUT_OF_RANGE for a tier beyond
  // 512 GiB.
  static absl::StatusOr<std::unique_ptr<PageStore>> Create(
      const std::vector<std::unique_ptr<Device>>& devices, const Options& options);
  // Waits for what is under way. No call may come any more.
  ~PageStore();

  // The namespace of this key, made if it does not exist, for the session to use until it ends. Answers the
  // same id for the same key and groups. NAMESPACE_DIFFERS when the key exists with other groups or width,
  // NAMESPACE_LIMIT, SESSION_LIMIT when the session has too many, NAME_INVALID, BLOCK_SIZE_INVALID,
  // COUNT_OUT_OF_RANGE, HASH_WIDTH_INVALID, GROUP_INVALID.
  // A namespace that has neither pages nor sessions is forgotten; where there are too many, that which has
  // had no session for the longest time loses its pages.
  absl::StatusOr<NamespaceId> Declare(std::uint64_t session, const NamespaceSpec& spec);

  // Checks a cache's views against the namespace: VIEW_MISMATCH (views of another sum of bytes, too many,
  // negative, overlapping blocks, or not multiples of 16 for CUDA), BLOCK_SIZE_INVALID, GROUP_OUT_OF_RANGE,
  // DEVICE_NOT_FOUND. That the views lie inside their memory is the caller's to check.
  // Fields are of groups[i].views[j]. NAMESPACE_NOT_FOUND, as all calls that name one, when it is not one
  // that the session has declared.
  absl::StatusOr<std::shared_ptr<const BoundCache>> Bind(std::uint64_t session, NamespaceId name_space,
                                                         BoundCache cache);

  // Copies blocks into the store; they may be written again when `done` is called. Pages that are visible
  // already are touched, not copied. The caller has seen to it that the bytes are there.
  // HASH_WIDTH_INVALID, PARENT_HASH_INVALID, SIZE_MISMATCH, COUNT_OUT_OF_RANGE, GROUP_OUT_OF_RANGE,
  // RING_GROUP, NULL_BLOCK, BLOCK_OUT_OF_RANGE, BLOCK_NOT_COMMITTED, CHAIN_MISMATCH (a hash is there twice,
  // or is stored at another index or behind another hash), QUEUE_FULL (of all operations under way, or of the
  // session's, which is a part of that), and when not one page found room QUOTA_EXCEEDED or STORE_FULL.
  // SESSION_ENDED when the session ended meanwhile.
  using PublishDone = absl::AnyInvocable<void(absl::StatusOr<PublishResult>) &&>;
  void Publish(PublishArgs args, PublishDone done);

  // How many leading blocks all groups can serve, and a lease on their pages. HASH_WIDTH_INVALID,
  // COUNT_OUT_OF_RANGE, SESSION_LIMIT.
  absl::StatusOr<Hit> Lookup(const LookupArgs& args);

  // Copies leased pages into blocks of a cache. When `done` is called the bytes are there, and the lists of
  // bad blocks say which are not. LEASE_NOT_FOUND (also: expired, or another session's), BLOCK_NOT_LEASED,
  // NULL_BLOCK, BLOCK_OUT_OF_RANGE, DUPLICATE_BLOCK, GROUP_OUT_OF_RANGE, RING_GROUP, NAMESPACE_DIFFERS (cache
  // of another namespace), QUEUE_FULL; SESSION_ENDED when
  // the session ended meanwhile, an error of the device: the blocks hold unspecified bytes.
  using LoadDone = absl::AnyInvocable<void(absl::StatusOr<LoadResult>) &&>;
  void Load(LoadArgs args, LoadDone done);

  // A new deadline, counted from now; answers what was granted. LEASE_NOT_FOUND.
  absl::StatusOr<std::chrono::milliseconds> Renew(std::uint64_t session, LeaseId lease,
                                                  std::chrono::milliseconds time);
  // Ends the lease, if it has not ended.
  void Release(std::uint64_t session, LeaseId lease);
  // Ends the session's leases, its publishes under way and its use of namespaces. Idempotent.
  void EndSession(std::uint64_t session);

  // At most `max_events` events of the namespace from a sequence on; 0: the oldest kept. A gap where some are
  // no longer kept, also when `from` is of an earlier life of the daemon. A `from` beyond the next event
  // reads nothing.
  absl::StatusOr<EventBatch> ReadEvents(std::uint64_t session, NamespaceId name_space, std::uint64_t from,
                                        std::size_t max_events);
  // Calls `listener` after every call or copy that added events to the namespace, like `done`. Answers a
  // number for StopListening, after which it is not called any more: that waits for a call of it under way on
  // another thread. SESSION_LIMIT when the session has too many listeners that have not stopped.
  absl::StatusOr<std::uint64_t> Listen(std::uint64_t session, NamespaceId name_space,
                                       std::function<void()> listener);
  void StopListening(std::uint64_t listener);

  std::vector<NamespaceUsage> ListNamespaces() const;
  StoreStats stats() const;

  // Compares index, pages, prefixes, tiers, policies and leases with each other; answers what is wrong, one
  // line each, nothing when all agree. Holds up all other calls: about 0.4 us a page.
  std::vector<std::string> Check() const;

  // Returns when nothing that had been started is under way any more, background copies included.
  void Quiesce();

 private:
  struct Impl;
  explicit PageStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvsummary
