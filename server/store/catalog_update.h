// Catalog::Update, for the files that define the catalog.
#pragma once

#include "server/store/catalog.h"

namespace kvsummary {

template <typename Change>
void Catalog::Update(Namespace& ns, Entry entry, Change change) {
  PageRecord& r = ns.pages.record(entry);
  const std::int64_t bytes = GroupOf(ns, entry).slot_bytes;
  const auto held_bytes = [&] { return r.unit != kNoUnit && Held(r) ? bytes : 0; };
  tiers_[r.tier].pinned_bytes -= held_bytes();
  ns.held_bytes -= held_bytes();
  change(r);
  tiers_[r.tier].pinned_bytes += held_bytes();
  ns.held_bytes += held_bytes();
  if (InPolicy(r.life) && Eligible(ns, entry)) PolicyOf(ns, entry).Reconsider(entry);
}

}  // namespace kvsummary
