// Random page layouts for the tests of page movement: any mix of block-major and layer-major views, with gaps
// that must keep their bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/copy.h"

namespace kvsummary::testing {

using Random = std::mt19937_64;

inline std::int64_t Below(Random& random, std::int64_t n) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
}

// Bytes of 1 to `max_views` views: multiples of `alignment`, now and then 0, seldom above `max_bytes`.
inline std::vector<std::int64_t> RandomShape(Random& random, std::int64_t max_views, std::int64_t max_bytes,
                                             std::int64_t alignment) {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(1 + Below(random, max_views)));
  for (std::int64_t& b : bytes) b = Below(random, max_bytes / alignment + 1) * alignment;
  bytes.front() += alignment;  // a page has bytes
  return bytes;
}

// Where the views of a set lie in a memory of `memory_bytes`.
struct Layout {
  std::vector<PageView> views;
  std::int64_t blocks = 0;
  std::int64_t page_bytes = 0;
  std::int64_t memory_bytes = 0;

  // The set with its views at `views_at`, which may be a copy in other memory.
  PageSet Set(void* memory, const PageView* views_at) const {
    return {static_cast<std::uint8_t*>(memory), blocks, views_at, static_cast<std::int32_t>(views.size()),
            page_bytes};
  }
};

// A layout of pages of this shape: runs of one to four views interleaved block by block, one run after the
// other, with random gaps everywhere.
inline Layout RandomLayout(Random& random, const std::vector<std::int64_t>& shape, std::int64_t blocks,
                           std::int64_t alignment) {
  const auto gap = [&] { return Below(random, 4) * alignment; };
  Layout layout;
  layout.blocks = blocks;
  layout.page_bytes = std::accumulate(shape.begin(), shape.end(), std::int64_t{0});
  for (std::size_t v = 0; v < shape.size();) {
    const std::size_t end = std::min(shape.size(), v + 1 + static_cast<std::size_t>(Below(random, 4)));
    const std::size_t begin = v;
    std::int64_t in_block = gap();
    for (; v < end; ++v) {
      layout.views.push_back({layout.memory_bytes + in_block, 0, shape[v]});
      in_block += shape[v] + gap();
    }
    for (std::size_t i = begin; i < end; ++i) layout.views[i].block_stride = in_block;
    layout.memory_bytes += in_block * blocks + gap();
  }
  return layout;
}

// `count` different blocks of a set, none of them 0, in random order.
inline std::vector<std::int64_t> RandomBlocks(Random& random, std::int64_t blocks, std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(blocks - 1));
  std::iota(ids.begin(), ids.end(), 1);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

// Makes some of the ids padding, and others bad: beyond the set, or, where `null_is_bad`, the null block.
inline void SpoilSome(Random& random, std::int64_t blocks, bool null_is_bad, std::vector<std::int64_t>& ids) {
  for (std::int64_t& id : ids) {
    switch (Below(random, 8)) {
      case 0:
        id = -1 - Below(random, 1000);
        break;
      case 1:
        id = blocks + (Below(random, 2) == 0 ? 0 : Below(random, kMaxIndex));
        if (null_is_bad && Below(random, 2) == 0) id = 0;
        break;
      default:
        break;
    }
  }
}

inline std::vector<std::uint8_t> RandomBytes(Random& random, std::int64_t bytes) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < out.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(&out[i], &word, std::min(sizeof(word), out.size() - i));
  }
  return out;
}

}  // namespace kvsummary::testing
