// Which parts of a tier's memory are taken: slots for pages of any few sizes.
//
// Memory is counted in units of 256 bytes; unit 0 is never given out, so that a unit can be a block id of
// kernels/copy.h. Pages of one size share *slabs*, contiguous runs of up to 4 MiB or a 64th of the tier (or
// one slot, where that is larger), and a slab that is empty again can serve any size. Pages of a single size
// can take all of the capacity but a remainder smaller than one page.
//
// Invariant: used + free = capacity, in bytes of whole slots. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace kvsummary {

using Unit = std::uint32_t;
inline constexpr Unit kNoUnit = 0;

class SlotAllocator {
 public:
  // Units 1 to capacity_bytes / 256.
  explicit SlotAllocator(std::int64_t capacity_bytes);

  // The first unit of a slot of page_bytes, a positive multiple of 256; kNoUnit when there is none.
  Unit Allocate(std::int64_t page_bytes);
  // Gives back what Allocate answered.
  void Free(Unit unit);

  std::int64_t capacity_bytes() const { return capacity_bytes_; }
  std::int64_t used_bytes() const { return used_bytes_; }

  // Adds a line for each disagreement within itself.
  void Check(const std::string& tier, std::vector<std::string>& problems) const;

 private:
  struct Slab {
    Unit page_units = 0;
    std::uint32_t slots = 0;
    std::uint32_t free = 0;
    std::vector<std::uint64_t> free_bits;
  };
  using Slabs = std::map<Unit, Slab>;  // by first unit

  // A new slab of pages of this size, or the end.
  Slabs::iterator Carve(Unit page_units);
  void ReturnRange(Unit first, Unit units);

  const std::int64_t capacity_bytes_;
  std::int64_t used_bytes_ = 0;
  Slabs slabs_;
  std::map<Unit, Unit> ranges_;             // free: first unit, units; no two touch
  std::map<Unit, std::set<Unit>> partial_;  // page units -> slabs with free slots; lowest first, so that high
                                            // ones empty
};

}  // namespace kvsummary
