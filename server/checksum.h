// XXH3 of bytes that are kept or sent, 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvsummary {

inline std::uint64_t Checksum(const void* bytes, std::size_t count) { return XXH3_64bits(bytes, count); }

// Of a chunk of a hand-off, which cannot be taken for another one.
inline std::uint64_t ChunkChecksum(std::int32_t part, std::int64_t chunk, const void* bytes,
                                   std::size_t count) {
  const auto seed = (static_cast<std::uint64_t>(part) << 40) ^ static_cast<std::uint64_t>(chunk);
  return XXH3_64bits_withSeed(bytes, count, seed);
}

}  // namespace kvsummary
