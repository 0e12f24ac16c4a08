// XXH3 of hashes, for the index.
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

}  // namespace kvsummary
