#include "server/store/slot_allocator.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "absl/strings/str_format.h"
#include "server/store/types.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kMaxSlabBytes = std::int64_t{4} << 20;
constexpr std::int64_t kMinSlabs = 64;  // of a tier: sizes are to find room beside each other

}  // namespace

SlotAllocator::SlotAllocator(std::int64_t capacity_bytes)
    : capacity_bytes_(capacity_bytes / kPageUnit * kPageUnit) {
  if (capacity_bytes_ > 0) ranges_.emplace(1, static_cast<Unit>(capacity_bytes_ / kPageUnit));
}

SlotAllocator::Slabs::iterator SlotAllocator::Carve(Unit page_units) {
  const auto slab_units = static_cast<Unit>(std::min(kMaxSlabBytes, capacity_bytes_ / kMinSlabs) / kPageUnit);
  const Unit wanted = std::max(page_units, slab_units / page_units * page_units);
  auto best = ranges_.end();
  for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
    if (range->second < page_units || (best != ranges_.end() && range->second <= best->second)) continue;
    best = range;
    if (range->second >= wanted) break;
  }
  if (best == ranges_.end()) return slabs_.end();
  const auto [first, length] = *best;
  const std::uint32_t slots = std::min(wanted, length) / page_units;
  ranges_.erase(best);
  if (const Unit taken = slots * page_units; taken < length) ranges_.emplace(first + taken, length - taken);
  Slab slab{page_units, slots, slots, std::vector<std::uint64_t>((slots + 63) / 64, ~std::uint64_t{0})};
  if (slots % 64 != 0) slab.free_bits.back() = (std::uint64_t{1} << (slots % 64)) - 1;
  partial_[page_units].insert(first);
  return slabs_.emplace(first, std::move(slab)).first;
}

Unit SlotAllocator::Allocate(std::int64_t page_bytes) {
  const auto page_units = static_cast<Unit>(page_bytes / kPageUnit);
  auto partial = partial_.find(page_units);
  const auto slab = partial != partial_.end() ? slabs_.find(*partial->second.begin()) : Carve(page_units);
  if (slab == slabs_.end()) return kNoUnit;
  std::vector<std::uint64_t>& bits = slab->second.free_bits;
  std::size_t word = 0;
  while (bits[word] == 0) ++word;
  const auto slot =
      static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(std::countr_zero(bits[word]));
  bits[word] &= bits[word] - 1;
  if (--slab->second.free == 0) {
    partial = partial_.find(page_units);
    partial->second.erase(slab->first);
    if (partial->second.empty()) partial_.erase(partial);
  }
  used_bytes_ += page_bytes;
  return slab->first + slot * page_units;
}

void SlotAllocator::Free(Unit unit) {
  const auto found = std::prev(slabs_.upper_bound(unit));
  const Unit first = found->first;
  Slab& slab = found->second;
  const std::uint32_t slot = (unit - first) / slab.page_units;
  slab.free_bits[slot / 64] |= std::uint64_t{1} << (slot % 64);
  used_bytes_ -= std::int64_t{slab.page_units} * kPageUnit;
  if (slab.free++ == 0) partial_[slab.page_units].insert(first);
  if (slab.free < slab.slots) return;
  const auto partial = partial_.find(slab.page_units);
  partial->second.erase(first);
  if (partial->second.empty()) partial_.erase(partial);
  const Unit units = slab.slots * slab.page_units;
  slabs_.erase(found);
  ReturnRange(first, units);
}

void SlotAllocator::ReturnRange(Unit first, Unit units) {
  auto next = ranges_.lower_bound(first);
  if (next != ranges_.end() && next->first == first + units) {
    units += next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      before->second += units;
      return;
    }
  }
  ranges_.emplace(first, units);
}

void SlotAllocator::Check(const std::string& tier, std::vector<std::string>& problems) const {
  std::map<Unit, Unit> all = ranges_;
  std::int64_t used = 0;
  for (const auto& [first, slab] : slabs_) {
    all.emplace(first, slab.slots * slab.page_units);
    std::uint32_t free = 0;
    for (const std::uint64_t word : slab.free_bits) free += static_cast<std::uint32_t>(std::popcount(word));
    const auto partial = partial_.find(slab.page_units);
    const bool listed = partial != partial_.end() && partial->second.count(first) != 0;
    if (free != slab.free || listed != (free > 0) || free == slab.slots) {
      problems.push_back(absl::StrFormat("tier %s: the slab at %d has %d free slots, counts %d", tier, first,
                                         free, slab.free));
    }
    used += std::int64_t{slab.slots - free} * slab.page_units * kPageUnit;
  }
  Unit next = 1;
  for (const auto& [first, units] : all) {
    if (first != next)
      problems.push_back(absl::StrFormat("tier %s: units %d to %d are nobody's or twice", tier, next, first));
    next = first + units;
  }
  if (next != capacity_bytes_ / kPageUnit + 1) {
    problems.push_back(absl::StrFormat("tier %s: slabs and free ranges end at unit %d", tier, next));
  }
  if (used != used_bytes_) {
    problems.push_back(absl::StrFormat("tier %s: %d bytes are used, %d counted", tier, used, used_bytes_));
  }
}

}  // namespace kvsummary
