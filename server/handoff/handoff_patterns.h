// Caches on host memory whose bytes tell what they are of.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "server/cache/cache.h"

namespace kvsummary {

// Bytes that name what they are of: no two of them agree in more than a few places.
inline std::uint8_t PatternByte(std::uint64_t what, std::int64_t layer, std::int64_t index,
                                std::int64_t byte) {
  std::uint64_t x = what * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(layer) * 0xbf58476d1ce4e5b9u +
                    static_cast<std::uint64_t>(index) * 0x94d049bb133111ebu +
                    static_cast<std::uint64_t>(byte) * 0x2545f4914f6cdd1du;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return static_cast<std::uint8_t>(x >> 56);
}

inline constexpr std::uint64_t kSummaryPattern = 1;
inline constexpr std::uint64_t kRowPattern = 2;
inline constexpr std::uint8_t kUntouched = 0xee;

// A request of a cache: ids of its blocks in their order, and its ring block.
struct PlacedRequest {
  std::vector<std::int64_t> blocks;
  std::int64_t ring_block = 0;
};

inline void PutSummaries(const CacheGeometry& g, const PlacedRequest& request, std::int64_t from,
                         std::int64_t to, std::uint8_t* memory) {
  for (std::int64_t layer = 0; layer < g.layers; ++layer) {
    for (std::int64_t region = from; region < to; ++region) {
      const std::int64_t per_block = g.block_size / kRegionTokens;
      const std::int64_t block = request.blocks[static_cast<std::size_t>(region / per_block)];
      for (std::int64_t b = 0; b < kSummaryBytes; ++b) {
        memory[g.page_offset(block, layer) + region % per_block * kSummaryBytes + b] =
            PatternByte(kSummaryPattern, layer, region, b);
      }
    }
  }
}
inline void PutRows(const CacheGeometry& g, const PlacedRequest& request, std::int64_t from, std::int64_t to,
                    std::uint8_t* memory) {
  for (std::int64_t layer = 0; layer < g.layers; ++layer) {
    for (std::int64_t p = from; p < to; ++p) {
      for (std::int64_t b = 0; b < kRowBytes; ++b) {
        memory[g.ring_row_offset(request.ring_block, layer, p % g.capacity) + b] =
            PatternByte(kRowPattern, layer, p, b);
      }
    }
  }
}
// Fills in what a request of n tokens leaves in a cache when positions up to `highest` have been stored.
inline void Fill(Cache& cache, const PlacedRequest& request, std::int64_t regions, std::int64_t highest) {
  auto* memory = static_cast<std::uint8_t*>(cache.memory().data());
  PutSummaries(cache.geometry(), request, 0, regions, memory);
  PutRows(cache.geometry(), request, 0, highest + 1, memory);
}
// What a cache that was untouched has once a request has been handed over to it.
inline std::string Expected(const Cache& cache, const PlacedRequest& request, std::int64_t resume) {
  std::string bytes(static_cast<std::size_t>(cache.memory().bytes()), static_cast<char>(kUntouched));
  auto* memory = reinterpret_cast<std::uint8_t*>(bytes.data());
  const std::int64_t regions = resume / kRegionTokens;
  PutSummaries(cache.geometry(), request, 0, regions, memory);
  PutRows(cache.geometry(), request, regions * kRegionTokens, resume, memory);
  return bytes;
}
inline std::string BytesOf(const Cache& cache) {
  return {static_cast<const char*>(cache.memory().data()), static_cast<std::size_t>(cache.memory().bytes())};
}

}  // namespace kvsummary
