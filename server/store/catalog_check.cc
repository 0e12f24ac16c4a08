// Check: everything that is kept twice is compared.
#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/store/catalog.h"

namespace kvsummary {

// What the pages themselves say.
struct Catalog::Found {
  struct Counts {
    std::uint32_t pins = 0;
    std::uint32_t children = 0;
    std::uint32_t upper_children = 0;
    std::uint32_t readers = 0;
  };
  struct Slot {
    std::uint8_t tier;
    Unit unit;
    std::int64_t bytes;
  };
  struct TierSums {
    std::int64_t pinned_bytes = 0;
    std::int64_t promotion_bytes = 0;
    std::int64_t pages = 0;
  };

  explicit Found(std::size_t tier_count) : tiers(tier_count) {}
  void Problem(const Namespace& ns, const std::string& what) {
    problems.push_back(absl::StrFormat("namespace %d: %s", static_cast<std::uint64_t>(ns.id), what));
  }

  std::vector<Counts> counts;  // by entry, of the namespace at hand
  std::map<std::pair<std::uint8_t, std::uint8_t>, std::int64_t>
      ordered;                        // by group and tier: those for a policy
  std::vector<std::int64_t> visible;  // by group
  std::int64_t used_bytes = 0;        // the same
  std::int64_t held_bytes = 0;
  std::vector<Slot> slots;
  std::vector<TierSums> tiers;
  std::vector<std::string> problems;
};

void Catalog::CheckPage(const Namespace& ns, Entry entry, Found& found) const {
  const PageRecord& r = ns.pages.record(entry);
  const PageExtra& extra = ns.pages.extra(entry);
  const Group& group = ns.groups[r.group];
  const Found::Counts& counts = found.counts[entry];
  const auto problem = [&](const std::string& what) {
    found.Problem(ns, absl::StrFormat("page %d (group %d, block %d, tier %d, life %d): %s", entry, r.group,
                                      r.block, r.tier, static_cast<int>(r.life), what));
  };
  if (r.pins != counts.pins)
    problem(absl::StrFormat("%d pins; leases and plans have %d", r.pins, counts.pins));
  if (r.children != counts.children || extra.upper_children != counts.upper_children) {
    problem(absl::StrFormat("%d children, %d of them above; there are %d, %d", r.children,
                            extra.upper_children, counts.children, counts.upper_children));
  }
  if (extra.readers != counts.readers)
    problem(absl::StrFormat("%d readers, not %d", extra.readers, counts.readers));
  if (r.parent != kNoEntry) {
    const PageRecord& parent = ns.pages.record(r.parent);
    if (parent.life == PageLife::kFree || parent.group != r.group || parent.block + 1 != r.block ||
        KeyOf(ns, r.parent) != r.parent_key) {
      problem("its parent is another page");
    }
  }
  const Entry indexed = FindPage(ns, group, KeyOf(ns, entry), ns.pages.hash(entry));
  if (Visible(r.life) != (indexed == entry)) problem(absl::StrFormat("the index has %d", indexed));
  if (Visible(r.life)) ++found.visible[r.group];
  if (InPolicy(r.life)) ++found.ordered[{r.group, r.tier}];
  if (Visible(r.life) && r.unit == kNoUnit) problem("it has no slot");
  if (r.tier == kHostTier && InPolicy(r.life) && !r.has_checksum) problem("it has no checksum");
  if (r.unit == kNoUnit) return;
  found.used_bytes += group.slot_bytes;
  found.slots.push_back({r.tier, r.unit, group.slot_bytes});
  Found::TierSums& tier = found.tiers[r.tier];
  ++tier.pages;
  if (!Held(r)) return;
  tier.pinned_bytes += group.slot_bytes;
  found.held_bytes += group.slot_bytes;
}

void Catalog::CheckNamespace(const Namespace& ns, Found& found) const {
  found.counts.assign(ns.pages.end(), {});
  found.ordered.clear();
  found.visible.assign(ns.groups.size(), 0);
  found.used_bytes = 0;
  found.held_bytes = 0;
  leases_.ForEach([&](const Lease& lease) {
    if (lease.name_space != ns.id) return;
    for (const Entry e : lease.pinned) ++found.counts[e].pins;
  });
  for (const PublishPlan* plan : publishes_) {
    if (plan->name_space.get() != &ns) continue;
    for (const PublishPlan::List& list : plan->lists) {
      if (list.parent != kNoEntry) ++found.counts[list.parent].pins;
      for (const Entry e : list.entries) {
        if (e != kNoEntry) ++found.counts[e].pins;
      }
    }
  }
  for (const LoadPlan* plan : loads_) {
    if (plan->name_space.get() != &ns) continue;
    for (const LoadPlan::Page& page : plan->pages) {
      ++found.counts[page.entry].pins;
      found.counts[page.entry].readers += page.from_host ? 1 : 0;
      if (page.promote_to == kNoUnit) continue;
      const std::int64_t bytes = ns.groups[ns.pages.record(page.entry).group].slot_bytes;
      found.slots.push_back({plan->device_tier, page.promote_to, bytes});
      found.tiers[plan->device_tier].promotion_bytes += bytes;
      found.used_bytes += bytes;
    }
  }
  for (Entry e = 0; e < ns.pages.end(); ++e) {
    const PageRecord& r = ns.pages.record(e);
    if (r.life == PageLife::kFree || r.parent == kNoEntry) continue;
    ++found.counts[r.parent].children;
    if (r.unit != kNoUnit && r.tier != kHostTier) ++found.counts[r.parent].upper_children;
  }
  for (Entry e = 0; e < ns.pages.end(); ++e) {
    if (ns.pages.record(e).life != PageLife::kFree) CheckPage(ns, e, found);
  }

  std::int64_t visible = 0;
  for (std::size_t g = 0; g < ns.groups.size(); ++g) {
    const Group& group = ns.groups[g];
    visible += found.visible[g];
    if (static_cast<std::int64_t>(group.index.size()) != found.visible[g]) {
      found.Problem(ns, absl::StrFormat("the index of group %d has %d pages, %d are visible", g,
                                        group.index.size(), found.visible[g]));
    }
    for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
      const std::int64_t want =
          found.ordered[{static_cast<std::uint8_t>(g), static_cast<std::uint8_t>(tier)}];
      if (group.queues[tier].policy->size() != want) {
        found.Problem(ns, absl::StrFormat("the policy of group %d in tier %s has %d pages, not %d", g,
                                          tiers_[tier].name, group.queues[tier].policy->size(), want));
      }
    }
  }
  if (visible != ns.visible || found.used_bytes != ns.used_bytes || found.held_bytes != ns.held_bytes) {
    found.Problem(
        ns, absl::StrFormat("it counts %d visible pages and %d bytes, %d of them held; there are %d, %d, %d",
                            ns.visible, ns.used_bytes, ns.held_bytes, visible, found.used_bytes,
                            found.held_bytes));
  }
}

void Catalog::CheckTiers(Found& found) const {
  std::sort(found.slots.begin(), found.slots.end(),
            [](const auto& a, const auto& b) { return std::tie(a.tier, a.unit) < std::tie(b.tier, b.unit); });
  std::vector<std::int64_t> used(tiers_.size());
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    const Found::Slot& slot = found.slots[i];
    used[slot.tier] += slot.bytes;
    const bool more = i + 1 < found.slots.size() && found.slots[i + 1].tier == slot.tier;
    if (more && slot.unit + slot.bytes / kPageUnit > found.slots[i + 1].unit) {
      found.problems.push_back(
          absl::StrFormat("tier %s: two slots overlap at unit %d", tiers_[slot.tier].name, slot.unit));
    }
  }
  for (std::size_t t = 0; t < tiers_.size(); ++t) {
    const Tier& tier = tiers_[t];
    const Found::TierSums& sums = found.tiers[t];
    const std::int64_t counted = tier.slots.used_bytes();
    const std::int64_t pinned = tier.pinned_bytes + tier.promotion_bytes;
    tier.slots.Check(tier.name, found.problems);
    if (used[t] != counted || sums.pinned_bytes + sums.promotion_bytes != pinned || pinned > counted ||
        counted > tier.slots.capacity_bytes() || sums.pages != tier.pages) {
      found.problems.push_back(absl::StrFormat(
          "tier %s counts %d pages, %d bytes, %d of them pinned; there are %d, %d, %d", tier.name, tier.pages,
          counted, pinned, sums.pages, used[t], sums.pinned_bytes + sums.promotion_bytes));
    }
  }
}

std::vector<std::string> Catalog::Check() const {
  Found found(tiers_.size());
  for (const auto& [id, ns] : namespaces_) CheckNamespace(*ns, found);
  CheckTiers(found);
  return std::move(found.problems);
}

}  // namespace kvsummary
