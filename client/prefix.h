// The page store in the client's terms: what ClientSession's store calls take and answer (client/session.h),
// as in kvsummary/v1/prefix.proto.
//
// Hashes are the engine's own bytes, packed: `hash_width` bytes each, one block after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

// A 64-bit counter in a registered buffer, and a value of it. An id of 0: none.
struct SharedCounter {
  std::uint64_t buffer_id = 0;
  std::int64_t offset_bytes = 0;
  std::uint64_t value = 0;
};

// What makes the pages of two engines the same.
struct NamespaceIdentity {
  std::string model;
  std::int32_t layers = 0;
  std::int32_t block_size = 0;  // tokens
  std::uint32_t layout_version = 0;
  std::string salt = {};  // bytes, secret
  std::int32_t shard_rank = 0;
  std::int32_t shard_count = 1;
};

// The numbers of kvsummary.v1.GroupKind.
enum class GroupKind { kFull = 1, kWindow = 2, kRing = 3 };

struct PageGroup {
  GroupKind kind = GroupKind::kFull;
  std::int64_t window_tokens = 0;     // of a WINDOW
  std::int32_t lookahead_blocks = 0;  // 0 or 1
  std::int64_t bytes_per_block = 0;
};

struct Namespace {
  NamespaceIdentity identity;
  std::int32_t hash_width = 32;  // bytes
  std::vector<PageGroup> groups;
};

// bytes_per_block of block b lie at offset + b * stride of a registered buffer, or of the cache's own memory.
struct BlockView {
  std::uint64_t buffer_id = 0;
  std::int64_t offset_bytes = 0;
  std::int64_t block_stride_bytes = 0;
  std::int64_t bytes_per_block = 0;
};
struct GroupViews {
  std::int32_t group = 0;
  std::vector<BlockView> views;
};

// Blocks of one group, one for each hash or page; negative: none.
struct GroupBlocks {
  std::int32_t group = 0;
  std::span<const std::int64_t> blocks;
  std::int64_t first_block_index = 0;  // of a load
};

struct PublishBlocks {
  std::int64_t committed_tokens = 0;
  std::int64_t first_block_index = 0;
  std::string_view parent_hash;  // empty for a request's first block
  std::string_view hashes;
  std::span<const GroupBlocks> groups;
  std::uint64_t request_id = 0;
  SharedCounter ready = {};
};
struct PublishResult {
  std::int64_t stored = 0;   // pages
  std::int64_t present = 0;  // before
  std::int64_t dropped = 0;  // for want of room
};

struct GroupHit {
  std::int32_t group = 0;
  std::int64_t first_block_index = 0;  // that is needed
  std::int64_t device_pages = 0;
  std::int64_t host_pages = 0;
  std::int64_t other_device_pages = 0;
};
struct PrefixHit {
  std::int64_t hit_blocks = 0;
  std::uint64_t lease_id = 0;  // 0: no hit
  std::int64_t lease_milliseconds = 0;
  std::vector<GroupHit> groups;
};

struct LoadBlocks {
  std::uint64_t lease_id = 0;
  std::span<const GroupBlocks> groups;
  SharedCounter ready = {};
  SharedCounter done = {};
};
struct BadBlocks {
  std::int32_t group = 0;
  std::vector<std::int64_t> block_indexes;
};
struct LoadResult {
  std::int64_t loaded = 0;  // pages
  std::int64_t loaded_bytes = 0;
  std::vector<BadBlocks> bad;  // groups that have such
};

struct StoreEvent {
  enum class Kind { kStored, kRemoved, kGap };
  Kind kind = Kind::kGap;
  std::uint64_t sequence = 0;
  std::int32_t group = 0;
  std::string hashes;
  std::string parent_hash;                 // of a kStored
  std::int64_t first_block_index = 0;      // of a kStored
  std::uint64_t gap_from = 0, gap_to = 0;  // of a kGap: [from, to) are missing
};

// A stream of events. Not thread-safe, but for Cancel.
class EventWatch {
 public:
  ~EventWatch();  // cancels
  // Waits for the next event; the error that ended the stream.
  absl::StatusOr<StoreEvent> Next();
  // Ends a Next that waits, with CANCELLED.
  void Cancel();

 private:
  friend class ClientSession;
  struct Impl;
  explicit EventWatch(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The store's numbers, as AdminService tells them. Counters since the daemon's start.
struct StoreTier {
  std::string name;  // "cuda:0", "host"
  std::int64_t capacity_bytes = 0, pinned_bytes = 0, unpinned_bytes = 0, free_bytes = 0;
  std::int64_t pages = 0;
  std::int64_t evicted_pages = 0;   // dropped from here
  std::int64_t demoted_pages = 0;   // copied from here to the tier below
  std::int64_t promoted_pages = 0;  // brought up to here
};
struct StoreStats {
  std::int64_t pages = 0;  // that can be found
  std::int64_t namespaces = 0;
  std::int64_t leases = 0;
  std::int64_t lookups = 0, lookup_blocks = 0, hit_blocks = 0;
  std::int64_t stored_pages = 0, present_pages = 0, dropped_pages = 0;
  std::int64_t loaded_pages = 0, loaded_bytes = 0, bad_pages = 0;
  std::vector<StoreTier> tiers;  // the host's first
};
struct CheckReport {
  std::vector<std::string> faults;  // none: all is well
  StoreStats store;
};

struct NamespaceUsage {
  std::uint64_t id = 0;
  NamespaceIdentity identity;  // without its salt
  std::int64_t pages = 0, used_bytes = 0, quota_bytes = 0;
};

}  // namespace kvsummary
