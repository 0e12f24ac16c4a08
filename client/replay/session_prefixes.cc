#include "client/replay/session_prefixes.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/replay/rows.h"

namespace kvsummary {
namespace {

constexpr int kHashWords = 4;
constexpr std::uint64_t kOutputKey = std::uint64_t{1} << 63;

bool HasNoRoom(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason == "STORE_FULL" || reason == "QUOTA_EXCEEDED";
}

}  // namespace

void SeenBlocks::Add(std::span<const std::uint64_t> keys) {
  const std::lock_guard lock(mutex_);
  keys_.insert(keys.begin(), keys.end());
}

std::int64_t SeenBlocks::Leading(std::span<const std::uint64_t> keys) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::find_if(keys, [this](std::uint64_t key) { return !keys_.contains(key); }) -
         keys.begin();
}

Namespace ReplayNamespace(const CacheGeometry& geometry, std::uint64_t seed) {
  return {.identity = {.model = "replay",
                       .layers = geometry.layers,
                       .block_size = geometry.block_size,
                       .layout_version = 1,
                       .salt = absl::StrCat("seed ", seed)},
          .hash_width = kHashWords * 8,
          .groups = {{.kind = GroupKind::kFull, .bytes_per_block = geometry.dense_block_stride()}}};
}

absl::StatusOr<SessionPrefixes> SessionPrefixes::Open(ClientSession& session, const Cache& cache,
                                                      std::span<const TraceRequest> requests,
                                                      std::uint64_t seed, SeenBlocks& seen) {
  const auto namespace_id = session.DeclareNamespace(ReplayNamespace(cache.geometry, seed));
  if (!namespace_id.ok()) return namespace_id.status();
  if (auto s = session.BindCache(cache, *namespace_id, {}); !s.ok()) return s;
  return SessionPrefixes(session, cache, requests, seen, *namespace_id);
}

absl::StatusOr<FoundPrefix> SessionPrefixes::Find(std::int64_t request) {
  const std::int64_t blocks =
      requests_[static_cast<std::size_t>(request)].input_length / cache_->geometry.block_size;
  const std::vector<std::uint64_t> keys = Keys(request, 0, blocks);
  FoundPrefix found;
  if (blocks > 0) {
    const auto hit = session_->Lookup(namespace_, Hashes(keys), cache_->device, std::chrono::milliseconds(0));
    if (!hit.ok()) return hit.status();
    found.blocks = hit->hit_blocks;
    lease_ = hit->lease_id;
  }
  found.ever = seen_->Leading(keys);
  return found;
}

absl::StatusOr<std::int64_t> SessionPrefixes::Load(std::span<const std::int64_t> blocks) {
  std::int64_t good = 0;
  if (!blocks.empty()) {
    const GroupBlocks group{.group = 0, .blocks = blocks};
    const auto loaded =
        session_->Load(*cache_, namespace_, {.lease_id = lease_, .groups = std::span(&group, 1)});
    if (loaded.ok()) {
      report_.loaded_pages += loaded->loaded;
      report_.loaded_bytes += loaded->loaded_bytes;
      good = std::ssize(blocks);
      for (const BadBlocks& bad : loaded->bad) {
        report_.bad_pages += std::ssize(bad.block_indexes);
        good = std::min(good, *std::ranges::min_element(bad.block_indexes));
      }
    } else if (ReasonOf(loaded.status()) != "LEASE_NOT_FOUND") {  // which has expired: nothing is loaded
      return loaded.status();
    }
  }
  if (auto s = Drop(); !s.ok()) return s;
  return good;
}

absl::Status SessionPrefixes::Drop() {
  const std::uint64_t lease = std::exchange(lease_, 0);
  return lease == 0 ? absl::OkStatus() : session_->ReleaseLease(lease);
}

absl::Status SessionPrefixes::Publish(const PublishedBlocks& published) {
  const std::int64_t first = published.first_block;
  const std::vector<std::uint64_t> keys = Keys(published.request, first, std::ssize(published.blocks));
  const std::string parent = first == 0 ? "" : Hashes(Keys(published.request, first - 1, 1));
  const std::string hashes = Hashes(keys);
  const GroupBlocks group{.group = 0, .blocks = published.blocks};
  seen_->Add(keys);
  const auto result = session_->Publish(*cache_, namespace_,
                                        {.committed_tokens = published.committed_tokens,
                                         .first_block_index = first,
                                         .parent_hash = parent,
                                         .hashes = hashes,
                                         .groups = std::span(&group, 1)});
  if (result.ok()) {
    report_.stored_pages += result->stored;
    report_.present_pages += result->present;
    report_.dropped_pages += result->dropped;
  } else if (HasNoRoom(result.status())) {
    report_.dropped_pages += std::ssize(published.blocks);
  } else {
    return result.status();
  }
  return absl::OkStatus();
}

std::vector<std::uint64_t> SessionPrefixes::Keys(std::int64_t request, std::int64_t first,
                                                 std::int64_t count) const {
  const TraceRequest& r = requests_[static_cast<std::size_t>(request)];
  const std::int64_t block_size = cache_->geometry.block_size;
  std::vector<std::uint64_t> keys;
  for (std::int64_t block = first; block < first + count; ++block) {
    const bool of_prompt = (block + 1) * block_size <= r.input_length;
    keys.push_back(
        of_prompt ? PromptBlockKey(r, block, block_size)
                  : MixBits(static_cast<std::uint64_t>(request), static_cast<std::uint64_t>(block), 0, 0) |
                        kOutputKey);
  }
  return keys;
}

std::string SessionPrefixes::Hashes(std::span<const std::uint64_t> keys) {
  std::string hashes;
  hashes.reserve(keys.size() * kHashWords * sizeof(std::uint64_t));
  for (const std::uint64_t key : keys) {
    for (std::uint64_t word = 0; word < kHashWords; ++word) {
      const std::uint64_t bits = MixBits(key, word, 0, 0);
      hashes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
    }
  }
  return hashes;
}

}  // namespace kvsummary
