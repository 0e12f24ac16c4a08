// Memory that is touched at random: on huge pages where it is large, since with pages of 4 KiB most of the
// time would go into page tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace kvsummary {

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using HugeArray = std::unique_ptr<T[], FreeMemory>;

// Not initialised; on a cache line's boundary at least. std::bad_alloc when there is none.
void* AllocateHuge(std::size_t bytes);

}  // namespace kvsummary
