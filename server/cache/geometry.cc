#include "server/cache/geometry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

// A cache beyond 2^52 bytes is a mistake, and below it no product here overflows.
constexpr std::int64_t kMaxCacheBytes = std::int64_t{1} << 52;

bool ProductAbove(std::int64_t a, std::int64_t b, std::int64_t limit) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) || product > limit;
}

absl::Status CheckCount(std::int64_t value, std::int64_t limit, const char* field) {
  if (value >= 1 && value <= limit) return absl::OkStatus();
  return Refuse(Reason::COUNT_OUT_OF_RANGE, absl::StrCat("geometry.", field),
                absl::StrFormat("%s is %d, not between 1 and %d", field, value, limit));
}

}  // namespace

absl::StatusOr<CacheGeometry> CheckGeometry(CacheGeometry g) {
  if (auto s = CheckCount(g.layers, kMaxLayers, "layers"); !s.ok()) return s;
  if (auto s = CheckCount(g.blocks, kMaxIndex, "blocks"); !s.ok()) return s;
  if (auto s = CheckCount(g.ring_blocks, kMaxIndex, "ring_blocks"); !s.ok()) return s;
  if (g.block_size < kRegionTokens || g.block_size > kMaxBlockSize || g.block_size % kRegionTokens != 0) {
    return Refuse(Reason::BLOCK_SIZE_INVALID, "geometry.block_size",
                  absl::StrFormat("block_size is %d, not a multiple of 8 between 8 and %d", g.block_size,
                                  kMaxBlockSize));
  }
  if (g.k < 0) {
    return Refuse(Reason::K_INVALID, "geometry.k", absl::StrFormat("k is %d, below 0", g.k));
  }
  if (g.capacity < std::int64_t{kRegionTokens} - 1 + g.k) {
    return Refuse(Reason::CAPACITY_TOO_SMALL, "geometry.capacity",
                  absl::StrFormat("capacity is %d rows, below 7 + k = %d", g.capacity,
                                  std::int64_t{kRegionTokens} - 1 + g.k));
  }
  if (g.capacity > kMaxCapacity) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, "geometry.capacity",
                  absl::StrFormat("capacity is %d rows, above %d", g.capacity, kMaxCapacity));
  }
  if (g.rows_per_layer == 0) g.rows_per_layer = g.capacity;
  if (g.rows_per_layer < g.capacity) {
    return Refuse(
        Reason::CAPACITY_ABOVE_ROWS, "geometry.rows_per_layer",
        absl::StrFormat("rows_per_layer is %d, below the capacity of %d rows", g.rows_per_layer, g.capacity));
  }
  if (ProductAbove(g.blocks, g.block_size, kMaxIndex)) {
    return Refuse(Reason::CACHE_TOO_LARGE, "geometry.blocks",
                  absl::StrFormat("blocks * block_size = %d * %d exceeds 2^31 - 1", g.blocks, g.block_size));
  }
  // One more factor may overflow: products are checked in turn.
  if (ProductAbove(g.rows_per_block(), g.ring_blocks, kMaxIndex)) {
    return Refuse(Reason::CACHE_TOO_LARGE, "geometry.ring_blocks",
                  absl::StrFormat("ring_blocks * layers * rows_per_layer = %d * %d * %d exceeds 2^31 - 1",
                                  g.ring_blocks, g.layers, g.rows_per_layer));
  }
  if (g.block_stride == 0) g.block_stride = g.dense_block_stride();
  if (g.block_stride < g.dense_block_stride() || g.block_stride % kSummaryBytes != 0) {
    return Refuse(Reason::BLOCK_STRIDE_INVALID, "geometry.block_stride",
                  absl::StrFormat("block_stride is %d bytes, not a multiple of 256 of at least %d",
                                  g.block_stride, g.dense_block_stride()));
  }
  if (ProductAbove(g.blocks, g.block_stride, kMaxCacheBytes)) {
    return Refuse(
        Reason::CACHE_TOO_LARGE, "geometry.block_stride",
        absl::StrFormat("blocks * block_stride = %d * %d exceeds 2^52 bytes", g.blocks, g.block_stride));
  }
  return g;
}

}  // namespace kvsummary
