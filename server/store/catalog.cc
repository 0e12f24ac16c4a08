#include "server/store/catalog.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/store/catalog_update.h"
#include "server/store/hashing.h"
#include "server/store/validate.h"

namespace kvsummary {

Catalog::Catalog(const std::vector<TierSpec>& tiers, Options options)
    : options_(options), first_sequence_(options.first_sequence), leases_(options.first_lease) {
  tiers_.reserve(tiers.size());
  for (const TierSpec& tier : tiers) {
    tiers_.push_back(
        Tier{.name = tier.name, .device = tier.device, .slots = SlotAllocator(tier.capacity_bytes)});
  }
}

absl::StatusOr<NamespaceId> Catalog::Declare(std::uint64_t session, const NamespaceSpec& spec) {
  if (auto s = CheckSpec(spec); !s.ok()) return s;
  if (const auto known = keys_to_ids_.find(spec.key); known != keys_to_ids_.end()) {
    Namespace& ns = *namespaces_.at(known->second);
    if (ns.spec.hash_width != spec.hash_width) {
      return Refuse(Reason::NAMESPACE_DIFFERS, "hash_width",
                    absl::StrFormat("%d; the namespace has %d", spec.hash_width, ns.spec.hash_width));
    }
    if (ns.spec.groups != spec.groups) {
      return Refuse(Reason::NAMESPACE_DIFFERS, "groups", "the namespace exists with other groups");
    }
    if (auto s = AddSession(ns, session); !s.ok()) return s;
    return ns.id;
  }
  ForgetUnused();
  if (namespaces_.size() >= static_cast<std::size_t>(kMaxNamespaces) && !ForgetOldest()) {
    return Refuse(Reason::NAMESPACE_LIMIT, "",
                  absl::StrFormat("there are %d namespaces already", namespaces_.size()));
  }
  const NamespaceId id{next_namespace_++};
  auto made = std::make_shared<Namespace>(id, spec, first_sequence_, options_.event_log_bytes);
  Namespace* ns = made.get();
  for (const GroupSpec& group : spec.groups) {
    Group& g = ns->groups.emplace_back();
    g.spec = group;
    g.slot_bytes = (group.bytes_per_block + kPageUnit - 1) / kPageUnit * kPageUnit;
    for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
      PolicyContext context{&ns->pages, &clock_, [this, ns](Entry e) { return Eligible(*ns, e); }};
      g.queues.push_back({.name_space = ns,
                          .pages = &ns->pages,
                          .slot_bytes = g.slot_bytes,
                          .policy = options_.policy == PageStore::Policy::kLru ? MakeLruPolicy(context)
                                                                               : MakeS3FifoPolicy(context)});
    }
  }
  if (auto s = AddSession(*ns, session); !s.ok()) return s;
  namespaces_.emplace(id, std::move(made));
  keys_to_ids_.emplace(spec.key, id);
  return id;
}

absl::Status Catalog::AddSession(Namespace& ns, std::uint64_t session) {
  if (ns.sessions.contains(session)) return absl::OkStatus();
  std::set<NamespaceId>& declared = declared_[session];
  if (declared.size() >= static_cast<std::size_t>(kMaxNamespacesPerSession)) {
    return Refuse(Reason::SESSION_LIMIT, "session_id",
                  absl::StrFormat("the session has declared %d namespaces already", declared.size()));
  }
  declared.insert(ns.id);
  ns.sessions.insert(session);
  return absl::OkStatus();
}

absl::StatusOr<NamespacePtr> Catalog::Find(std::uint64_t session, NamespaceId id) const {
  const auto found = namespaces_.find(id);
  if (found == namespaces_.end() || !found->second->sessions.contains(session)) {
    return Refuse(
        Reason::NAMESPACE_NOT_FOUND, "namespace_id",
        absl::StrFormat("the session has declared no namespace %d", static_cast<std::uint64_t>(id)));
  }
  return found->second;
}

std::uint8_t Catalog::TierOf(const Device* device) const {
  for (std::size_t t = 1; t < tiers_.size(); ++t) {
    if (tiers_[t].device == device) return static_cast<std::uint8_t>(t);
  }
  return kHostTier;
}

bool Catalog::Eligible(const Namespace& ns, Entry entry) const {
  const PageRecord& r = ns.pages.record(entry);
  return r.life == PageLife::kStable && r.pins == 0 &&
         (r.tier == kHostTier ? r.children == 0 : ns.pages.extra(entry).upper_children == 0);
}

std::uint64_t Catalog::KeyOf(const Namespace& ns, const char* hash) const {
  return KeyOfHash(hash, ns.pages.hash_width(), options_.seed);
}

Entry Catalog::FindPage(const Namespace& ns, const Group& group, std::uint64_t key, const char* hash) const {
  return group.index.Find(key, [&](Entry e) { return ns.pages.HashIs(e, hash); });
}

void Catalog::Pin(Namespace& ns, Entry entry) {
  Update(ns, entry, [](PageRecord& r) { ++r.pins; });
}

void Catalog::Unpin(Namespace& ns, Entry entry) {
  Update(ns, entry, [](PageRecord& r) { --r.pins; });
  if (ns.pages.record(entry).life == PageLife::kLost) Reap(ns, entry);
}

void Catalog::CountUpper(Namespace& ns, Entry child, int change) {
  const PageRecord& r = ns.pages.record(child);
  if (r.parent == kNoEntry || r.unit == kNoUnit || r.tier == kHostTier) return;
  ns.pages.extra(r.parent).upper_children += static_cast<std::uint32_t>(change);
  if (change < 0) Update(ns, r.parent, [](PageRecord&) {});
}

void Catalog::Link(Namespace& ns, Entry child, Entry parent) {
  ns.pages.record(child).parent = parent;
  ++ns.pages.record(parent).children;
  CountUpper(ns, child, 1);
}

void Catalog::Unlink(Namespace& ns, Entry child) {
  CountUpper(ns, child, -1);
  const Entry parent = std::exchange(ns.pages.record(child).parent, kNoEntry);
  if (parent != kNoEntry) Update(ns, parent, [](PageRecord& r) { --r.children; });
}

void Catalog::Place(Namespace& ns, Entry entry, std::uint8_t tier, Unit unit) {
  CountUpper(ns, entry, -1);
  PageRecord& r = ns.pages.record(entry);
  if (r.unit != kNoUnit) --tiers_[r.tier].pages;
  ++tiers_[tier].pages;
  Update(ns, entry, [&](PageRecord& changed) {
    changed.tier = tier;
    changed.unit = unit;
  });
  CountUpper(ns, entry, 1);
}

void Catalog::FreeSlot(Namespace& ns, Entry entry) {
  CountUpper(ns, entry, -1);
  Tier& tier = tiers_[ns.pages.record(entry).tier];
  Update(ns, entry, [&](PageRecord& r) { tier.slots.Free(std::exchange(r.unit, kNoUnit)); });
  --tier.pages;
  ns.used_bytes -= GroupOf(ns, entry).slot_bytes;
}

void Catalog::Lose(Namespace& ns, Entry entry, bool evicted) {
  const PageRecord& r = ns.pages.record(entry);
  Group& group = GroupOf(ns, entry);
  const std::uint64_t key = KeyOf(ns, entry);
  group.index.Erase(key, entry);
  if (InPolicy(r.life)) PolicyOf(ns, entry).Remove(entry, key, evicted);
  --ns.visible;
  const std::size_t most = static_cast<std::size_t>(kMaxEventPages) * ns.pages.hash_width();
  if (removed_.empty() || removed_.back().name_space != ns.id || removed_.back().group != r.group ||
      removed_.back().hashes.size() >= most) {
    removed_.push_back({ns.id, r.group, {}});
  }
  removed_.back().hashes.append(ns.pages.hash(entry), ns.pages.hash_width());
  Update(ns, entry, [](PageRecord& changed) { changed.life = PageLife::kLost; });
  Reap(ns, entry);
}

void Catalog::Reap(Namespace& ns, Entry entry) {
  // A lost parent may have waited for its last child.
  while (entry != kNoEntry) {
    const PageRecord& r = ns.pages.record(entry);
    if (r.life != PageLife::kLost || r.pins > 0) return;
    if (r.unit != kNoUnit) FreeSlot(ns, entry);
    if (r.children > 0) return;
    const Entry parent = r.parent;
    ApplyTouches();  // they may name it
    Unlink(ns, entry);
    ns.pages.Remove(entry);
    entry = parent;
  }
}

void Catalog::Touch(Namespace& ns, Entry entry) {
  if (InPolicy(ns.pages.record(entry).life)) PolicyOf(ns, entry).Touch(entry);
}

void Catalog::TouchPrefix(Namespace& ns, Entry last) {
  for (Entry e = last; e != kNoEntry; e = ns.pages.record(e).parent) Touch(ns, e);
}

void Catalog::ApplyTouches() {
  while (ApplySomeTouches()) {
  }
}

bool Catalog::ApplySomeTouches() {
  constexpr std::int64_t kPages = 4096;
  std::size_t done = 0;
  for (std::int64_t pages = 0; done < uses_.size() && pages < kPages; ++done) {
    Namespace& ns = *uses_[done].name_space;
    if (uses_[done].prefix) {
      TouchPrefix(ns, uses_[done].entry);
    } else {
      Touch(ns, uses_[done].entry);
    }
    pages += uses_[done].prefix ? ns.pages.record(uses_[done].entry).block + 1 : 1;
  }
  uses_.erase(uses_.begin(), uses_.begin() + static_cast<std::ptrdiff_t>(done));
  if (uses_.empty()) uses_pages_ = 0;
  return !uses_.empty();
}

void Catalog::UnpinLease(const Lease& lease) {
  const auto found = namespaces_.find(lease.name_space);
  for (const Entry e : lease.pinned) Unpin(*found->second, e);
}

absl::StatusOr<std::chrono::milliseconds> Catalog::Renew(std::uint64_t session, LeaseId id,
                                                         std::chrono::milliseconds time,
                                                         Clock::time_point now) {
  ExpireLeases(now);
  Lease* lease = leases_.Find(session, id);
  if (lease == nullptr) {
    return Refuse(
        Reason::LEASE_NOT_FOUND, "lease_id",
        absl::StrFormat("the session has no lease %d, or not any more", static_cast<std::uint64_t>(id)));
  }
  const auto granted = time.count() > 0 ? std::min(time, options_.max_lease) : options_.max_lease;
  leases_.SetDeadline(*lease, now + granted);
  return granted;
}

void Catalog::Release(std::uint64_t session, LeaseId id) {
  if (const auto lease = leases_.Take(session, id)) UnpinLease(*lease);
}

void Catalog::ExpireLeases(Clock::time_point now) {
  while (const auto lease = leases_.TakeExpired(now)) UnpinLease(*lease);
}

void Catalog::EndSession(std::uint64_t session) {
  while (const auto lease = leases_.TakeOf(session)) UnpinLease(*lease);
  for (PublishPlan* plan : publishes_) plan->session_ended |= plan->args.session == session;
  for (LoadPlan* plan : loads_) plan->session_ended |= plan->args.session == session;
  if (const auto declared = declared_.find(session); declared != declared_.end()) {
    for (const NamespaceId id : declared->second) {
      Namespace& ns = *namespaces_.at(id);
      ns.sessions.erase(session);
      if (ns.sessions.empty()) ns.left = ++left_;
    }
    declared_.erase(declared);
  }
  ForgetUnused();
}

void Catalog::ForgetUnused() {
  ApplyTouches();
  FlushRemoved();
  for (auto it = namespaces_.begin(); it != namespaces_.end();) {
    Namespace& ns = *it->second;
    if (!ns.sessions.empty() || ns.used_bytes > 0 || ns.visible > 0) {
      ++it;
      continue;
    }
    for (Group& group : ns.groups) {
      for (std::size_t tier = 0; tier < tiers_.size(); ++tier) tiers_[tier].order.Forget(group.queues[tier]);
    }
    first_sequence_ = std::max(first_sequence_, ns.events.next_sequence());
    keys_to_ids_.erase(ns.spec.key);
    it = namespaces_.erase(it);
  }
}

bool Catalog::ForgetOldest() {
  std::vector<Namespace*> unused;
  for (const auto& [id, ns] : namespaces_) {
    if (ns->sessions.empty()) unused.push_back(ns.get());
  }
  std::sort(unused.begin(), unused.end(), [](auto* a, auto* b) { return a->left < b->left; });
  for (Namespace* ns : unused) {
    if (ns->held_bytes > 0) continue;  // it would stay, and have lost its other pages for nothing
    while (DropOldestOf(*ns)) {
    }
    ForgetUnused();
    return true;
  }
  return false;
}

void Catalog::AddEvent(Namespace& ns, StoreEvent event) {
  ns.events.Add(std::move(event));
  if (changed_.empty() || changed_.back() != ns.id) changed_.push_back(ns.id);
}

void Catalog::FlushRemoved() {
  for (Removed& removed : removed_) {
    const auto found = namespaces_.find(removed.name_space);
    if (found == namespaces_.end()) continue;
    StoreEvent event;
    event.kind = EventKind::kRemoved;
    event.group = removed.group;
    event.hashes = std::move(removed.hashes);
    AddEvent(*found->second, std::move(event));
  }
  removed_.clear();
}

std::vector<NamespaceId> Catalog::TakeChanged() {
  FlushRemoved();
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  return std::exchange(changed_, {});
}

std::vector<NamespaceUsage> Catalog::ListNamespaces() const {
  std::vector<NamespaceUsage> list;
  for (const auto& [id, ns] : namespaces_) {
    list.push_back({.id = id,
                    .spec = ns->spec,
                    .quota_bytes = options_.quota_bytes,
                    .used_bytes = ns->used_bytes,
                    .pages = ns->visible,
                    .sessions = static_cast<std::int64_t>(ns->sessions.size()),
                    .next_sequence = ns->events.next_sequence()});
  }
  return list;
}

StoreStats Catalog::stats() const {
  StoreStats stats = totals_;
  for (const auto& [id, ns] : namespaces_) stats.pages += ns->visible;
  stats.namespaces = static_cast<std::int64_t>(namespaces_.size());
  stats.leases = static_cast<std::int64_t>(leases_.size());
  for (const Tier& tier : tiers_) {
    const std::int64_t used = tier.slots.used_bytes();
    const std::int64_t pinned = tier.pinned_bytes + tier.promotion_bytes;
    stats.tiers.push_back({.name = tier.name,
                           .capacity_bytes = tier.slots.capacity_bytes(),
                           .pinned_bytes = pinned,
                           .unpinned_bytes = used - pinned,
                           .free_bytes = tier.slots.capacity_bytes() - used,
                           .pages = tier.pages,
                           .evicted_pages = tier.evicted,
                           .demoted_pages = tier.demoted,
                           .promoted_pages = tier.promoted});
  }
  return stats;
}

}  // namespace kvsummary
