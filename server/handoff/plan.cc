#include "server/handoff/plan.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kMaxLayers = 1024;
constexpr std::int64_t kMaxUnits = kMaxIndex;
constexpr std::int64_t kMaxPartBytes = std::int64_t{1} << 40;

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of an outer element that is larger than a chunk.
std::int64_t PiecesOfOuter(const Part& part) { return CeilDiv(part.outer_bytes(), kChunkBytes); }
// Of outer elements that are not.
std::int64_t OutersPerChunk(const Part& part) { return kChunkBytes / part.outer_bytes(); }

// Views of dense memory are sets of pages whose ids begin with 1, as 0 is the null block of every set.
PageView DenseView(std::int64_t offset, std::int64_t stride, std::int64_t bytes) {
  return {offset - stride, stride, bytes};
}

// Calls `move` for every run of layers that fits into one movement, with the number of its first one in the
// chunk.
template <typename Move>
void ForLayers(const Chunk& chunk, Move move) {
  for (std::int64_t l = 0; l < chunk.outers; l += kMaxPageViews) {
    move(l, std::min<std::int64_t>(kMaxPageViews, chunk.outers - l));
  }
}

}  // namespace

std::int64_t ChunkCount(const Part& part) {
  if (part.bytes() == 0) return 0;
  if (part.outer_bytes() > kChunkBytes) return part.outers() * PiecesOfOuter(part);
  return CeilDiv(part.outers(), OutersPerChunk(part));
}

Chunk ChunkAt(const Part& part, std::int64_t index) {
  if (part.outer_bytes() > kChunkBytes) {
    const std::int64_t pieces = PiecesOfOuter(part);
    const std::int64_t begin = index % pieces * kChunkBytes;
    return {index / pieces, 1, begin, std::min(begin + kChunkBytes, part.outer_bytes())};
  }
  const std::int64_t outer = index * OutersPerChunk(part);
  return {outer, std::min(OutersPerChunk(part), part.outers() - outer), 0, part.outer_bytes()};
}

Chunk WholePart(const Part& part) { return {0, part.outers(), 0, part.outer_bytes()}; }

absl::Status CheckPart(const Part& part, std::int32_t layers) {
  const auto malformed = [](std::string_view why) {
    return Refuse(Reason::MESSAGE_MALFORMED, "part", absl::StrFormat("the source's part has %s", why));
  };
  if (part.first < 0 || part.count <= 0 || part.first > kMaxUnits || part.count > kMaxUnits) {
    return malformed("no regions, rows or blocks, or too many");
  }
  if (part.kind == PartKind::kBlocks) {
    return part.unit_bytes > 0 && part.unit_bytes <= kMaxIndex &&
                   part.count <= kMaxPartBytes / part.unit_bytes
               ? absl::OkStatus()
               : malformed("blocks of an impossible size");
  }
  if (part.layers.first < 0 || part.layers.count <= 0 || part.layers.count > kMaxLayers ||
      part.layers.first > layers - part.layers.count) {
    return malformed("layers that the offer has not");
  }
  if (part.unit_bytes != (part.kind == PartKind::kRows ? kRowBytes : kSummaryBytes)) {
    return malformed("rows or summaries of another size");
  }
  if (part.count > kMaxPartBytes / part.unit_bytes / part.layers.count) return malformed("too many bytes");
  if (part.kind == PartKind::kRows) {
    if (std::ssize(part.positions) != part.count) return malformed("not one position for each row");
    for (std::size_t i = 0; i < part.positions.size(); ++i) {
      const std::int64_t p = part.positions[i];
      if (p < 0 || p > kMaxIndex || (i > 0 && p <= part.positions[i - 1])) {
        return malformed("positions that do not rise");
      }
    }
  } else if (!part.positions.empty()) {
    return malformed("positions of summaries");
  }
  return absl::OkStatus();
}

std::vector<std::int64_t> TailPositions(std::int64_t committed_tokens, std::int64_t back_off,
                                        std::int64_t highest_stored, std::int64_t capacity) {
  std::vector<std::int64_t> positions;
  const std::int64_t lowest_resume = std::max<std::int64_t>(0, committed_tokens - back_off);
  for (std::int64_t p = lowest_resume / kRegionTokens * kRegionTokens; p < committed_tokens; ++p) {
    // The last row of a region closes it and is never needed again.
    if (p > highest_stored - capacity && p % kRegionTokens != kRegionTokens - 1) positions.push_back(p);
  }
  return positions;
}

bool CanResume(std::int64_t resume, std::int64_t committed_tokens, std::span<const std::int64_t> positions) {
  if (resume < 0 || resume > committed_tokens) return false;
  for (std::int64_t p = resume / kRegionTokens * kRegionTokens; p < resume; ++p) {
    if (!std::binary_search(positions.begin(), positions.end(), p)) return false;
  }
  return true;
}

std::int64_t NearestResume(std::int64_t resume, std::int64_t committed_tokens,
                           std::span<const std::int64_t> positions) {
  const std::int64_t start = std::clamp<std::int64_t>(resume, 0, committed_tokens);
  for (std::int64_t distance = 0; distance < kRegionTokens; ++distance) {
    for (const std::int64_t r : {start - distance, start + distance}) {
      if (CanResume(r, committed_tokens, positions)) return r;
    }
  }
  return 0;  // not reached: a multiple of 8 is within seven tokens
}

bool IsWanted(const Wanted& wanted, const Part& part, const Chunk& chunk) {
  if (part.kind == PartKind::kRows) return true;
  if (part.kind == PartKind::kSummaries) return part.first + chunk.begin / kSummaryBytes < wanted.regions;
  const auto run = wanted.blocks.find(part.group);
  if (run == wanted.blocks.end()) return false;
  const std::int64_t first = part.first + chunk.outer;
  return first < run->second.first + run->second.count && run->second.first < first + chunk.outers;
}

std::vector<PageMoves> MoveSummaries(const CacheGeometry& geometry, const RequestBlocks& blocks,
                                     const Part& part, const Chunk& chunk, std::int64_t regions) {
  std::vector<PageMoves> moves;
  const std::int64_t per_block = geometry.block_size / kRegionTokens;
  const std::int64_t first = part.first + chunk.begin / kSummaryBytes;
  const std::int64_t end = std::min(part.first + chunk.end / kSummaryBytes, regions);
  // From region `from` on, `count` regions of each of the blocks that follow each other there.
  const auto add = [&](std::int64_t from, std::int64_t count, std::int64_t block_count) {
    const std::int64_t bytes = count * kSummaryBytes;
    PageMoves shared;
    for (std::int64_t b = 0; b < block_count; ++b) {
      shared.cache_ids.push_back(blocks.ids[static_cast<std::size_t>(from / per_block + b - blocks.first)]);
      shared.dense_ids.push_back(b + 1);
    }
    shared.cache_blocks = geometry.blocks;
    ForLayers(chunk, [&](std::int64_t first_layer, std::int64_t layers) {
      PageMoves move = shared;
      for (std::int64_t l = first_layer; l < first_layer + layers; ++l) {
        const std::int64_t layer = part.layers.first + chunk.outer + l;
        move.cache_views.push_back({geometry.page_offset(0, layer) + from % per_block * kSummaryBytes,
                                    geometry.block_stride, bytes});
        move.dense_views.push_back(
            DenseView(l * part.outer_bytes() + (from - first) * kSummaryBytes, bytes, bytes));
      }
      move.page_bytes = layers * bytes;
      moves.push_back(std::move(move));
    });
  };
  std::int64_t region = first;
  if (region < end && region % per_block != 0) {
    const std::int64_t count = std::min(end - region, per_block - region % per_block);
    add(region, count, 1);
    region += count;
  }
  if (const std::int64_t whole = (end - region) / per_block; region < end && whole > 0) {
    add(region, per_block, whole);
    region += whole * per_block;
  }
  if (region < end) add(region, end - region, 1);
  return moves;
}

std::vector<PageMoves> MoveRows(const CacheGeometry& geometry, std::int64_t ring_block, const Part& part,
                                const Chunk& chunk, std::int64_t from, std::int64_t to) {
  std::vector<PageMoves> moves;
  PageMoves shared;
  const std::int64_t first = chunk.begin / kRowBytes;
  for (std::int64_t row = first; row < chunk.end / kRowBytes; ++row) {
    const std::int64_t position = part.positions[static_cast<std::size_t>(row)];
    if (position < from || position >= to) continue;
    shared.cache_ids.push_back(position % geometry.capacity + 1);
    shared.dense_ids.push_back(row - first + 1);
  }
  if (shared.cache_ids.empty()) return moves;
  shared.cache_blocks = geometry.capacity + 1;
  ForLayers(chunk, [&](std::int64_t first_layer, std::int64_t layers) {
    PageMoves move = shared;
    for (std::int64_t l = first_layer; l < first_layer + layers; ++l) {
      const std::int64_t layer = part.layers.first + chunk.outer + l;
      move.cache_views.push_back(
          DenseView(geometry.ring_row_offset(ring_block, layer, 0), kRowBytes, kRowBytes));
      move.dense_views.push_back(DenseView(l * part.outer_bytes(), kRowBytes, kRowBytes));
    }
    move.page_bytes = layers * kRowBytes;
    moves.push_back(std::move(move));
  });
  return moves;
}

std::vector<PageMoves> MoveBlocks(std::span<const PageView> views, std::int64_t cache_blocks,
                                  const RequestBlocks& blocks, const Part& part, const Chunk& chunk) {
  PageMoves move;
  for (std::int64_t i = 0; i < chunk.outers; ++i) {
    const std::int64_t index = part.first + chunk.outer + i - blocks.first;
    if (index < 0 || index >= std::ssize(blocks.ids)) continue;
    const std::int64_t id = blocks.ids[static_cast<std::size_t>(index)];
    if (id < 0) continue;
    move.cache_ids.push_back(id);
    move.dense_ids.push_back(i + 1);
  }
  if (move.cache_ids.empty()) return {};
  std::int64_t start = 0;  // of a view in its page
  for (const PageView& view : views) {
    const std::int64_t begin = std::max(start, chunk.begin);
    const std::int64_t end = std::min(start + view.bytes, chunk.end);
    if (begin < end) {
      move.cache_views.push_back({view.offset + begin - start, view.block_stride, end - begin});
      move.dense_views.push_back(DenseView(begin - chunk.begin, chunk.end - chunk.begin, end - begin));
    }
    start += view.bytes;
  }
  move.cache_blocks = cache_blocks;
  move.page_bytes = chunk.end - chunk.begin;
  return {std::move(move)};
}

}  // namespace kvsummary
