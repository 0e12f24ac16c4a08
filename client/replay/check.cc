#include "client/replay/check.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/replay/reference.h"
#include "client/replay/rows.h"

namespace kvsummary {
namespace {

constexpr std::size_t kReadBlocks = 64;  // at a time: bounds memory, 3 MB at 23 layers of 64 tokens

class Checker {
 public:
  Checker(const FinishedRequest& finished, const TraceRequest& request, const CacheGeometry& geometry,
          std::uint64_t seed)
      : finished_(finished), request_(request), geometry_(geometry), seed_(seed) {}

  // `pages` holds the blocks from the request's `first_block`-th on.
  void ComparePages(std::size_t first_block, std::span<const std::uint8_t> pages) {
    const std::int64_t regions_per_block = geometry_.block_size / kRegionTokens;
    const std::int64_t first = static_cast<std::int64_t>(first_block) * regions_per_block;
    const auto page_bytes = static_cast<std::size_t>(geometry_.page_bytes());
    const std::int64_t blocks = static_cast<std::int64_t>(pages.size() / page_bytes) / geometry_.layers;
    const std::int64_t end = std::min(first + blocks * regions_per_block, finished_.rows / kRegionTokens);
    for (std::int64_t region = first; region < end; ++region) {
      const std::int64_t block = (region - first) / regions_per_block;
      for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
        const auto offset = static_cast<std::size_t>(block * geometry_.layers + layer) * page_bytes +
                            static_cast<std::size_t>(region % regions_per_block) * kSummaryBytes;
        CompareSummary(region, layer, pages.subspan(offset, kSummaryBytes));
      }
    }
  }

  void CompareRing(std::span<const std::uint16_t> ring) {
    std::array<std::uint16_t, kRowElements> expected;
    const std::int64_t open = finished_.rows / kRegionTokens * kRegionTokens;
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::int64_t p = open; p < finished_.rows; ++p) {
        FillRow(seed_, TokenRow(request_, finished_.request, p), layer, expected.data());
        const auto offset =
            static_cast<std::size_t>(std::int64_t{layer} * geometry_.capacity + p % geometry_.capacity);
        ++result_.ring_rows;
        if (std::ranges::equal(expected, ring.subspan(offset * kRowElements, kRowElements))) continue;
        result_.mismatches.push_back(
            {finished_.request, layer, p / kRegionTokens, p,
             absl::StrFormat("request %d, layer %d, region %d (open): ring row of position %d differs",
                             finished_.request, layer, p / kRegionTokens, p)});
      }
    }
  }

  CheckResult TakeResult() { return std::move(result_); }

 private:
  void CompareSummary(std::int64_t region, std::int32_t layer, std::span<const std::uint8_t> found) {
    const std::int64_t first = region * kRegionTokens;
    for (int i = 0; i < kRegionTokens; ++i) {
      FillRow(seed_, TokenRow(request_, finished_.request, first + i), layer,
              rows_.data() + static_cast<std::size_t>(i) * kRowElements);
    }
    const auto expected = ReferenceSummary(rows_);
    ++result_.regions;
    result_.loaded_regions += first < finished_.loaded_blocks * geometry_.block_size;
    const auto [e, f] = std::ranges::mismatch(expected, found);
    if (e == expected.end()) return;
    result_.mismatches.push_back(
        {finished_.request, layer, region, -1,
         absl::StrFormat("request %d, layer %d, region %d (positions %d to %d): summary differs, first in "
                         "channel %d: 0x%02x, not 0x%02x",
                         finished_.request, layer, region, first, first + kRegionTokens - 1,
                         e - expected.begin(), *f, *e)});
  }

  const FinishedRequest& finished_;
  const TraceRequest& request_;
  const CacheGeometry& geometry_;
  const std::uint64_t seed_;
  std::array<std::uint16_t, kRegionElements> rows_;
  CheckResult result_;
};

absl::Status WrongSize(const char* what, std::size_t size, std::size_t expected) {
  return absl::InternalError(absl::StrFormat("%s answered %d values instead of %d", what, size, expected));
}

}  // namespace

absl::StatusOr<CheckResult> CheckRequest(const FinishedRequest& finished, const TraceRequest& request,
                                         const CacheGeometry& geometry, std::uint64_t seed, Target& target) {
  Checker checker(finished, request, geometry, seed);
  const std::span<const std::int64_t> blocks = finished.blocks;
  for (std::size_t i = 0; i < blocks.size(); i += kReadBlocks) {
    const auto some = blocks.subspan(i, std::min(kReadBlocks, blocks.size() - i));
    const auto pages = target.ReadPages(some);
    if (!pages.ok()) return pages.status();
    const std::size_t expected = some.size() * static_cast<std::size_t>(geometry.dense_block_stride());
    if (pages->size() != expected) return WrongSize("ReadPages", pages->size(), expected);
    checker.ComparePages(i, *pages);
  }
  if (finished.rows % kRegionTokens != 0) {
    const auto ring = target.ReadRing(finished.ring_block);
    if (!ring.ok()) return ring.status();
    const auto expected = static_cast<std::size_t>(geometry.layers) *
                          static_cast<std::size_t>(geometry.capacity) * kRowElements;
    if (ring->size() != expected) return WrongSize("ReadRing", ring->size(), expected);
    checker.CompareRing(*ring);
  }
  return checker.TakeResult();
}

}  // namespace kvsummary
