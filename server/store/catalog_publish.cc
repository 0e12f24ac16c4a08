// Publishing: slots for what is not there yet, and its way into the index.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/store/catalog.h"
#include "server/store/catalog_update.h"
#include "server/store/validate.h"

namespace kvsummary {
namespace {

const char* HashOf(const PublishPlan& plan, std::size_t i) {
  return plan.args.hashes.data() + i * plan.name_space->pages.hash_width();
}

}  // namespace

absl::Status Catalog::CheckDistinct(const PublishPlan& plan) const {
  std::vector<std::uint64_t> sorted = plan.keys;
  std::sort(sorted.begin(), sorted.end());
  // Equal keys of different hashes would be a collision of 64 bits.
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return absl::OkStatus();
  return Refuse(Reason::CHAIN_MISMATCH, "hashes", "a hash is there twice");
}

absl::Status Catalog::FindPresent(PublishPlan& plan) const {
  const Namespace& ns = *plan.name_space;
  for (std::size_t l = 0; l < plan.lists.size(); ++l) {
    const GroupBlocks& blocks = plan.args.groups[l];
    const Group& group = ns.groups[static_cast<std::size_t>(blocks.group)];
    PublishPlan::List& list = plan.lists[l];
    list.entries.assign(blocks.block_ids.size(), kNoEntry);
    for (std::size_t i = 0; i < list.entries.size(); ++i) {
      const Entry entry = FindPage(ns, group, plan.keys[i + 1], HashOf(plan, i));
      if (entry == kNoEntry) continue;
      const PageRecord& r = ns.pages.record(entry);
      const auto block = plan.args.first_block_index + static_cast<std::int64_t>(i);
      if (std::int64_t{r.block} != block || r.parent_key != plan.keys[i]) {
        return Refuse(Reason::CHAIN_MISMATCH, absl::StrCat("hashes[", i, "]"),
                      absl::StrFormat("the hash of block %d is stored as block %d%s", block, r.block,
                                      std::int64_t{r.block} == block ? " behind another hash" : ""));
      }
      list.entries[i] = entry;
    }
    if (group.spec.kind == GroupKind::kFull && plan.args.first_block_index > 0) {
      list.parent = FindPage(ns, group, plan.keys[0], plan.args.parent_hash.data());
    }
  }
  return absl::OkStatus();
}

absl::Status Catalog::PlanPublish(PublishPlan& plan) {
  const auto found = Find(plan.args.session, plan.args.name_space);
  if (!found.ok()) return found.status();
  plan.name_space = *found;
  Namespace& ns = *plan.name_space;
  if (plan.args.cache->name_space != ns.id) {
    return Refuse(Reason::NAMESPACE_DIFFERS, "cache", "the cache is bound to another namespace");
  }
  if (auto s = CheckPublish(ns.spec, plan.args); !s.ok()) return s;

  const std::size_t count = plan.args.hashes.size() / ns.pages.hash_width();
  plan.keys.resize(count + 1);
  plan.keys[0] = plan.args.first_block_index > 0 ? KeyOf(ns, plan.args.parent_hash.data()) : 0;
  for (std::size_t i = 0; i < count; ++i) plan.keys[i + 1] = KeyOf(ns, HashOf(plan, i));
  plan.lists.resize(plan.args.groups.size());
  if (auto s = CheckDistinct(plan); !s.ok()) return s;
  if (auto s = FindPresent(plan); !s.ok()) return s;

  ApplyTouches();
  plan.tier = TierOf(plan.args.cache->device);
  for (const PublishPlan::List& list : plan.lists) {
    if (list.parent != kNoEntry) Pin(ns, list.parent);
    for (const Entry e : list.entries) {
      if (e != kNoEntry) Pin(ns, e);
    }
  }
  publishes_.push_back(&plan);
  bool over_quota = false;
  for (std::size_t l = 0; l < plan.lists.size(); ++l) PlanList(plan, l, over_quota);
  const auto has_page = [](const PublishPlan::List& list) { return !list.pages.empty(); };
  if (plan.result.dropped == 0 || plan.result.present > 0 ||
      std::any_of(plan.lists.begin(), plan.lists.end(), has_page)) {
    return absl::OkStatus();
  }
  CommitPublish(plan, false);
  if (over_quota) {
    return Refuse(Reason::QUOTA_EXCEEDED, "namespace_id",
                  absl::StrFormat("%d of the namespace's %d bytes are used, and none of its pages can go",
                                  ns.used_bytes, options_.quota_bytes));
  }
  return Refuse(Reason::STORE_FULL, "",
                absl::StrFormat("no page of the %s tier's %d bytes can go", tiers_[plan.tier].name,
                                tiers_[plan.tier].slots.capacity_bytes()));
}

void Catalog::PlanList(PublishPlan& plan, std::size_t l, bool& over_quota) {
  Namespace& ns = *plan.name_space;
  const GroupBlocks& blocks = plan.args.groups[l];
  PublishPlan::List& list = plan.lists[l];
  const Group& group = ns.groups[static_cast<std::size_t>(blocks.group)];
  bool room = true;
  for (std::size_t i = 0; i < list.entries.size(); ++i) {
    if (blocks.block_ids[i] < 0) continue;
    if (list.entries[i] != kNoEntry) {
      ++plan.result.present;
      continue;
    }
    std::uint8_t tier = plan.tier;
    Unit unit = kNoUnit;
    if (room && MakeQuota(ns, group.slot_bytes)) {
      unit = AllocateIn(tier, group.slot_bytes);
      if (unit == kNoUnit && tier != kHostTier) {
        tier = kHostTier;
        unit = AllocateIn(tier, group.slot_bytes);
      }
    } else {
      over_quota |= room;
    }
    room = unit != kNoUnit;
    if (!room) {
      ++plan.result.dropped;
      continue;
    }
    ns.used_bytes += group.slot_bytes;
    const Entry entry = ns.pages.Add(HashOf(plan, i));
    PageRecord& r = ns.pages.record(entry);
    r.parent_key = plan.keys[i];
    r.block = static_cast<std::uint32_t>(plan.args.first_block_index + static_cast<std::int64_t>(i));
    r.life = PageLife::kPublishing;
    r.group = static_cast<std::uint8_t>(blocks.group);
    r.pins = 1;
    Place(ns, entry, tier, unit);
    list.entries[i] = entry;
    list.pages.push_back({.entry = entry, .block_id = blocks.block_ids[i], .tier = tier, .unit = unit});
  }
}

void Catalog::DropUnseen(Namespace& ns, Entry entry) {
  FreeSlot(ns, entry);
  ns.pages.Remove(entry);
}

void Catalog::CommitPublish(PublishPlan& plan, bool good) {
  ApplyTouches();
  publishes_.erase(std::find(publishes_.begin(), publishes_.end(), &plan));
  Namespace& ns = *plan.name_space;
  for (std::size_t l = 0; l < plan.lists.size(); ++l) {
    PublishPlan::List& list = plan.lists[l];
    if (good && !plan.session_ended) {
      CommitList(plan, l);
    } else {
      auto at = list.entries.begin();
      for (const PublishPlan::Page& page : list.pages) {
        DropUnseen(ns, page.entry);
        at = std::find(at, list.entries.end(), page.entry);
        *at = kNoEntry;
      }
    }
    for (const Entry e : list.entries) {
      if (e != kNoEntry) Unpin(ns, e);
    }
    if (list.parent != kNoEntry) Unpin(ns, list.parent);
  }
  totals_.published_pages += plan.result.stored;
  totals_.present_pages += plan.result.present;
  totals_.dropped_pages += plan.result.dropped;
}

void Catalog::CommitList(PublishPlan& plan, std::size_t l) {
  Namespace& ns = *plan.name_space;
  PublishPlan::List& list = plan.lists[l];
  Group& group = ns.groups[static_cast<std::size_t>(plan.args.groups[l].group)];
  const bool full = group.spec.kind == GroupKind::kFull;
  std::vector<bool> stored(list.entries.size());
  Entry before = list.parent;
  auto page = list.pages.begin();
  for (std::size_t i = 0; i < list.entries.size(); ++i) {
    Entry& entry = list.entries[i];
    if (page != list.pages.end() && page->entry == entry) {
      // Another publish may have been quicker; or, against the rules, have stored the hash elsewhere.
      if (const Entry other = FindPage(ns, group, plan.keys[i + 1], HashOf(plan, i)); other != kNoEntry) {
        DropUnseen(ns, entry);
        entry = other;
        Pin(ns, entry);
        ++plan.result.present;
      } else {
        PageRecord& r = ns.pages.record(entry);
        ns.pages.extra(entry).checksum = page->checksum;
        r.has_checksum = page->tier == kHostTier;
        group.index.Insert(plan.keys[i + 1], entry);
        if (full && before != kNoEntry && ns.pages.record(before).life != PageLife::kLost)
          Link(ns, entry, before);
        ++ns.visible;
        ++plan.result.stored;
        stored[i] = true;
      }
      ++page;
    }
    before = entry;
  }
  // The policies hear of a prefix from its tail to its head, of a window from its oldest block on.
  const auto use = [&](std::size_t i) {
    const Entry entry = list.entries[i];
    if (entry == kNoEntry) return;
    if (!stored[i]) {
      Touch(ns, entry);
      return;
    }
    PolicyOf(ns, entry).Insert(entry, plan.keys[i + 1]);
    Update(ns, entry, [](PageRecord& r) { r.life = PageLife::kStable; });
  };
  if (full) {
    for (std::size_t i = list.entries.size(); i-- > 0;) use(i);
    if (list.parent != kNoEntry) TouchPrefix(ns, list.parent);
  } else {
    for (std::size_t i = 0; i < list.entries.size(); ++i) use(i);
  }
  AddStoredEvents(plan, l, stored);
}

void Catalog::AddStoredEvents(const PublishPlan& plan, std::size_t l, const std::vector<bool>& stored) {
  FlushRemoved();
  const std::size_t width = plan.name_space->pages.hash_width();
  for (std::size_t i = 0, end = 0; i < stored.size(); i = std::max(i + 1, end)) {
    const std::size_t most = std::min(stored.size(), i + static_cast<std::size_t>(kMaxEventPages));
    for (end = i; end < most && stored[end];) ++end;
    if (end == i) continue;
    StoreEvent event;
    event.group = plan.args.groups[l].group;
    event.hashes = plan.args.hashes.substr(i * width, (end - i) * width);
    event.parent_hash = i > 0 ? plan.args.hashes.substr((i - 1) * width, width) : plan.args.parent_hash;
    event.first_block_index = plan.args.first_block_index + static_cast<std::int64_t>(i);
    AddEvent(*plan.name_space, std::move(event));
  }
}

}  // namespace kvsummary
