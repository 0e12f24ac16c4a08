#include "tests/gpu/traffic.h"

#include <algorithm>
#include <numeric>

namespace kvsummary::gpu {
namespace {

template <std::size_t N>
int Pick(const int (&values)[N], Random& random) {
  return values[random.In(0, N - 1)];
}

// 1 to n in random order: block ids, the null block left out.
std::vector<std::int64_t> ShuffledIds(std::int64_t n, Random& random) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 1);
  for (std::int64_t i = n - 1; i > 0; --i) std::swap(ids[i], ids[random.In(0, i)]);
  return ids;
}

}  // namespace

CacheGeometry Traffic::RandomGeometry(int requests, int tokens, int least_layers, Random& random) {
  CacheGeometry g;
  g.layers = static_cast<std::int32_t>(random.In(least_layers, 5));
  g.block_size = Pick({8, 16, 32, 64, 128, 24}, random);
  g.blocks = 1 + std::int64_t{requests} * ((tokens + g.block_size - 1) / g.block_size);
  g.block_stride = g.dense_block_stride() + 256 * random.In(0, 3);
  g.ring_blocks = 1 + requests;
  g.k = Pick({0, 0, 1, 2, 3, 3, 9, 12}, random);
  g.capacity = 7 + g.k + static_cast<std::int32_t>(random.In(0, 3));
  g.rows_per_layer = g.capacity + static_cast<std::int32_t>(random.In(0, 2));
  return g;
}

Traffic::Traffic(const CacheGeometry& geometry, int requests, int tokens, Random& random)
    : geometry_(geometry), tokens_(tokens), requests_(static_cast<std::size_t>(requests)) {
  const auto blocks = ShuffledIds(geometry.blocks - 1, random);
  const auto rings = ShuffledIds(geometry.ring_blocks - 1, random);
  const std::int64_t each = (geometry.blocks - 1) / requests;
  for (int i = 0; i < requests; ++i) {
    requests_[i].blocks.assign(blocks.begin() + i * each, blocks.begin() + (i + 1) * each);
    requests_[i].base = rings[i] * geometry.rows_per_block();
  }
}

Indices Traffic::Next(Random& random) {
  const bool verify = geometry_.capacity >= kMinVerifyCapacity;
  switch (random.In(0, verify ? 3 : 1)) {
    case 0: {
      // Short and long chunks in one step; some requests bring none.
      const int longest = Pick({3, 9, 24, 70, 300}, random);
      return Prefill(
          random, [&] { return random.OneIn(4) ? 0 : random.In(1, longest); }, true);
    }
    case 1:
      return Decode(random);
    default:
      return Verify(random);
  }
}

Indices Traffic::Decode(Random& random) {
  Indices x;
  x.kind = Kind::kDecode;
  for (Request& r : requests_) {
    if (Room(r) == 0 || random.OneIn(10)) {
      x.Add(random.OneIn(2) ? -1 : Slot(r, 0), 0, -1);
      continue;
    }
    x.Add(Slot(r, r.committed), r.committed, r.base);
    ++r.committed;
  }
  return x;
}

Indices Traffic::Verify(Random& random) {
  Indices x;
  x.kind = Kind::kVerify;
  for (Request& r : requests_) {
    const std::int64_t q = std::min(random.In(1, geometry_.k + 1), Room(r));
    const bool padding = random.OneIn(10);
    for (std::int64_t i = 0; i < q; ++i) {
      // A dead row inside the step leaves its ring row as it was.
      const bool dead = random.OneIn(40);
      x.Add(dead || padding ? -1 : Slot(r, r.committed + i), r.committed + i, padding ? -1 : r.base);
    }
    x.EndRequest(static_cast<std::int32_t>(r.committed + q));
    if (q > 0 && !padding) r.committed += random.In(1, q);
  }
  return x;
}

void Traffic::Restart(Random& random) {
  for (Request& r : requests_) r.committed = random.In(0, std::min<std::int64_t>(15, tokens_ - 1));
}

void Traffic::RestartAt(std::int64_t position) {
  for (Request& r : requests_) r.committed = position;
}

bool Traffic::done() const {
  return std::all_of(requests_.begin(), requests_.end(), [this](const Request& r) { return Room(r) == 0; });
}

}  // namespace kvsummary::gpu
