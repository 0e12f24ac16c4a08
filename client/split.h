// How a call that is larger than a message is cut. Pure arithmetic over counts and bytes.
//
// An update is cut by layers first: each message brings all rows of as many layers as fit. Only where a
// single layer does not fit are its rows cut, and then each message is of one layer. So the rows of every
// piece are one contiguous range of the caller's [layers][rows][512].
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvsummary {

struct UpdateShape {
  // Where a layer may be cut: decode has no requests, a prefill may be cut within one, a verify may not.
  enum class Cut { kRows, kRowsOfRequests, kRequests };

  Cut cut = Cut::kRows;
  std::int32_t layers = 1;  // at least 1
  std::int64_t rows = 0;
  std::int64_t array_bytes_per_row = 0;
  std::int64_t array_bytes_per_request = 0;
  std::span<const std::int32_t> query_start_loc;  // [requests + 1], from 0 up to `rows`; not with kRows
};

// Rows [first_row, first_row + rows) of layers [first_layer, first_layer + layers), and the requests that
// they belong to.
struct UpdatePiece {
  std::int32_t first_layer = 0;
  std::int32_t layers = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t first_request = 0;
  std::int64_t requests = 0;

  friend bool operator==(const UpdatePiece&, const UpdatePiece&) = default;
};

// Pieces of at most `max_bytes` of rows and arrays, in the order to send them; at least one. Greedy: as few
// pieces as that order allows. INVALID_ARGUMENT when query_start_loc is not as above
// (QUERY_START_LOC_INVALID), RESOURCE_EXHAUSTED when one row, or one request that must stay whole, is larger
// than `max_bytes`.
absl::StatusOr<std::vector<UpdatePiece>> SplitUpdate(const UpdateShape& shape, std::int64_t max_bytes);

// query_start_loc of the piece itself, from 0 to piece.rows.
std::vector<std::int32_t> PieceStarts(const UpdatePiece& piece,
                                      std::span<const std::int32_t> query_start_loc);

// How far an update came whose first `done` pieces were applied.
Progress ProgressAfter(std::span<const UpdatePiece> pieces, std::size_t done);

// Blocks [first_block, first_block + blocks) in layers [first_layer, first_layer + layers): several whole
// blocks, or some layers of one, and so one contiguous range of the caller's [blocks][layers][item].
struct BlockPiece {
  std::int64_t first_block = 0;
  std::int64_t blocks = 0;
  std::int32_t first_layer = 0;
  std::int32_t layers = 0;

  friend bool operator==(const BlockPiece&, const BlockPiece&) = default;
};

// Bytes that naming a block takes in a message, at most.
inline constexpr std::int64_t kBlockIndexBytes = 10;

// Pieces of at most `max_blocks` blocks (at least 1) and `max_bytes` of items and block numbers; at least
// one. RESOURCE_EXHAUSTED when a single item does not fit.
absl::StatusOr<std::vector<BlockPiece>> SplitBlocks(std::int64_t blocks, std::int32_t layers,
                                                    std::int64_t item_bytes, std::int64_t max_bytes,
                                                    std::int64_t max_blocks);

}  // namespace kvsummary
