// XXH3, of hashes for the index and of pages as their checksum.
#pragma once

#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "server/store/page_table.h"

namespace kvsummary {

// Never 0.
inline std::uint64_t KeyOfHash(const char* hash, std::size_t width, std::uint64_t seed) {
  return (width == kUsualWidth ? XXH3_64bits_withSeed(hash, kUsualWidth, seed)
                               : XXH3_64bits_withSeed(hash, width, seed)) |
         1;
}

inline std::uint64_t Checksum(const void* page, std::size_t bytes) { return XXH3_64bits(page, bytes); }

}  // namespace kvsummary
