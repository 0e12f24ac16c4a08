// A cache in this process, for tests of what drives one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "client/replay/target.h"
#include "kernels/layout.h"
#include "kernels/update.h"

namespace kvsummary {

// A cache in this process.
class MemoryTarget : public Target {
 public:
  explicit MemoryTarget(const CacheGeometry& g)
      : geometry_(g), memory_(static_cast<std::size_t>(g.total_bytes())) {}

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& u) override {
    const auto n = static_cast<std::int32_t>(u.slots.size());
    HostKernels().Decode(
        View(layers),
        {n, PackedRows(u.rows.data(), n), u.slots.data(), u.positions.data(), u.ring_bases.data()}, {});
    return Result(u.positions);
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& u) override {
    const auto n = static_cast<std::int32_t>(u.slots.size());
    HostKernels().Verify(View(layers),
                         {n, static_cast<std::int32_t>(u.seq_lens.size()), PackedRows(u.rows.data(), n),
                          u.slots.data(), u.query_start_loc.data(), u.seq_lens.data(), u.ring_bases.data()},
                         {});
    return Result(u.slots);  // slots and positions agree modulo 8
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& u) override {
    const auto n = static_cast<std::int32_t>(u.slots.size());
    HostKernels().Prefill(
        View(layers),
        {n, static_cast<std::int32_t>(u.query_start_loc.size()) - 1, PackedRows(u.rows.data(), n),
         u.slots.data(), u.positions.data(), u.query_start_loc.data(), u.ring_bases.data()},
        {});
    return Result(u.positions);
  }
  absl::StatusOr<std::vector<std::uint8_t>> ReadPages(std::span<const std::int64_t> blocks) override {
    std::vector<std::uint8_t> pages;
    for (const std::int64_t block : blocks) {
      const auto* page = memory_.data() + geometry_.page_offset(block, 0);
      pages.insert(pages.end(), page, page + geometry_.dense_block_stride());
    }
    return pages;
  }
  void SetPage(std::int64_t block, const std::vector<std::uint8_t>& page) {
    std::copy(page.begin(), page.end(), memory_.data() + geometry_.page_offset(block, 0));
  }
  std::uint8_t* summary(std::int64_t block, std::int32_t layer, std::int64_t region) {
    return memory_.data() + geometry_.page_offset(block, layer) + region * kSummaryBytes;
  }
  std::uint8_t* ring_row(std::int64_t ring_block, std::int32_t layer, std::int64_t position) {
    return memory_.data() + geometry_.ring_row_offset(ring_block, layer, position % geometry_.capacity);
  }
  absl::StatusOr<std::vector<std::uint16_t>> ReadRing(std::int64_t ring_block) override {
    std::vector<std::uint16_t> rows;
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      const std::size_t at = rows.size();
      rows.resize(at + static_cast<std::size_t>(geometry_.capacity) * kRowElements);
      std::memcpy(rows.data() + at, memory_.data() + geometry_.ring_row_offset(ring_block, layer, 0),
                  static_cast<std::size_t>(geometry_.capacity) * kRowBytes);
    }
    return rows;
  }

  const CacheGeometry& geometry() const { return geometry_; }

 private:
  CacheView View(LayerSpan layers) { return MakeView(geometry_, memory_.data(), layers); }

  static UpdateResult Result(std::span<const std::int64_t> positions) {
    UpdateResult result{std::ssize(positions), 0};
    for (const std::int64_t p : positions) result.regions_closed += p % kRegionTokens == kRegionTokens - 1;
    return result;
  }

  const CacheGeometry geometry_;
  std::vector<std::uint8_t> memory_;
};

}  // namespace kvsummary
