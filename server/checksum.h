// XXH3 of bytes that are kept or sent, 64 bits: by AVX2 where the processor has it, which doubles the rate of
// what lies in a cache. The values are the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvsummary {

std::uint64_t Checksum(const void* bytes, std::size_t count, std::uint64_t seed = 0);

// Of a chunk of a hand-off, which cannot be taken for another one.
inline std::uint64_t ChunkChecksum(std::int32_t part, std::int64_t chunk, const void* bytes,
                                   std::size_t count) {
  const auto seed = (static_cast<std::uint64_t>(part) << 40) ^ static_cast<std::uint64_t>(chunk);
  return Checksum(bytes, count, seed);
}

}  // namespace kvsummary
