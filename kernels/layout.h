// Shapes and addresses of summaries, rows and tail rings, shared by the host and the CUDA code.
//
// A *row* is one token's index key and z: bf16 key[256], then bf16 z[256], 1024 bytes. A *region* is
// eight consecutive positions; a *summary* is the 256 e4m3 bytes kept of a closed region. A *slot* is
// block_id * block_size + position % block_size. A *ring block* holds the raw rows of one request's
// open region: position p of a layer lives in row ring_base + p % capacity of that layer's view, where
// ring_base = ring_block * rows_per_block counts rows.
//
// Memory of a cache is block-major: pages [block][layer][block_size/8][256] bytes, then rings
// [ring block][layer][rows_per_layer][512] bf16. A layer's view is strided; a whole block, or a
// request's whole tail, is one contiguous range. Block 0 and ring block 0 are the engine's null blocks
// and are never written by updates.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVSUMMARY_HOST_DEVICE __host__ __device__
#else
#define KVSUMMARY_HOST_DEVICE
#endif

namespace kvsummary {

inline constexpr int kRegionTokens = 8;
inline constexpr int kChannels = 256;
inline constexpr int kSummaryBytes = kChannels;  // one e4m3 byte a channel
inline constexpr int kRowElements = 2 * kChannels;
inline constexpr int kRowBytes = 2 * kRowElements;
inline constexpr int kMinVerifyCapacity = kRegionTokens;  // rows; below it a redo would find rows overwritten
inline constexpr std::int64_t kMaxIndex = 0x7fffffff;     // largest slot count, ring row count and position

// What an engine chooses when it makes a cache.
struct CacheGeometry {
  std::int32_t layers = 0;
  std::int64_t blocks = 0;          // KV blocks, null block included
  std::int32_t block_size = 0;      // tokens a block, a multiple of 8
  std::int64_t block_stride = 0;    // bytes from block to block, over all layers
  std::int64_t ring_blocks = 0;     // null ring block included
  std::int32_t capacity = 0;        // ring rows in use a layer: position p is in row p % capacity
  std::int32_t rows_per_layer = 0;  // ring rows reserved a layer, >= capacity
  std::int32_t k = 0;               // speculative tokens of a verify step

  friend bool operator==(const CacheGeometry&, const CacheGeometry&) = default;

  // Bytes of one layer's part of a block.
  constexpr std::int64_t page_bytes() const {
    return std::int64_t{block_size} / kRegionTokens * kSummaryBytes;
  }
  // The smallest legal block_stride.
  constexpr std::int64_t dense_block_stride() const { return layers * page_bytes(); }
  // Ring rows from ring block to ring block; ring bases are multiples of it.
  constexpr std::int64_t rows_per_block() const { return std::int64_t{layers} * rows_per_layer; }
  constexpr std::int64_t pages_bytes() const { return blocks * block_stride; }
  // Rings follow the pages, on a boundary of 4096 bytes.
  constexpr std::int64_t ring_offset() const { return (pages_bytes() + 4095) / 4096 * 4096; }
  constexpr std::int64_t rings_bytes() const { return ring_blocks * rows_per_block() * kRowBytes; }
  constexpr std::int64_t total_bytes() const { return ring_offset() + rings_bytes(); }

  // Byte offsets from the start of the cache.
  constexpr std::int64_t page_offset(std::int64_t block, std::int64_t layer) const {
    return block * block_stride + layer * page_bytes();
  }
  constexpr std::int64_t ring_row_offset(std::int64_t ring_block, std::int64_t layer,
                                         std::int64_t row) const {
    return ring_offset() + (ring_block * rows_per_block() + layer * rows_per_layer + row) * kRowBytes;
  }
};

// A run of layers of a cache, in its own numbering.
struct LayerSpan {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

// A run of layers of a cache as the kernels see it. Any strides: an engine's own layout fits too.
struct CacheView {
  std::uint8_t* summaries = nullptr;  // of the first layer, block 0
  std::int64_t block_stride = 0;      // bytes
  std::int64_t layer_stride = 0;      // bytes from a layer's summaries to the next layer's
  std::int64_t blocks = 0;
  std::int32_t block_size = 0;  // tokens
  std::int32_t layers = 0;
  std::uint16_t* ring = nullptr;       // of the first layer, row 0
  std::int64_t ring_layer_stride = 0;  // rows from a layer's ring to the next layer's
  std::int64_t ring_blocks = 0;
  std::int64_t rows_per_block = 0;  // rows
  std::int32_t capacity = 0;        // rows

  KVSUMMARY_HOST_DEVICE std::uint8_t* summary(std::int64_t layer, std::int64_t slot) const {
    const auto s = static_cast<std::uint32_t>(slot);
    const auto size = static_cast<std::uint32_t>(block_size);
    const std::uint32_t block = s / size;
    return summaries + layer * layer_stride + block * block_stride +
           (s - block * size) / kRegionTokens * kSummaryBytes;
  }
  KVSUMMARY_HOST_DEVICE std::uint16_t* ring_row(std::int64_t layer, std::int64_t base,
                                                std::int64_t position) const {
    const std::uint32_t row = static_cast<std::uint32_t>(position) % static_cast<std::uint32_t>(capacity);
    return ring + (layer * ring_layer_stride + base + row) * kRowElements;
  }
};

// The view of `layers` of a cache of this geometry at `memory`.
inline CacheView MakeView(const CacheGeometry& g, void* memory, LayerSpan layers) {
  auto* bytes = static_cast<std::uint8_t*>(memory);
  CacheView v;
  v.summaries = bytes + g.page_offset(0, layers.first);
  v.block_stride = g.block_stride;
  v.layer_stride = g.page_bytes();
  v.blocks = g.blocks;
  v.block_size = g.block_size;
  v.layers = layers.count;
  v.ring = reinterpret_cast<std::uint16_t*>(bytes + g.ring_row_offset(0, layers.first, 0));
  v.ring_layer_stride = g.rows_per_layer;
  v.ring_blocks = g.ring_blocks;
  v.rows_per_block = g.rows_per_block();
  v.capacity = g.capacity;
  return v;
}

// What a kernel makes of one row's indices. Callers that can check their arrays beforehand never see
// kBad; where they cannot, a bad row is skipped and counted.
enum class RowState : std::uint8_t { kLive, kPadding, kBad };

// `base` and `slot` of a row of position `position`: padding when either is negative, live when both
// lie inside the cache, outside its null blocks, and agree with the position. The view's slots and ring
// rows are at most kMaxIndex each, so a 32-bit modulo does: GPUs have no 64-bit one.
KVSUMMARY_HOST_DEVICE inline RowState ClassifyRow(const CacheView& v, std::int64_t slot,
                                                  std::int64_t position, std::int64_t base) {
  if (slot < 0 || base < 0) return RowState::kPadding;
  const bool good = slot >= v.block_size && slot < v.blocks * v.block_size && position >= 0 &&
                    position <= kMaxIndex && (slot - position) % kRegionTokens == 0 &&
                    base >= v.rows_per_block && base < v.ring_blocks * v.rows_per_block &&
                    static_cast<std::uint32_t>(base) % static_cast<std::uint32_t>(v.rows_per_block) == 0;
  return good ? RowState::kLive : RowState::kBad;
}

}  // namespace kvsummary
