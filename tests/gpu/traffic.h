// Random traffic of a small engine: requests of random lengths that grow by decode, verify and prefill
// steps in random order, with padding rows, rejected drafts and recycled positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/gpu/twin.h"

namespace kvsummary::gpu {

class Traffic {
 public:
  // A random geometry of up to five layers with room for `requests` requests of `tokens` tokens.
  static CacheGeometry RandomGeometry(int requests, int tokens, int least_layers, Random& random);
  Traffic(const CacheGeometry& geometry, int requests, int tokens, Random& random);

  // The most rows of a step.
  static constexpr std::int64_t MaxRows(int requests, int tokens) {
    return std::int64_t{requests} * (tokens + 1);
  }

  // A step of a random kind that the geometry allows.
  Indices Next(Random& random);
  // One row, or one padding row, of every request.
  Indices Decode(Random& random);
  Indices Verify(Random& random);
  // A chunk of every request, of length() rows as far as there is room; with `padding`, some of its first
  // or last rows are dead.
  template <typename Length>
  Indices Prefill(Random& random, Length length, bool padding);

  // All requests start again, at a position in their first 16 tokens or a given one.
  void Restart(Random& random);
  void RestartAt(std::int64_t position);
  bool done() const;

 private:
  struct Request {
    std::vector<std::int64_t> blocks;
    std::int64_t base = 0;
    std::int64_t committed = 0;
  };
  std::int64_t Slot(const Request& r, std::int64_t position) const {
    return r.blocks[position / geometry_.block_size] * geometry_.block_size + position % geometry_.block_size;
  }
  std::int64_t Room(const Request& r) const { return tokens_ - r.committed; }

  CacheGeometry geometry_;
  std::int64_t tokens_;
  std::vector<Request> requests_;
};

template <typename Length>
Indices Traffic::Prefill(Random& random, Length length, bool padding) {
  Indices x;
  x.kind = Kind::kPrefill;
  for (Request& r : requests_) {
    const std::int64_t n = std::min<std::int64_t>(length(), Room(r));
    const std::int64_t head = padding && random.OneIn(8) ? random.In(0, n) : 0;
    const std::int64_t tail = padding && random.OneIn(8) ? random.In(0, n) : 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const bool dead = i < head || i >= n - tail;
      const std::int64_t p = r.committed + i;
      const bool by_slot = random.OneIn(2);
      x.Add(dead && by_slot ? -1 : Slot(r, p), p, dead && !by_slot ? -1 : r.base);
    }
    r.committed += n;
    x.EndRequest(static_cast<std::int32_t>(r.committed));
  }
  return x;
}

}  // namespace kvsummary::gpu
