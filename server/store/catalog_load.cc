// Loading: where leased pages are, and bringing them up.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/store/catalog.h"
#include "server/store/catalog_update.h"
#include "server/store/validate.h"

namespace kvsummary {

absl::Status Catalog::PlanLoad(LoadPlan& plan, Clock::time_point now) {
  ExpireLeases(now);
  ApplyTouches();
  const LoadArgs& args = plan.args;
  const Lease* lease = leases_.Find(args.session, args.lease);
  if (lease == nullptr) {
    return Refuse(Reason::LEASE_NOT_FOUND, "lease_id",
                  absl::StrFormat("the session has no lease %d, or not any more",
                                  static_cast<std::uint64_t>(args.lease)));
  }
  plan.name_space = namespaces_.at(lease->name_space);
  Namespace& ns = *plan.name_space;
  if (args.cache->name_space != ns.id) {
    return Refuse(Reason::NAMESPACE_DIFFERS, "cache", "the cache is bound to another namespace");
  }
  if (auto s = CheckLoad(ns.spec, args); !s.ok()) return s;
  for (std::size_t l = 0; l < args.groups.size(); ++l) {
    const LoadGroup& list = args.groups[l];
    const Lease::Group& leased = lease->groups[static_cast<std::size_t>(list.group)];
    const std::int64_t begin = leased.first_block_index;
    const std::int64_t end = begin + static_cast<std::int64_t>(leased.entries.size());
    for (std::size_t i = 0; i < list.block_ids.size(); ++i) {
      // The request's index may be any number: nothing is added to it before it is known to be small.
      const bool leased_too =
          list.first_block_index >= begin && list.first_block_index < end - static_cast<std::int64_t>(i);
      if (list.block_ids[i] >= 0 && !leased_too) {
        return Refuse(
            Reason::BLOCK_NOT_LEASED, absl::StrCat("groups[", l, "].block_ids[", i, "]"),
            absl::StrFormat("the lease covers blocks %d to %d of group %d", begin, end - 1, list.group));
      }
    }
  }

  loads_.push_back(&plan);
  plan.device_tier = TierOf(args.cache->device);
  plan.result.bad.resize(args.groups.size());
  for (std::size_t l = 0; l < args.groups.size(); ++l) {
    const LoadGroup& list = args.groups[l];
    const Lease::Group& leased = lease->groups[static_cast<std::size_t>(list.group)];
    for (std::size_t i = 0; i < list.block_ids.size(); ++i) {
      if (list.block_ids[i] < 0) continue;
      const auto index = static_cast<std::int64_t>(i);
      const Entry entry =
          leased.entries[static_cast<std::size_t>(list.first_block_index - leased.first_block_index + index)];
      const PageRecord& r = ns.pages.record(entry);
      const bool elsewhere = r.tier != kHostTier && r.tier != plan.device_tier;
      // A page of another device comes through the host tier, if that has room for it.
      if (!Visible(r.life) || (elsewhere && !Demote(ns, entry))) {
        plan.result.bad[l].push_back(index);
        continue;
      }
      Pin(ns, entry);
      const bool from_host = r.tier == kHostTier;
      if (from_host) ++ns.pages.extra(entry).readers;
      plan.any_from_host |= from_host;
      plan.any_arriving |= r.life == PageLife::kDemoting;
      plan.pages.push_back(
          {.list = l, .index = index, .entry = entry, .from_host = from_host, .unit = r.unit});
    }
  }
  return absl::OkStatus();
}

void Catalog::DropBad(LoadPlan& plan, std::size_t p) {
  const LoadPlan::Page page = plan.pages[p];
  Namespace& ns = *plan.name_space;
  ApplyTouches();
  plan.pages.erase(plan.pages.begin() + static_cast<std::ptrdiff_t>(p));
  std::vector<std::int64_t>& bad = plan.result.bad[page.list];
  bad.insert(std::lower_bound(bad.begin(), bad.end(), page.index), page.index);
  --ns.pages.extra(page.entry).readers;
  if (Visible(ns.pages.record(page.entry).life)) {
    ++totals_.bad_pages;
    Lose(ns, page.entry, false);
  }
  Unpin(ns, page.entry);
}

void Catalog::PlanPromotions(LoadPlan& plan) {
  if (plan.device_tier == kHostTier) return;
  Namespace& ns = *plan.name_space;
  ApplyTouches();
  for (LoadPlan::Page& page : plan.pages) {
    if (!page.from_host || ns.pages.record(page.entry).life != PageLife::kStable) continue;
    const std::int64_t bytes = GroupOf(ns, page.entry).slot_bytes;
    page.promote_to = AllocateIn(plan.device_tier, bytes);
    if (page.promote_to == kNoUnit) return;
    ns.used_bytes += bytes;
    tiers_[plan.device_tier].promotion_bytes += bytes;
    Update(ns, page.entry, [](PageRecord& r) { r.life = PageLife::kPromoting; });
  }
}

void Catalog::CommitLoad(LoadPlan& plan, bool good) {
  Namespace& ns = *plan.name_space;
  ApplyTouches();
  loads_.erase(std::find(loads_.begin(), loads_.end(), &plan));
  // The policy of the upper tier hears of a prefix from its tail to its head.
  for (auto page = plan.pages.rbegin(); page != plan.pages.rend(); ++page) {
    const Entry entry = page->entry;
    PageExtra& extra = ns.pages.extra(entry);
    if (page->promote_to != kNoUnit) {
      const PageRecord& r = ns.pages.record(entry);
      const std::int64_t bytes = GroupOf(ns, entry).slot_bytes;
      Tier& upper = tiers_[plan.device_tier];
      upper.promotion_bytes -= bytes;
      ns.used_bytes -= bytes;
      // Others may read the slot of the host tier still: then the page stays there.
      if (good && r.life == PageLife::kPromoting && extra.readers == 1) {
        const std::uint64_t key = KeyOf(ns, entry);
        PolicyOf(ns, entry).Remove(entry, key, false);
        tiers_[kHostTier].slots.Free(r.unit);
        Place(ns, entry, plan.device_tier, page->promote_to);
        PolicyOf(ns, entry).Insert(entry, key);
        ++upper.promoted;
      } else {
        upper.slots.Free(page->promote_to);
      }
      if (r.life == PageLife::kPromoting)
        Update(ns, entry, [](PageRecord& p) { p.life = PageLife::kStable; });
    }
    if (page->from_host) --extra.readers;
    if (good) {
      ++plan.result.pages;
      plan.result.pages_from_device += page->from_host ? 0 : 1;
      plan.result.bytes += GroupOf(ns, entry).spec.bytes_per_block;
    }
    Unpin(ns, entry);
  }
  totals_.loaded_pages += plan.result.pages;
  totals_.loaded_bytes += plan.result.bytes;
}

}  // namespace kvsummary
