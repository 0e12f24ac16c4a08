// Lookup: the longest hit that all groups admit.
//
// Hashes are looked up in batches: first all slots of the index are fetched from memory, then all records,
// then they are compared. So the time of a long lookup is that of memory's bandwidth, not of its latency.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/store/catalog.h"
#include "server/store/catalog_update.h"
#include "server/store/hashing.h"
#include "server/store/validate.h"

namespace kvsummary {
namespace {

constexpr std::size_t kMaxUses = 65536;  // that wait for the policies

}  // namespace

const char* Catalog::HashAt(const Namespace& ns, std::int64_t block) const {
  return hashes_ + static_cast<std::size_t>(block) * ns.pages.hash_width();
}

void Catalog::ExtendKeys(const Namespace& ns, std::int64_t count) {
  for (auto i = static_cast<std::int64_t>(keys_.size()); i < count; ++i) {
    keys_.push_back(KeyOf(ns, HashAt(ns, i)));
  }
}

// The page of a block's hash that follows the hash before it. `guess` is what the index has under its key.
Entry Catalog::Match(const Namespace& ns, const Group& group, std::int64_t block, Entry guess) const {
  if (guess == kNoEntry) return kNoEntry;
  const auto b = static_cast<std::size_t>(block);
  const char* hash = HashAt(ns, block);
  const Entry entry = ns.pages.HashIs(guess, hash) ? guess : FindPage(ns, group, keys_[b], hash);
  if (entry == kNoEntry) return kNoEntry;
  const PageRecord& r = ns.pages.record(entry);
  return std::int64_t{r.block} == block && r.parent_key == (b > 0 ? keys_[b - 1] : 0) ? entry : kNoEntry;
}

// The entries of the leading blocks that match, of at most `count`.
void Catalog::MatchRun(const Namespace& ns, const Group& group, std::int64_t count,
                       std::vector<Entry>& entries) {
  constexpr auto kBatch = std::tuple_size_v<decltype(guesses_)>;
  entries.reserve(static_cast<std::size_t>(count));
  for (std::int64_t begin = 0; begin < count; begin += kBatch) {
    const std::int64_t end = std::min<std::int64_t>(count, begin + kBatch);
    ExtendKeys(ns, end);
    for (std::int64_t i = begin; i < end; ++i) group.index.Prefetch(keys_[static_cast<std::size_t>(i)]);
    for (std::int64_t i = begin; i < end; ++i) {
      const Entry guess = group.index.Guess(keys_[static_cast<std::size_t>(i)]);
      guesses_[static_cast<std::size_t>(i - begin)] = guess;
      if (guess != kNoEntry) ns.pages.Prefetch(guess);
    }
    for (std::int64_t i = begin; i < end; ++i) {
      const Entry entry = Match(ns, group, i, guesses_[static_cast<std::size_t>(i - begin)]);
      if (entry == kNoEntry) return;
      entries.push_back(entry);
    }
  }
}

// The most blocks, at most `blocks`, of a hit whose window is there. entries[i] holds the page of block i for
// known_from <= i, as far as it has been looked up; both are kept from call to call.
std::int64_t Catalog::MatchWindow(const Namespace& ns, const Group& group, std::int64_t blocks,
                                  std::int64_t count, std::vector<Entry>& entries, std::int64_t& known_from) {
  const std::int64_t block_size = ns.spec.key.block_size;
  const std::int64_t lookahead = group.spec.lookahead_blocks;
  blocks = std::min(blocks, count - lookahead);
  known_from = std::min(known_from, blocks + lookahead);  // what lies behind is not needed any more
  while (blocks > 0) {
    const std::int64_t first =
        std::max<std::int64_t>(0, blocks * block_size - group.spec.window_tokens + 1) / block_size;
    std::int64_t missing = -1;
    for (std::int64_t i = blocks - 1 + lookahead; i >= first && missing < 0; --i) {
      for (; known_from > i; --known_from) {
        const auto k = static_cast<std::size_t>(known_from - 1);
        entries[k] = Match(ns, group, known_from - 1, group.index.Guess(keys_[k]));
      }
      if (entries[static_cast<std::size_t>(i)] == kNoEntry) missing = i;
    }
    if (missing < 0) return blocks;
    blocks = std::min(blocks - 1, missing - lookahead);
  }
  return 0;
}

void Catalog::PinHit(Namespace& ns, const Group& group, const Lease::Group& leased,
                     std::vector<Entry>& pinned) {
  const auto pin = [&](Entry entry, bool prefix) {
    Pin(ns, entry);
    pinned.push_back(entry);
    uses_.push_back({&ns, entry, prefix});
  };
  const std::vector<Entry>& entries = leased.entries;
  if (group.spec.kind == GroupKind::kWindow) {
    for (const Entry entry : entries) pin(entry, false);
    return;
  }
  pin(entries.back(), true);
  for (std::size_t i = entries.size() - 1; i-- > 0;) {
    if (ns.pages.record(entries[i + 1]).parent != entries[i]) pin(entries[i], true);
  }
}

absl::StatusOr<Hit> Catalog::Lookup(const LookupArgs& args, Clock::time_point now) {
  const auto found = Find(args.session, args.name_space);
  if (!found.ok()) return found.status();
  Namespace& ns = **found;
  const auto count = CountHashes(ns.spec, args.hashes);
  if (!count.ok()) return count.status();
  ExpireLeases(now);
  if (leases_.CountOf(args.session) >= static_cast<std::size_t>(kMaxLeasesPerSession)) {
    return Refuse(Reason::SESSION_LIMIT, "session_id",
                  absl::StrFormat("the session has %d leases already", kMaxLeasesPerSession));
  }
  ++totals_.lookups;
  totals_.lookup_blocks += *count;
  if (uses_.size() > kMaxUses) ApplyTouches();

  hashes_ = args.hashes.data();
  keys_.clear();
  std::int64_t blocks = *count;
  std::vector<Lease::Group> groups(ns.groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Group& group = ns.groups[g];
    if (group.spec.kind != GroupKind::kFull) continue;
    const std::int64_t lookahead = group.spec.lookahead_blocks;
    MatchRun(ns, group, std::min(*count, blocks + lookahead), groups[g].entries);
    blocks = std::min(blocks, static_cast<std::int64_t>(groups[g].entries.size()) - lookahead);
    if (blocks <= 0) return Hit{};
  }
  // Each window may shorten the hit, until all agree.
  std::vector<std::int64_t> known_from(groups.size(), *count);
  ExtendKeys(ns, *count);
  for (std::int64_t before = -1; before != blocks;) {
    before = blocks;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (ns.groups[g].spec.kind != GroupKind::kWindow) continue;
      groups[g].entries.resize(static_cast<std::size_t>(*count), kNoEntry);
      blocks = MatchWindow(ns, ns.groups[g], blocks, *count, groups[g].entries, known_from[g]);
      if (blocks <= 0) return Hit{};
    }
  }

  Hit hit;
  hit.blocks = blocks;
  hit.lease_time = args.lease.count() > 0 ? std::min(args.lease, options_.max_lease) : options_.max_lease;
  auto lease = std::make_unique<Lease>();
  lease->session = args.session;
  lease->name_space = ns.id;
  lease->deadline = now + hit.lease_time;
  const std::uint8_t device_tier = TierOf(args.device);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const GroupSpec& spec = ns.groups[g].spec;
    if (spec.kind == GroupKind::kRing) continue;
    Lease::Group& leased = groups[g];
    leased.entries.resize(static_cast<std::size_t>(blocks));
    if (spec.kind == GroupKind::kWindow) {
      const std::int64_t block_size = ns.spec.key.block_size;
      leased.first_block_index =
          std::max<std::int64_t>(0, blocks * block_size - spec.window_tokens + 1) / block_size;
      leased.entries.erase(leased.entries.begin(), leased.entries.begin() + leased.first_block_index);
    }
    GroupHit& counts = hit.groups.emplace_back();
    counts.group = static_cast<std::int32_t>(g);
    counts.first_block_index = leased.first_block_index;
    for (const Entry entry : leased.entries) {
      const std::uint8_t tier = ns.pages.record(entry).tier;
      ++(tier == kHostTier     ? counts.host_pages
         : tier == device_tier ? counts.device_pages
                               : counts.elsewhere_pages);
    }
    PinHit(ns, ns.groups[g], leased, lease->pinned);
  }
  lease->groups = std::move(groups);
  hit.lease = leases_.Add(std::move(lease)).id;
  totals_.hit_blocks += hit.blocks;
  return hit;
}

}  // namespace kvsummary
