// Lookup: the longest hit that all groups admit.
//
// Pages that were published together have records side by side: so behind a page, the next record is compared
// first, and as long as it is the page of the next block neither keys nor the index are needed. Other hashes
// are looked up in batches: first all slots of the index are fetched from memory, then all records, then they
// are compared. So the time of a long lookup is that of memory's bandwidth, not of its latency.
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

constexpr std::size_t kBatch = 64;
constexpr std::int64_t kMaxUsesPages = std::int64_t{1} << 22;  // that wait for the policies

// The first block that a hit of so many blocks needs of a WINDOW group.
std::int64_t FirstOfWindow(const Namespace& ns, const GroupSpec& spec, std::int64_t blocks) {
  const std::int64_t block_size = ns.spec.key.block_size;
  return std::max<std::int64_t>(0, blocks * block_size - spec.window_tokens + 1) / block_size;
}

}  // namespace

const char* Catalog::HashAt(const Namespace& ns, std::int64_t block) const {
  return hashes_ + static_cast<std::size_t>(block) * ns.pages.hash_width();
}

void Catalog::ExtendKeys(const Namespace& ns, std::int64_t count) {
  auto i = static_cast<std::int64_t>(keys_.size());
  if (count <= i) return;
  keys_.resize(static_cast<std::size_t>(count));
  for (; i < count; ++i) keys_[static_cast<std::size_t>(i)] = KeyOf(ns, HashAt(ns, i));
}

// Whether the record is of the page of this block: at its index, behind the hash before it.
bool Catalog::Follows(const PageRecord& r, std::int64_t block) const {
  const auto b = static_cast<std::size_t>(block);
  return std::int64_t{r.block} == block && r.parent_key == (b > 0 ? keys_[b - 1] : 0);
}

// Appends the pages of the blocks behind the last match as long as their records follow its record.
void Catalog::MatchNeighbours(const Namespace& ns, const Group& group, std::size_t count,
                              Matches& matches) const {
  constexpr Entry kAhead = 16;  // records to be fetched from memory
  const auto index = static_cast<std::uint8_t>(&group - ns.groups.data());
  std::size_t block = matches.entries.size();
  Entry entry = matches.entries.back() + 1;
  for (; block < count && entry < ns.pages.end(); ++block, ++entry) {
    if (entry + kAhead < ns.pages.end()) __builtin_prefetch(&ns.pages.record(entry + kAhead));
    const PageRecord& r = ns.pages.record(entry);
    // Its parent is the page before: so it is at the right index, behind the right hash.
    if (r.parent != entry - 1 || r.group != index || !Visible(r.life) ||
        !ns.pages.HashIs(r, HashAt(ns, static_cast<std::int64_t>(block)))) {
      return;
    }
    matches.entries.push_back(entry);
    matches.tiers.push_back(r.tier);
  }
}

// Appends the pages of a batch of blocks behind the last match, as far as they match: whether all do.
bool Catalog::MatchBatch(const Namespace& ns, const Group& group, std::size_t end, Matches& matches) {
  Entry guesses[kBatch];
  const PageRecord* records[kBatch];
  const std::size_t begin = matches.entries.size();
  const std::size_t batch = end - begin;
  ExtendKeys(ns, static_cast<std::int64_t>(end));
  const std::uint64_t* keys = keys_.data() + begin;
  for (std::size_t i = 0; i < batch; ++i) group.index.Prefetch(keys[i]);
  for (std::size_t i = 0; i < batch; ++i) {
    guesses[i] = group.index.Guess(keys[i]);
    if (guesses[i] == kNoEntry) continue;
    records[i] = &ns.pages.record(guesses[i]);
    __builtin_prefetch(records[i]);
  }
  for (std::size_t i = 0; i < batch; ++i) {
    const auto block = static_cast<std::int64_t>(begin + i);
    const char* hash = HashAt(ns, block);
    Entry entry = guesses[i];
    if (entry != kNoEntry && !ns.pages.HashIs(*records[i], hash)) {
      entry = FindPage(ns, group, keys[i], hash);
      if (entry != kNoEntry) records[i] = &ns.pages.record(entry);
    }
    if (entry == kNoEntry || !Follows(*records[i], block)) return false;
    if (block > 0 && records[i]->parent != matches.entries.back()) matches.breaks.push_back(begin + i);
    matches.entries.push_back(entry);
    matches.tiers.push_back(records[i]->tier);
  }
  return true;
}

// Appends the pages of the leading blocks that match, of at most `count`.
void Catalog::MatchRun(const Namespace& ns, const Group& group, std::int64_t count, Matches& matches) {
  const auto end = static_cast<std::size_t>(count);
  matches.entries.reserve(end);
  matches.tiers.reserve(end);
  while (matches.entries.size() < end) {
    const std::size_t begin = matches.entries.size();
    if (!MatchBatch(ns, group, std::min(end, begin + kBatch), matches)) return;
    // Where the last two are no neighbours the next one hardly is.
    const std::size_t last = matches.entries.size() - 1;
    if (last > begin && matches.entries[last] == matches.entries[last - 1] + 1) {
      MatchNeighbours(ns, group, end, matches);
    }
  }
}

// The most blocks, at most `blocks`, of a hit whose window is there. The matches are those of blocks from
// known_from on, as far as they have been looked up, and are kept from call to call.
std::int64_t Catalog::MatchWindow(const Namespace& ns, const Group& group, std::int64_t blocks,
                                  std::int64_t count, Matches& matches) {
  const std::int64_t lookahead = group.spec.lookahead_blocks;
  blocks = std::min(blocks, count - lookahead);
  std::int64_t& known_from = matches.known_from;
  known_from = std::min(known_from, blocks + lookahead);  // what lies behind is not needed any more
  while (blocks > 0) {
    const std::int64_t first = FirstOfWindow(ns, group.spec, blocks);
    std::int64_t missing = -1;
    for (std::int64_t i = blocks - 1 + lookahead; i >= first && missing < 0; --i) {
      for (; known_from > i; --known_from) {
        const auto k = static_cast<std::size_t>(known_from - 1);
        const Entry entry = FindPage(ns, group, keys_[k], HashAt(ns, known_from - 1));
        if (entry == kNoEntry || !Follows(ns.pages.record(entry), known_from - 1)) continue;
        matches.entries[k] = entry;
        matches.tiers[k] = ns.pages.record(entry).tier;
      }
      if (matches.entries[static_cast<std::size_t>(i)] == kNoEntry) missing = i;
    }
    if (missing < 0) return blocks;
    blocks = std::min(blocks - 1, missing - lookahead);
  }
  return 0;
}

// Pins pages of a hit: those of a window each, of a prefix the last one, and every other one that is not the
// parent of the next.
void Catalog::PinHit(Namespace& ns, const Matches& matches, bool window, std::int64_t first,
                     std::int64_t blocks, std::vector<Entry>& pinned) {
  const auto pin = [&](std::int64_t block) {
    const Entry entry = matches.entries[static_cast<std::size_t>(block)];
    Pin(ns, entry);
    pinned.push_back(entry);
    uses_.push_back({&ns, entry, !window});
  };
  uses_pages_ += blocks - first;
  if (window) {
    for (std::int64_t i = first; i < blocks; ++i) pin(i);
    return;
  }
  // The policies hear of a prefix from its tail on.
  pin(blocks - 1);
  for (auto at = matches.breaks.rbegin(); at != matches.breaks.rend(); ++at) {
    if (static_cast<std::int64_t>(*at) < blocks) pin(static_cast<std::int64_t>(*at) - 1);
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
  if (uses_pages_ > kMaxUsesPages) ApplyTouches();

  hashes_ = args.hashes.data();
  keys_.clear();
  std::int64_t blocks = *count;
  std::vector<Matches> groups(ns.groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Group& group = ns.groups[g];
    if (group.spec.kind != GroupKind::kFull) continue;
    const std::int64_t lookahead = group.spec.lookahead_blocks;
    MatchRun(ns, group, std::min(*count, blocks + lookahead), groups[g]);
    blocks = std::min(blocks, static_cast<std::int64_t>(groups[g].entries.size()) - lookahead);
    if (blocks <= 0) return Hit{};
  }
  // Each window may shorten the hit, until all agree.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (ns.groups[g].spec.kind != GroupKind::kWindow) continue;
    ExtendKeys(ns, *count);
    groups[g].known_from = *count;
    groups[g].entries.resize(static_cast<std::size_t>(*count), kNoEntry);
    groups[g].tiers.resize(static_cast<std::size_t>(*count));
  }
  for (std::int64_t before = -1; before != blocks;) {
    before = blocks;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (ns.groups[g].spec.kind != GroupKind::kWindow) continue;
      blocks = MatchWindow(ns, ns.groups[g], blocks, *count, groups[g]);
      if (blocks <= 0) return Hit{};
    }
  }

  const auto first_of = [&](std::size_t g) {
    const GroupSpec& spec = ns.groups[g].spec;
    return spec.kind == GroupKind::kWindow ? FirstOfWindow(ns, spec, blocks) : 0;
  };
  std::int64_t pages = leases_.PagesOf(args.session);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (ns.groups[g].spec.kind != GroupKind::kRing) pages += blocks - first_of(g);
  }
  if (pages > kMaxLeasedPages) {
    return Refuse(
        Reason::SESSION_LIMIT, "session_id",
        absl::StrFormat("the session would have leases on %d pages; at most %d", pages, kMaxLeasedPages));
  }

  Hit hit;
  hit.blocks = blocks;
  hit.lease_time = args.lease.count() > 0 ? std::min(args.lease, options_.max_lease) : options_.max_lease;
  auto lease = std::make_unique<Lease>();
  lease->session = args.session;
  lease->name_space = ns.id;
  lease->deadline = now + hit.lease_time;
  const std::uint8_t device_tier = TierOf(args.device);
  lease->groups.resize(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const GroupSpec& spec = ns.groups[g].spec;
    if (spec.kind == GroupKind::kRing) continue;
    const bool window = spec.kind == GroupKind::kWindow;
    const std::int64_t first = first_of(g);
    Matches& matches = groups[g];
    PinHit(ns, matches, window, first, blocks, lease->pinned);
    GroupHit& counts = hit.groups.emplace_back();
    counts.group = static_cast<std::int32_t>(g);
    counts.first_block_index = first;
    const auto begin = matches.tiers.begin();
    counts.host_pages = std::count(begin + first, begin + blocks, kHostTier);
    if (device_tier != kHostTier)
      counts.device_pages = std::count(begin + first, begin + blocks, device_tier);
    counts.elsewhere_pages = blocks - first - counts.host_pages - counts.device_pages;
    lease->groups[g].first_block_index = first;
    std::vector<Entry>& entries = lease->groups[g].entries = std::move(matches.entries);
    entries.resize(static_cast<std::size_t>(blocks));
    entries.erase(entries.begin(), entries.begin() + first);
  }
  hit.lease = leases_.Add(std::move(lease)).id;
  totals_.hit_blocks += hit.blocks;
  return hit;
}

}  // namespace kvsummary
