#include "server/store/validate.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/name.h"

namespace kvsummary {
namespace {

constexpr std::int32_t kMaxBlockSize = 32768;  // as of a cache
constexpr std::size_t kMaxSaltBytes = 64;

absl::Status CheckKey(const NamespaceKey& key) {
  if (auto s = CheckName(key.model); !s.ok()) return AtField(s, "identity.model");
  if (key.salt.size() > kMaxSaltBytes) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "identity.salt",
                  absl::StrFormat("a salt has at most %d bytes, not %d", kMaxSaltBytes, key.salt.size()));
  }
  if (key.layers <= 0) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "identity.layers", absl::StrFormat("%d layers", key.layers));
  }
  if (key.block_size <= 0 || key.block_size % kRegionTokens != 0 || key.block_size > kMaxBlockSize) {
    return Refuse(Reason::BLOCK_SIZE_INVALID, "identity.block_size",
                  absl::StrFormat("%d is not a positive multiple of %d up to %d", key.block_size,
                                  kRegionTokens, kMaxBlockSize));
  }
  if (key.shards <= 0 || key.rank < 0 || key.rank >= key.shards) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "identity.shard_rank",
                  absl::StrFormat("rank %d of %d shards", key.rank, key.shards));
  }
  return absl::OkStatus();
}

absl::Status CheckGroup(const GroupSpec& group, const std::string& field) {
  const auto invalid = [&](const char* part, std::int64_t value, const char* why) {
    return Refuse(Reason::GROUP_INVALID, absl::StrCat(field, part), absl::StrFormat("%d: %s", value, why));
  };
  const bool ring = group.kind == GroupKind::kRing;
  const bool window = group.kind == GroupKind::kWindow;
  if (window ? group.window_tokens < 1 || group.window_tokens > kMaxIndex : group.window_tokens != 0) {
    return invalid(".window_tokens", group.window_tokens, "a WINDOW group has 1 to 2^31 - 1, any other none");
  }
  if (group.lookahead_blocks < 0 || group.lookahead_blocks > (ring ? 0 : 1)) {
    return invalid(".lookahead_blocks", group.lookahead_blocks, "it is 0 or 1, and 0 of a RING group");
  }
  if (ring ? group.bytes_per_block != 0 : group.bytes_per_block < 1 || group.bytes_per_block > kMaxIndex) {
    return invalid(".bytes_per_block", group.bytes_per_block,
                   "a RING group has none, any other 1 to 2^31 - 1");
  }
  return absl::OkStatus();
}

// Whether some block of one view shares a byte with some block of the other. Of views with different strides
// the whole spans are compared.
bool Overlap(const PageView& a, const PageView& b, std::int64_t blocks) {
  if (a.bytes == 0 || b.bytes == 0) return false;
  const std::int64_t a_end = a.offset + a.block_stride * (blocks - 1) + a.bytes;
  const std::int64_t b_end = b.offset + b.block_stride * (blocks - 1) + b.bytes;
  if (a_end <= b.offset || b_end <= a.offset) return false;
  if (a.block_stride != b.block_stride) return true;
  const std::int64_t stride = a.block_stride;
  const std::int64_t apart = ((b.offset - a.offset) % stride + stride) % stride;  // from a on to the next b
  return apart < a.bytes || stride - apart < b.bytes;
}

absl::Status CheckViews(const GroupSpec& group, const BoundCache& cache, std::size_t g) {
  const std::vector<PageView>& views = cache.groups[g].views;
  const std::string field = absl::StrCat("groups[", g, "].views");
  const auto mismatch = [&](std::size_t v, const std::string& what) {
    return Refuse(Reason::VIEW_MISMATCH, absl::StrCat(field, "[", v, "]"), what);
  };
  if (views.size() > kMaxPageViews) {
    return Refuse(Reason::VIEW_MISMATCH, field,
                  absl::StrFormat("%d views; a page has at most %d", views.size(), kMaxPageViews));
  }
  const std::int64_t alignment = cache.device->page_alignment();
  const auto base = reinterpret_cast<std::uintptr_t>(cache.groups[g].base);
  std::int64_t left = group.bytes_per_block;
  for (std::size_t v = 0; v < views.size(); ++v) {
    const PageView& view = views[v];
    if (view.bytes < 0 || view.bytes > left) {
      return mismatch(v, absl::StrFormat("%d bytes, where the group's %d bytes per block leave %d",
                                         view.bytes, group.bytes_per_block, left));
    }
    if (view.block_stride < view.bytes) {
      return mismatch(v, absl::StrFormat("blocks of %d bytes lie %d apart", view.bytes, view.block_stride));
    }
    if ((static_cast<std::int64_t>(base % static_cast<std::uintptr_t>(alignment)) | view.offset |
         view.block_stride | view.bytes) %
            alignment !=
        0) {
      return mismatch(v, absl::StrFormat("offset %d, stride %d or bytes %d is not a multiple of %d",
                                         view.offset, view.block_stride, view.bytes, alignment));
    }
    for (std::size_t other = 0; other < v; ++other) {
      if (Overlap(views[other], view, cache.blocks)) {
        return mismatch(v, absl::StrFormat("it overlaps view %d", other));
      }
    }
    left -= view.bytes;
  }
  if (left != 0) {
    return Refuse(Reason::VIEW_MISMATCH, field,
                  absl::StrFormat("the views have %d bytes, the group %d per block",
                                  group.bytes_per_block - left, group.bytes_per_block));
  }
  return absl::OkStatus();
}

// The group numbers of the lists are of stored groups, each at most once.
template <typename List>
absl::Status CheckGroups(const NamespaceSpec& spec, const std::vector<List>& lists) {
  std::vector<bool> seen(spec.groups.size());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const std::int32_t group = lists[i].group;
    const std::string field = absl::StrCat("groups[", i, "].group");
    if (group < 0 || static_cast<std::size_t>(group) >= spec.groups.size() ||
        seen[static_cast<std::size_t>(group)]) {
      return Refuse(Reason::GROUP_OUT_OF_RANGE, field,
                    absl::StrFormat("group %d of %d, or twice", group, spec.groups.size()));
    }
    seen[static_cast<std::size_t>(group)] = true;
    if (spec.groups[static_cast<std::size_t>(group)].kind == GroupKind::kRing) {
      return Refuse(Reason::RING_GROUP, field, absl::StrFormat("group %d is a RING group", group));
    }
  }
  return absl::OkStatus();
}

// The ids that are not negative name blocks of the cache, not the null block, each once.
absl::Status CheckBlocks(const BoundCache& cache, const std::vector<std::int64_t>& ids, std::size_t list) {
  const auto refuse = [&](Reason reason, std::size_t i, const std::string& what) {
    return Refuse(reason, absl::StrCat("groups[", list, "].block_ids[", i, "]"), what);
  };
  std::vector<std::pair<std::int64_t, std::size_t>> sorted;
  sorted.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    if (ids[i] == 0) return refuse(Reason::NULL_BLOCK, i, "block 0 is the null block");
    if (ids[i] >= cache.blocks) {
      return refuse(Reason::BLOCK_OUT_OF_RANGE, i,
                    absl::StrFormat("block %d of a cache of %d blocks", ids[i], cache.blocks));
    }
    sorted.emplace_back(ids[i], i);
  }
  std::sort(sorted.begin(), sorted.end());
  const auto same = std::adjacent_find(sorted.begin(), sorted.end(),
                                       [](const auto& a, const auto& b) { return a.first == b.first; });
  if (same == sorted.end()) return absl::OkStatus();
  return refuse(Reason::DUPLICATE_BLOCK, (same + 1)->second, absl::StrFormat("block %d twice", same->first));
}

}  // namespace

absl::Status CheckSpec(const NamespaceSpec& spec) {
  if (auto s = CheckKey(spec.key); !s.ok()) return s;
  if (spec.hash_width < kMinHashWidth || spec.hash_width > kMaxHashWidth) {
    return Refuse(
        Reason::HASH_WIDTH_INVALID, "hash_width",
        absl::StrFormat("%d is not in %d to %d bytes", spec.hash_width, kMinHashWidth, kMaxHashWidth));
  }
  if (spec.groups.size() > kMaxGroups) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "groups",
                  absl::StrFormat("%d groups; at most %d", spec.groups.size(), kMaxGroups));
  }
  bool stored = false;
  for (std::size_t g = 0; g < spec.groups.size(); ++g) {
    if (auto s = CheckGroup(spec.groups[g], absl::StrCat("groups[", g, "]")); !s.ok()) return s;
    stored |= spec.groups[g].kind != GroupKind::kRing;
  }
  if (!stored) return Refuse(Reason::GROUP_INVALID, "groups", "no group whose pages are stored");
  return absl::OkStatus();
}

absl::Status CheckBound(const NamespaceSpec& spec, const BoundCache& cache) {
  if (cache.block_size != spec.key.block_size) {
    return Refuse(Reason::BLOCK_SIZE_INVALID, "cache",
                  absl::StrFormat("the cache's blocks have %d tokens, the namespace's %d", cache.block_size,
                                  spec.key.block_size));
  }
  if (cache.groups.size() != spec.groups.size()) {
    return Refuse(
        Reason::GROUP_OUT_OF_RANGE, "groups",
        absl::StrFormat("%d groups; the namespace has %d", cache.groups.size(), spec.groups.size()));
  }
  if (cache.blocks < 1 || cache.blocks > kMaxIndex) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "cache", absl::StrFormat("%d blocks", cache.blocks));
  }
  for (std::size_t g = 0; g < spec.groups.size(); ++g) {
    if (spec.groups[g].kind == GroupKind::kRing) continue;
    if (auto s = CheckViews(spec.groups[g], cache, g); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int64_t> CountHashes(const NamespaceSpec& spec, std::string_view hashes) {
  const auto width = static_cast<std::size_t>(spec.hash_width);
  if (hashes.size() % width != 0) {
    return Refuse(Reason::HASH_WIDTH_INVALID, "hashes",
                  absl::StrFormat("%d bytes are not a multiple of the width %d", hashes.size(), width));
  }
  const auto count = static_cast<std::int64_t>(hashes.size() / width);
  if (count < 1 || count > kMaxPrefixBlocks) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "hashes",
                  absl::StrFormat("%d hashes, not 1 to %d", count, kMaxPrefixBlocks));
  }
  return count;
}

absl::Status CheckPublish(const NamespaceSpec& spec, const PublishArgs& args) {
  const auto count = CountHashes(spec, args.hashes);
  if (!count.ok()) return count.status();
  if (args.first_block_index < 0 || args.first_block_index > kMaxIndex - *count) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "first_block_index", absl::StrCat(args.first_block_index));
  }
  if (args.parent_hash.size() !=
      (args.first_block_index == 0 ? 0 : static_cast<std::size_t>(spec.hash_width))) {
    return Refuse(
        Reason::PARENT_HASH_INVALID, "parent_hash",
        absl::StrFormat("%d bytes, before block %d", args.parent_hash.size(), args.first_block_index));
  }
  const std::int64_t end = args.first_block_index + *count;
  if (args.committed_tokens / spec.key.block_size < end) {
    return Refuse(Reason::BLOCK_NOT_COMMITTED, "committed_tokens",
                  absl::StrFormat("%d tokens are committed, blocks end at token %d", args.committed_tokens,
                                  end * spec.key.block_size));
  }
  if (auto s = CheckGroups(spec, args.groups); !s.ok()) return s;
  for (std::size_t i = 0; i < args.groups.size(); ++i) {
    const std::vector<std::int64_t>& ids = args.groups[i].block_ids;
    if (static_cast<std::int64_t>(ids.size()) != *count) {
      return Refuse(Reason::SIZE_MISMATCH, absl::StrCat("groups[", i, "].block_ids"),
                    absl::StrFormat("%d block ids for %d hashes", ids.size(), *count));
    }
    if (auto s = CheckBlocks(*args.cache, ids, i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status CheckLoad(const NamespaceSpec& spec, const LoadArgs& args) {
  if (auto s = CheckGroups(spec, args.groups); !s.ok()) return s;
  for (std::size_t i = 0; i < args.groups.size(); ++i) {
    if (auto s = CheckBlocks(*args.cache, args.groups[i].block_ids, i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace kvsummary
