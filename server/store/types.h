// What the page store is told and what it answers, as plain data.
//
// A *page* is the bytes of one block of one group. A *group* is the layers that share block ids. A
// *namespace* is what pages can be shared within: its key holds all that makes bytes mean something else
// (model, shape, tenant's salt, shard), so pages of another namespace never match. Within a namespace a page
// is addressed by (group, hash), where the hash is the engine's own, over the block's tokens and all before
// them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/copy.h"
#include "server/device/device.h"

namespace kvsummary {

enum class NamespaceId : std::uint64_t {};
enum class LeaseId : std::uint64_t {};

inline constexpr int kMinHashWidth = 8;  // bytes
inline constexpr int kMaxHashWidth = 64;
inline constexpr int kMaxGroups = 64;  // of a namespace
inline constexpr int kMaxNamespaces = 4096;
inline constexpr int kMaxNamespacesPerSession = 256;                     // that it has declared
inline constexpr std::int64_t kMaxPrefixBlocks = std::int64_t{1} << 18;  // of one call
inline constexpr int kMaxLeasesPerSession = 4096;
inline constexpr std::int64_t kMaxLeasedPages = std::int64_t{1} << 24;  // of a session, over all its leases
inline constexpr int kMaxStoreOperations = 1024;                        // publishes and loads under way
inline constexpr int kMaxStoreOperationsPerSession = 256;
inline constexpr int kMaxListenersPerSession = 64;    // for events
inline constexpr std::int64_t kMaxEventPages = 4096;  // of one event; more are several
inline constexpr std::int64_t kPageUnit = 256;  // bytes that a page's size in the store is rounded up to

enum class GroupKind {
  kFull,    // a hit needs every leading block
  kWindow,  // a hit of N tokens needs the blocks of its last window_tokens tokens only
  kRing,    // handed over between engines, never stored
};

struct GroupSpec {
  GroupKind kind = GroupKind::kFull;
  std::int64_t window_tokens = 0;  // of a WINDOW group: at least 1
  std::int32_t lookahead_blocks =
      0;                             // 1: a hit of n blocks needs block n to match as well (it is not loaded)
  std::int64_t bytes_per_block = 0;  // of a page; 0 for a RING group

  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
};

struct NamespaceKey {
  std::string model;
  std::int32_t layers = 0;
  std::int32_t block_size = 0;  // tokens, for all groups
  std::uint32_t layout_version = 0;
  std::string salt;       // the engine's: a tenant's secret, any bytes
  std::int32_t rank = 0;  // of `shards`, where the pages' bytes differ by rank; 0 of 1 where they do not
  std::int32_t shards = 1;

  friend auto operator<=>(const NamespaceKey&, const NamespaceKey&) = default;
};

struct NamespaceSpec {
  NamespaceKey key;
  std::int32_t hash_width = 0;  // bytes
  std::vector<GroupSpec> groups;
};

// Where an engine's pages lie: for each group of a namespace the views of one cache. Made by PageStore::Bind
// and immutable from then on.
struct BoundCache {
  // One group. Views of several buffers are offsets from one base, of either sign. No views for a RING group.
  struct Group {
    std::uint8_t* base = nullptr;
    std::vector<PageView> views;
  };

  Device* device = nullptr;     // which can address all of it
  std::int64_t blocks = 0;      // null block included
  std::int32_t block_size = 0;  // tokens
  std::vector<Group> groups;    // as many as the namespace has
  // Whatever owns the memory: the cache, the buffers. Held while work that touches it is queued.
  std::shared_ptr<const void> memory = nullptr;
  NamespaceId name_space{};  // filled in by Bind
};

struct GroupBlocks {
  std::int32_t group = 0;
  // A block id of the cache for each block; a negative one: the group has no page of it, or it is not wanted.
  std::vector<std::int64_t> block_ids;
};

struct PublishArgs {
  std::uint64_t session = 0;
  NamespaceId name_space{};
  std::shared_ptr<const BoundCache> cache;
  std::int64_t committed_tokens = 0;   // of the request: every published block must lie below
  std::int64_t first_block_index = 0;  // of the first hash, in its prefix
  std::string parent_hash;             // of block first_block_index - 1; empty where that is -1
  std::string hashes;                  // packed, hash_width bytes each: n of them
  std::vector<GroupBlocks> groups;     // each with n block ids
};

struct PublishResult {
  std::int64_t stored = 0;                  // pages that are visible now and were not before
  std::int64_t present = 0;                 // that were visible before
  std::int64_t dropped = 0;                 // for want of room: always the last ones of their group
  std::chrono::nanoseconds device_time{0};  // of the movement into the store, as the device measures it
};

struct LookupArgs {
  std::uint64_t session = 0;
  NamespaceId name_space{};
  std::string_view hashes;             // packed, from block 0 on; the caller's, not kept
  const Device* device = nullptr;      // of the cache that will be loaded; null: not known
  std::chrono::milliseconds lease{0};  // wanted; cut to Options::max_lease, 0: that
};

struct GroupHit {
  std::int32_t group = 0;
  std::int64_t first_block_index = 0;  // of the pages that the hit needs: up to Hit::blocks
  // Those pages by where they are. Their sum is Hit::blocks - first_block_index.
  std::int64_t device_pages = 0;  // on LookupArgs::device
  std::int64_t host_pages = 0;
  std::int64_t elsewhere_pages = 0;  // on other devices
};

struct Hit {
  std::int64_t blocks = 0;                  // leading blocks that can be loaded
  LeaseId lease{};                          // of no meaning when blocks is 0
  std::chrono::milliseconds lease_time{0};  // what was granted
  std::vector<GroupHit> groups;             // all but RING groups; empty when blocks is 0
};

struct LoadGroup {
  std::int32_t group = 0;
  std::int64_t first_block_index = 0;   // of the first id
  std::vector<std::int64_t> block_ids;  // where to; negative: not wanted
};

struct LoadArgs {
  std::uint64_t session = 0;
  LeaseId lease{};
  std::shared_ptr<const BoundCache> cache;  // bound to the lease's namespace
  std::vector<LoadGroup> groups;
};

struct LoadResult {
  std::int64_t pages = 0;  // loaded
  std::int64_t bytes = 0;
  std::int64_t pages_from_device = 0;       // those that were on the cache's device
  std::chrono::nanoseconds device_time{0};  // of the movement into the cache, as the device measures it
  // By group of LoadArgs: index, in its block_ids, of blocks that are not good. Rising. Nothing has been
  // written to these.
  std::vector<std::vector<std::int64_t>> bad;
};

enum class EventKind { kStored, kRemoved };

// Pages of one group that became visible, or are gone from every tier.
struct StoreEvent {
  std::uint64_t sequence = 0;
  EventKind kind = EventKind::kStored;
  std::int32_t group = 0;
  std::string hashes;                  // packed. Stored: consecutive blocks of one prefix
  std::string parent_hash;             // stored: of the block before the first; empty for block 0
  std::int64_t first_block_index = 0;  // stored: of the first
};

struct EventGap {
  std::uint64_t from = 0;  // the sequences [from, to) are no longer kept
  std::uint64_t to = 0;
};

struct EventBatch {
  std::optional<EventGap> gap;  // before the events
  std::vector<StoreEvent> events;
  std::uint64_t next = 0;  // what to read from afterwards
};

struct TierUsage {
  std::string name;  // "host", or the device's name for its upper tier
  // used = pinned + unpinned, used + free = capacity, all in bytes as the store rounds them.
  std::int64_t capacity_bytes = 0;
  std::int64_t pinned_bytes = 0;  // leased, or being moved
  std::int64_t unpinned_bytes = 0;
  std::int64_t free_bytes = 0;
  std::int64_t pages = 0;
  // Since the store was made.
  std::int64_t evicted_pages = 0;   // dropped: gone from every tier
  std::int64_t demoted_pages = 0;   // copied down from here
  std::int64_t promoted_pages = 0;  // brought up to here
};

struct NamespaceUsage {
  NamespaceId id{};
  NamespaceSpec spec;
  std::int64_t quota_bytes = 0;  // 0: none
  std::int64_t used_bytes = 0;   // in all tiers
  std::int64_t pages = 0;
  std::int64_t sessions = 0;        // that have declared it
  std::uint64_t next_sequence = 0;  // of its next event
};

struct StoreStats {
  std::int64_t pages = 0;  // visible
  std::int64_t namespaces = 0;
  std::int64_t leases = 0;
  std::vector<TierUsage> tiers;  // host first
  // Since the store was made.
  std::int64_t lookups = 0;
  std::int64_t lookup_blocks = 0;  // asked for
  std::int64_t hit_blocks = 0;     // answered
  std::int64_t published_pages = 0;
  std::int64_t present_pages = 0;  // published again
  std::int64_t dropped_pages = 0;  // for want of room
  std::int64_t loaded_pages = 0;
  std::int64_t loaded_bytes = 0;
  std::int64_t bad_pages = 0;  // whose checksum did not match
};

}  // namespace kvsummary
