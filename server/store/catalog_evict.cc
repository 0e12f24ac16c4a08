// Which pages go when a tier has no room.
#include <algorithm>
#include <utility>

#include "server/store/catalog.h"
#include "server/store/catalog_update.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kDemotionBatchBytes = std::int64_t{4} << 20;

}  // namespace

bool Catalog::MakeQuota(Namespace& ns, std::int64_t slot_bytes) {
  if (options_.quota_bytes > 0 && slot_bytes > options_.quota_bytes) return false;
  while (options_.quota_bytes > 0 && ns.used_bytes + slot_bytes > options_.quota_bytes) {
    if (!DropOldestOf(ns)) return false;
  }
  return true;
}

Unit Catalog::AllocateIn(std::uint8_t tier, std::int64_t slot_bytes) {
  if (slot_bytes > tiers_[tier].slots.capacity_bytes()) return kNoUnit;
  while (true) {
    if (const Unit unit = tiers_[tier].slots.Allocate(slot_bytes); unit != kNoUnit) return unit;
    if (!EvictFor(tier, slot_bytes, true)) return kNoUnit;
  }
}

// Pages of the same size make room at once; those of another size only when their slab is empty. So a size
// takes its own oldest page, and one of another size goes as well when it is older: in the long run, pages of
// all sizes are as old as each other.
bool Catalog::EvictFor(std::uint8_t tier, std::int64_t slot_bytes, bool may_drop) {
  EvictionOrder& order = tiers_[tier].order;
  const EvictionQueue* oldest = order.Oldest();
  const EvictionQueue* own = order.OldestOf(slot_bytes);
  Namespace* own_namespace = own != nullptr ? own->name_space : nullptr;
  const Entry own_page = own != nullptr ? own->victim : kNoEntry;
  bool evicted = false;
  if (oldest != own) evicted = Evict(*oldest->name_space, oldest->victim, may_drop);
  // The first may have taken the second's page for room in the host tier.
  if (own_namespace != nullptr && Eligible(*own_namespace, own_page) &&
      own_namespace->pages.record(own_page).tier == tier) {
    evicted |= Evict(*own_namespace, own_page, may_drop);
  }
  return evicted;
}

bool Catalog::Evict(Namespace& ns, Entry entry, bool may_drop) {
  const PageRecord& r = ns.pages.record(entry);
  if (r.tier != kHostTier && Demote(ns, entry)) return true;
  if (!may_drop) return false;
  if (r.children > 0) return false;  // they are in the host tier, which has no room
  ++tiers_[r.tier].evicted;
  Lose(ns, entry, true);
  return true;
}

bool Catalog::Demote(Namespace& ns, Entry entry) {
  const Group& group = GroupOf(ns, entry);
  const Unit to = AllocateIn(kHostTier, group.slot_bytes);
  if (to == kNoUnit) return false;
  PageRecord& r = ns.pages.record(entry);
  PageExtra& extra = ns.pages.extra(entry);
  const std::uint8_t from_tier = r.tier;
  PolicyOf(ns, entry).Remove(entry, KeyOf(ns, entry), true);
  demotions_.push_back({ns.shared_from_this(), entry, from_tier, r.unit, to, group.spec.bytes_per_block,
                        extra.checksum, r.has_checksum});
  tiers_[from_tier].slots.Free(r.unit);
  ++tiers_[from_tier].demoted;
  Update(ns, entry, [](PageRecord& changed) { changed.life = PageLife::kDemoting; });
  Place(ns, entry, kHostTier, to);
  return true;
}

bool Catalog::DropOldestOf(Namespace& ns) {
  // From the host tier first: what lies there is older.
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    Entry oldest = kNoEntry;
    for (Group& group : ns.groups) {
      const Entry entry = group.queues[tier].policy->Victim();
      if (entry == kNoEntry || ns.pages.record(entry).children > 0) continue;
      if (oldest == kNoEntry || ns.pages.extra(entry).stamp < ns.pages.extra(oldest).stamp) oldest = entry;
    }
    if (oldest == kNoEntry) continue;
    ++tiers_[tier].evicted;
    Lose(ns, oldest, true);
    return true;
  }
  return false;
}

std::vector<Demotion> Catalog::TakeDemotions() { return std::exchange(demotions_, {}); }

void Catalog::CommitDemotion(const Demotion& demotion, bool good) {
  Namespace& ns = *demotion.name_space;
  const Entry entry = demotion.entry;
  if (!good) {
    Lose(ns, entry, false);
    return;
  }
  ns.pages.extra(entry).checksum = demotion.checksum;
  ns.pages.record(entry).has_checksum = true;
  PolicyOf(ns, entry).Insert(entry, KeyOf(ns, entry));
  Update(ns, entry, [](PageRecord& r) { r.life = PageLife::kStable; });
}

void Catalog::DemoteBelowWatermark(std::uint8_t tier) {
  Tier& t = tiers_[tier];
  if (tier == kHostTier || tiers_[kHostTier].slots.capacity_bytes() == 0) return;
  const auto capacity = static_cast<double>(t.slots.capacity_bytes());
  const auto used = [&] { return static_cast<double>(t.slots.used_bytes()); };
  if (used() > options_.high_watermark * capacity) t.draining = true;
  if (!t.draining) return;
  ApplyTouches();
  const std::int64_t before = t.slots.used_bytes();
  while (used() > options_.low_watermark * capacity && before - t.slots.used_bytes() < kDemotionBatchBytes) {
    if (!EvictFor(tier, 0, false)) return;  // nothing can go down for now
  }
  if (used() <= options_.low_watermark * capacity) t.draining = false;
}

}  // namespace kvsummary
