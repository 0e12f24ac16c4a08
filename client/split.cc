#include "client/split.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

absl::Status TooLarge(const std::string& what, std::int64_t bytes, std::int64_t max_bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " takes ", bytes, " bytes, a message has room for ", max_bytes));
}

absl::Status CheckStarts(std::span<const std::int32_t> starts, std::int64_t rows) {
  const auto invalid = [](std::size_t i, const std::string& why) {
    return MakeError(absl::StatusCode::kInvalidArgument, absl::StrCat("query_start_loc ", why),
                     "QUERY_START_LOC_INVALID", absl::StrCat("query_start_loc[", i, "]"));
  };
  if (starts.empty()) return invalid(0, "is empty");
  if (starts.front() != 0) return invalid(0, absl::StrCat("starts at ", starts.front(), ", not at 0"));
  for (std::size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] < starts[i - 1]) {
      return invalid(i, absl::StrCat("falls from ", starts[i - 1], " to ", starts[i]));
    }
  }
  if (starts.back() != rows) {
    return invalid(starts.size() - 1, absl::StrCat("ends at ", starts.back(), ", there are ", rows, " rows"));
  }
  return absl::OkStatus();
}

// The pieces of one layer that is larger than a message.
class LayerCutter {
 public:
  LayerCutter(const UpdateShape& shape, std::int64_t max_bytes)
      : shape_(shape), max_bytes_(max_bytes), row_bytes_(kRowBytes + shape.array_bytes_per_row) {}

  absl::StatusOr<std::vector<UpdatePiece>> Cut() {
    if (shape_.cut == UpdateShape::Cut::kRows) {
      if (row_bytes_ > max_bytes_) return TooLarge("a row", row_bytes_, max_bytes_);
      Take(shape_.rows, 0);
    } else {
      if (auto status = CheckStarts(shape_.query_start_loc, shape_.rows); !status.ok()) return status;
      for (std::size_t i = 0; i + 1 < shape_.query_start_loc.size(); ++i) {
        const std::int64_t rows = shape_.query_start_loc[i + 1] - shape_.query_start_loc[i];
        if (auto status = AddRequest(static_cast<std::int64_t>(i), rows); !status.ok()) return status;
      }
    }
    if (piece_.rows > 0) pieces_.push_back(piece_);
    return std::move(pieces_);
  }

 private:
  absl::Status AddRequest(std::int64_t request, std::int64_t rows) {
    const std::int64_t uncut =
        shape_.cut == UpdateShape::Cut::kRequests ? rows : std::min<std::int64_t>(rows, 1);
    const std::int64_t needed = shape_.array_bytes_per_request + uncut * row_bytes_;
    if (needed > max_bytes_) {
      return TooLarge(absl::StrCat(uncut == rows ? "request " : "a row of request ", request), needed,
                      max_bytes_);
    }
    if (needed > max_bytes_ - bytes_) Flush(request);
    Take(rows, request);
    return absl::OkStatus();
  }

  // Adds rows to the open piece and, as it fills up, to further ones.
  void Take(std::int64_t rows, std::int64_t request) {
    for (;;) {
      if (shape_.cut != UpdateShape::Cut::kRows) {
        ++piece_.requests;
        bytes_ += shape_.array_bytes_per_request;
      }
      const std::int64_t taken = std::min(rows, (max_bytes_ - bytes_) / row_bytes_);
      piece_.rows += taken;
      bytes_ += taken * row_bytes_;
      rows -= taken;
      if (rows == 0) return;
      Flush(request);
    }
  }

  void Flush(std::int64_t next_request) {
    pieces_.push_back(piece_);
    piece_ = {.layers = 1, .first_row = piece_.first_row + piece_.rows, .first_request = next_request};
    bytes_ = 0;
  }

  const UpdateShape& shape_;
  const std::int64_t max_bytes_;
  const std::int64_t row_bytes_;
  std::vector<UpdatePiece> pieces_;
  UpdatePiece piece_{.layers = 1};
  std::int64_t bytes_ = 0;  // of piece_
};

}  // namespace

absl::StatusOr<std::vector<UpdatePiece>> SplitUpdate(const UpdateShape& shape, std::int64_t max_bytes) {
  const bool by_requests = shape.cut != UpdateShape::Cut::kRows && !shape.query_start_loc.empty();
  const std::int64_t requests = by_requests ? static_cast<std::int64_t>(shape.query_start_loc.size()) - 1 : 0;
  const std::int64_t array_bytes =
      shape.rows * shape.array_bytes_per_row + requests * shape.array_bytes_per_request;
  const std::int64_t layer_bytes = shape.rows * kRowBytes;
  std::vector<UpdatePiece> layer{{.layers = 1, .rows = shape.rows, .requests = requests}};
  std::int32_t layers_per_piece = 1;
  if (array_bytes + layer_bytes > max_bytes) {
    auto cut = LayerCutter(shape, max_bytes).Cut();
    if (!cut.ok()) return cut.status();
    layer = *std::move(cut);
  } else if (layer_bytes == 0) {
    layers_per_piece = shape.layers;
  } else {
    layers_per_piece = static_cast<std::int32_t>(
        std::min<std::int64_t>(shape.layers, (max_bytes - array_bytes) / layer_bytes));
  }
  std::vector<UpdatePiece> pieces;
  for (std::int32_t first = 0; first < shape.layers; first += layers_per_piece) {
    for (UpdatePiece piece : layer) {
      piece.first_layer = first;
      piece.layers = std::min(layers_per_piece, shape.layers - first);
      pieces.push_back(piece);
    }
  }
  return pieces;
}

std::vector<std::int32_t> PieceStarts(const UpdatePiece& piece,
                                      std::span<const std::int32_t> query_start_loc) {
  std::vector<std::int32_t> starts;
  for (std::int64_t i = piece.first_request; i <= piece.first_request + piece.requests; ++i) {
    const std::int64_t start = query_start_loc[static_cast<std::size_t>(i)] - piece.first_row;
    starts.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(start, 0, piece.rows)));
  }
  return starts;
}

Progress ProgressAfter(std::span<const UpdatePiece> pieces, std::size_t done) {
  if (done == pieces.size()) {
    return {.layers = pieces.empty() ? 0 : pieces.back().first_layer + pieces.back().layers};
  }
  const UpdatePiece& next = pieces[done];
  return {.layers = next.first_layer,
          .partial_layers = next.first_row > 0 ? next.layers : 0,
          .rows = next.first_row};
}

absl::StatusOr<std::vector<BlockPiece>> SplitBlocks(std::int64_t blocks, std::int32_t layers,
                                                    std::int64_t item_bytes, std::int64_t max_bytes,
                                                    std::int64_t max_blocks) {
  std::vector<BlockPiece> pieces;
  const std::int64_t block_bytes = layers * item_bytes + kBlockIndexBytes;
  const std::int64_t whole = std::min(max_bytes / block_bytes, max_blocks);
  if (whole > 0) {
    std::int64_t first = 0;
    do {
      const std::int64_t count = std::min(whole, blocks - first);
      pieces.push_back({.first_block = first, .blocks = count, .layers = layers});
      first += count;
    } while (first < blocks);
    return pieces;
  }
  const std::int64_t part = (max_bytes - kBlockIndexBytes) / item_bytes;
  if (part < 1) return TooLarge("one layer of a block", item_bytes + kBlockIndexBytes, max_bytes);
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t layer = 0; layer < layers; layer += part) {
      pieces.push_back({.first_block = block,
                        .blocks = 1,
                        .first_layer = static_cast<std::int32_t>(layer),
                        .layers = static_cast<std::int32_t>(std::min<std::int64_t>(part, layers - layer))});
    }
  }
  return pieces;
}

}  // namespace kvsummary
