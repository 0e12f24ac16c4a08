// All that the store knows of its pages, and every decision about them: what to copy where, what to evict,
// what has become visible. Nothing is copied here and nothing waits, so PageStore holds one lock over each
// call.
//
// A call that starts a movement ("Plan...") takes slots and pins pages; the call that ends it ("Commit...")
// makes them visible, or gives everything back. In between the pages of the plan are not evicted.
//
// Slots are reused at once. A slot of an upper tier may be given away while the copy-down from it is still
// queued on the device's executor: whatever is copied into it is queued there later. A slot of the host tier
// is given away only when no copy from it is under way.
//
// Invariants, compared by Check:
//   - a page that is visible is in its group's index, and only those are;
//   - every slot that is taken belongs to one page, or is the target of one promotion;
//   - a page's children count the pages whose parent it is, and a parent stays as long as it has any;
//   - stable and promoting pages, and no others, are in the policy of their group and tier;
//   - pins = leases' pins + pins of plans; pages with pins are not evicted.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/event_log.h"
#include "server/store/eviction_order.h"
#include "server/store/eviction_policy.h"
#include "server/store/hash_index.h"
#include "server/store/lease_table.h"
#include "server/store/page_store.h"
#include "server/store/page_table.h"
#include "server/store/slot_allocator.h"
#include "server/store/types.h"

namespace kvsummary {

inline constexpr std::uint8_t kHostTier = 0;  // all others are upper tiers

struct Namespace : std::enable_shared_from_this<Namespace> {
  struct Group {
    GroupSpec spec;
    std::int64_t slot_bytes = 0;  // bytes_per_block rounded up
    HashIndex index;
    std::vector<EvictionQueue> queues;  // by tier
  };

  Namespace(NamespaceId id, const NamespaceSpec& spec, std::uint64_t first_sequence, std::size_t log_bytes)
      : id(id), spec(spec), pages(spec.hash_width), events(first_sequence, log_bytes) {}

  const NamespaceId id;
  const NamespaceSpec spec;
  PageTable pages;
  std::vector<Group> groups;
  EventLog events;
  absl::flat_hash_set<std::uint64_t> sessions;
  std::uint64_t left = 0;       // with no session: when its last one ended, in the catalog's count of that
  std::int64_t used_bytes = 0;  // slots in all tiers
  std::int64_t held_bytes = 0;  // slots of pages that cannot be dropped now
  std::int64_t visible = 0;
};
using NamespacePtr = std::shared_ptr<Namespace>;

// A page that is to be copied from an upper tier's slot to its slot of the host tier.
struct Demotion {
  NamespacePtr name_space;
  Entry entry = kNoEntry;
  std::uint8_t from_tier = 0;
  Unit from = kNoUnit;
  Unit to = kNoUnit;
  std::int64_t bytes = 0;      // of the page
  std::uint64_t checksum = 0;  // to be filled in when !has_checksum
  bool has_checksum = false;
};

struct PublishPlan {
  struct Page {
    Entry entry = kNoEntry;
    std::int64_t block_id = 0;  // of the cache
    std::uint8_t tier = 0;      // that of the cache's device, or the host's where that has no room
    Unit unit = kNoUnit;
    std::uint64_t checksum = 0;  // to be filled in when the tier is the host's
  };
  struct List {
    std::vector<Page> pages;     // to be copied; rising block index
    std::vector<Entry> entries;  // of each hash: page to be copied, or present, or none; all pinned
    Entry parent = kNoEntry;     // the page before the first, if it is present; pinned
  };

  PublishArgs args;
  NamespacePtr name_space;
  std::uint8_t tier = 0;
  std::vector<std::uint64_t> keys;  // of the parent, then of the hashes
  std::vector<List> lists;          // as args.groups
  PublishResult result;
  bool session_ended = false;
};

struct LoadPlan {
  struct Page {
    std::size_t list = 0;    // of args.groups
    std::int64_t index = 0;  // in its block_ids
    Entry entry = kNoEntry;
    bool from_host = false;     // else from the upper tier of the cache's device
    Unit unit = kNoUnit;        // where from
    Unit promote_to = kNoUnit;  // of that upper tier
  };

  LoadArgs args;
  NamespacePtr name_space;
  std::uint8_t device_tier = kHostTier;  // upper tier of the cache's device; the host's: it has none
  std::vector<Page> pages;
  bool any_from_host = false;
  bool any_arriving = false;  // some are being copied down, maybe by another device
  LoadResult result;
  bool session_ended = false;  // the cache may be another session's by now
};

class Catalog {
 public:
  using Clock = std::chrono::steady_clock;

  struct TierSpec {
    std::string name;
    std::int64_t capacity_bytes = 0;
    const Device* device = nullptr;  // null: the host tier
  };
  struct Options {
    PageStore::Policy policy = PageStore::Policy::kLru;
    std::int64_t quota_bytes = 0;
    std::chrono::milliseconds max_lease{0};
    std::uint64_t first_sequence = 1;
    std::size_t event_log_bytes = 0;
    double high_watermark = 1;
    double low_watermark = 1;
    std::uint64_t seed = 0;  // of keys
    std::uint64_t first_lease = 1;
  };

  // `tiers`: the host's first.
  Catalog(const std::vector<TierSpec>& tiers, Options options);

  absl::StatusOr<NamespaceId> Declare(std::uint64_t session, const NamespaceSpec& spec);
  // NAMESPACE_NOT_FOUND unless the session has declared it.
  absl::StatusOr<NamespacePtr> Find(std::uint64_t session, NamespaceId id) const;
  // The tier that pages of a device's caches go to.
  std::uint8_t TierOf(const Device* device) const;

  // Fills in all but the arguments. What it refuses has changed nothing.
  absl::Status PlanPublish(PublishPlan& plan);
  // `good`: all pages have been copied. Fills in the result.
  void CommitPublish(PublishPlan& plan, bool good);

  absl::StatusOr<Hit> Lookup(const LookupArgs& args, Clock::time_point now);

  absl::Status PlanLoad(LoadPlan& plan, Clock::time_point now);
  // Takes slots of the device's upper tier for pages that are to be copied there as well.
  void PlanPromotions(LoadPlan& plan);
  // Takes a page of the host tier whose checksum did not match, or which has been lost, out of the plan and
  // the store. Not during a movement of the plan.
  void DropBad(LoadPlan& plan, std::size_t page);
  // `good`: all pages have been copied.
  void CommitLoad(LoadPlan& plan, bool good);

  // Copies down that the calls before have decided, in order; to be queued on the executor of their tier's
  // device before the lock is given up.
  std::vector<Demotion> TakeDemotions();
  void CommitDemotion(const Demotion& demotion, bool good);
  // Decides on copies down from an upper tier that is too full: some megabytes at a time.
  void DemoteBelowWatermark(std::uint8_t tier);

  absl::StatusOr<std::chrono::milliseconds> Renew(std::uint64_t session, LeaseId lease,
                                                  std::chrono::milliseconds time, Clock::time_point now);
  void Release(std::uint64_t session, LeaseId lease);
  void ExpireLeases(Clock::time_point now);
  void EndSession(std::uint64_t session);

  // Tells the policies what lookups have used: some thousand pages at a time. Whether there is more.
  bool ApplySomeTouches();
  std::int64_t pages_to_touch() const { return uses_pages_; }

  // Namespaces that have events since the last call.
  std::vector<NamespaceId> TakeChanged();

  std::vector<NamespaceUsage> ListNamespaces() const;
  StoreStats stats() const;
  std::vector<std::string> Check() const;

 private:
  struct Tier {
    std::string name;
    const Device* device;
    SlotAllocator slots;
    std::int64_t pinned_bytes = 0;     // of pages; those that Held holds of
    std::int64_t promotion_bytes = 0;  // targets of promotions
    std::int64_t pages = 0;
    bool draining = false;  // from the high watermark to the low one
    EvictionOrder order = {};
    std::int64_t evicted = 0, demoted = 0, promoted = 0;
  };
  using Group = Namespace::Group;

  // catalog.cc: pages and what ties them together.
  static bool Held(const PageRecord& record) { return record.pins > 0 || record.life != PageLife::kStable; }
  static bool InPolicy(PageLife life) { return life == PageLife::kStable || life == PageLife::kPromoting; }
  static bool Visible(PageLife life) { return InPolicy(life) || life == PageLife::kDemoting; }
  bool Eligible(const Namespace& ns, Entry entry) const;
  Group& GroupOf(Namespace& ns, Entry entry) const { return ns.groups[ns.pages.record(entry).group]; }
  std::uint64_t KeyOf(const Namespace& ns, const char* hash) const;
  std::uint64_t KeyOf(const Namespace& ns, Entry entry) const { return KeyOf(ns, ns.pages.hash(entry)); }
  // To be told something of the page.
  EvictionPolicy& PolicyOf(Namespace& ns, Entry entry) {
    const std::uint8_t tier = ns.pages.record(entry).tier;
    EvictionQueue& queue = GroupOf(ns, entry).queues[tier];
    tiers_[tier].order.NoteChange(queue);
    return *queue.policy;
  }
  // The visible page with this hash.
  Entry FindPage(const Namespace& ns, const Group& group, std::uint64_t key, const char* hash) const;
  // Applies change(record) to a page that has a slot, and keeps its tier's count of held bytes right;
  // announces a page that has become eligible.
  template <typename Change>
  void Update(Namespace& ns, Entry entry, Change change);
  void Pin(Namespace& ns, Entry entry);
  void Unpin(Namespace& ns, Entry entry);
  void Link(Namespace& ns, Entry child, Entry parent);
  void Unlink(Namespace& ns, Entry child);
  void FreeSlot(Namespace& ns, Entry entry);
  // Gives the page a slot in another tier, or its first one.
  void Place(Namespace& ns, Entry entry, std::uint8_t tier, Unit unit);
  // Takes a visible page out of the index; it is gone when its last pin and child are.
  void Lose(Namespace& ns, Entry entry, bool evicted);
  void Reap(Namespace& ns, Entry entry);
  void Touch(Namespace& ns, Entry entry);
  void TouchPrefix(Namespace& ns, Entry last);  // from the last page of a prefix to its first
  void ApplyTouches();
  void CountUpper(Namespace& ns, Entry child, int change);
  void UnpinLease(const Lease& lease);
  absl::Status AddSession(Namespace& ns, std::uint64_t session);
  void ForgetUnused();
  // Forgets the namespace that has had no session for the longest time, with its pages: of those whose pages
  // can all be dropped. False: there is none, and nothing has been dropped.
  bool ForgetOldest();
  void AddEvent(Namespace& ns, StoreEvent event);
  void FlushRemoved();

  // catalog_evict.cc
  bool MakeQuota(Namespace& ns, std::int64_t slot_bytes);
  Unit AllocateIn(std::uint8_t tier, std::int64_t slot_bytes);
  // `may_drop`: a page that finds no room below goes all the same, as it must when a slot is needed now.
  bool EvictFor(std::uint8_t tier, std::int64_t slot_bytes, bool may_drop);
  bool Evict(Namespace& ns, Entry entry, bool may_drop);
  bool Demote(Namespace& ns, Entry entry);
  bool DropOldestOf(Namespace& ns);

  // catalog_publish.cc
  absl::Status CheckDistinct(const PublishPlan& plan) const;
  absl::Status FindPresent(PublishPlan& plan) const;
  void PlanList(PublishPlan& plan, std::size_t list, bool& over_quota);
  void DropUnseen(Namespace& ns, Entry entry);
  void CommitList(PublishPlan& plan, std::size_t list);
  void AddStoredEvents(const PublishPlan& plan, std::size_t list, const std::vector<bool>& stored);

  // catalog_lookup.cc
  struct Matches {
    std::vector<Entry> entries;       // by block
    std::vector<std::uint8_t> tiers;  // the same
    std::vector<std::size_t>
        breaks;  // of a FULL group: blocks whose page has another parent than the page before
    std::int64_t known_from = 0;  // of a WINDOW group: blocks before it have not been looked up
  };
  const char* HashAt(const Namespace& ns, std::int64_t block) const;
  void ExtendKeys(const Namespace& ns, std::int64_t count);
  bool Follows(const PageRecord& record, std::int64_t block) const;
  void MatchNeighbours(const Namespace& ns, const Group& group, std::size_t count, Matches& matches) const;
  bool MatchBatch(const Namespace& ns, const Group& group, std::size_t end, Matches& matches);
  void MatchRun(const Namespace& ns, const Group& group, std::int64_t count, Matches& matches);
  std::int64_t MatchWindow(const Namespace& ns, const Group& group, std::int64_t blocks, std::int64_t count,
                           Matches& matches);
  void PinHit(Namespace& ns, const Matches& matches, bool window, std::int64_t first, std::int64_t blocks,
              std::vector<Entry>& pinned);

  // catalog_check.cc
  struct Found;
  void CheckPage(const Namespace& ns, Entry entry, Found& found) const;
  void CheckNamespace(const Namespace& ns, Found& found) const;
  void CheckTiers(Found& found) const;

  const Options options_;
  std::vector<Tier> tiers_;
  std::uint64_t clock_ = 0;  // of the policies
  std::uint64_t next_namespace_ = 1;
  std::uint64_t left_ = 0;  // times that a namespace's last session has ended
  // Of the next namespace's events: above all of those that have been forgotten, one of which may have been
  // its earlier life. Who resumes that one's stream then hears of a gap, and misses nothing.
  std::uint64_t first_sequence_;
  std::map<NamespaceId, NamespacePtr> namespaces_;
  std::map<NamespaceKey, NamespaceId> keys_to_ids_;
  std::map<std::uint64_t, std::set<NamespaceId>> declared_;  // by session
  LeaseTable leases_;
  std::vector<Demotion> demotions_;
  std::vector<PublishPlan*> publishes_;  // under way
  std::vector<LoadPlan*> loads_;         // the same

  // Uses that policies have not been told yet, in order. Lookups only write them down; whatever evicts or
  // forgets pages applies them first.
  struct Use {
    Namespace* name_space;
    Entry entry;
    bool prefix;  // with all pages before it
  };
  std::vector<Use> uses_;
  std::int64_t uses_pages_ = 0;  // about so many

  struct Removed {
    NamespaceId name_space;
    std::int32_t group;
    std::string hashes;
  };
  std::vector<Removed> removed_;  // events to be
  std::vector<NamespaceId> changed_;

  // Of the lookup that runs.
  const char* hashes_ = nullptr;
  std::vector<std::uint64_t> keys_;

  StoreStats totals_;  // only the counters
};

}  // namespace kvsummary
