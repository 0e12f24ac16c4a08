#include "client/split.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "client/client.h"
#include "gtest/gtest.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

using Cut = UpdateShape::Cut;

constexpr std::int64_t kRow = kRowBytes + 24;  // a row with its arrays, in one layer

std::int64_t BytesOf(const UpdateShape& shape, const UpdatePiece& p) {
  return p.rows * (p.layers * kRowBytes + shape.array_bytes_per_row) +
         p.requests * shape.array_bytes_per_request;
}

// Whatever the cut: every row of every layer once, in order, within the size, layers before rows, requests
// as asked, and as few pieces as that allows.
void CheckSplit(const UpdateShape& shape, std::int64_t max_bytes, const std::vector<UpdatePiece>& pieces) {
  const auto& starts = shape.query_start_loc;
  const std::int64_t requests = starts.empty() ? 0 : static_cast<std::int64_t>(starts.size()) - 1;
  ASSERT_FALSE(pieces.empty());
  std::int32_t layer = 0;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const UpdatePiece& p = pieces[i];
    ASSERT_LE(BytesOf(shape, p), max_bytes);
    ASSERT_EQ(p.first_layer, layer);
    ASSERT_EQ(p.first_row, row);
    ASSERT_GE(p.layers, 1);
    if (p.rows < shape.rows) {
      ASSERT_EQ(p.layers, 1);
    }
    if (shape.cut != Cut::kRows) {
      const auto piece_starts = PieceStarts(p, starts);
      ASSERT_EQ(piece_starts.front(), 0);
      ASSERT_EQ(piece_starts.back(), p.rows);
      ASSERT_TRUE(std::is_sorted(piece_starts.begin(), piece_starts.end()));
      for (std::int64_t r = 0; r < p.requests; ++r) {  // each row is in the request that it was in
        const std::int64_t begin = std::max<std::int64_t>(starts[p.first_request + r], p.first_row);
        const std::int64_t end =
            std::min<std::int64_t>(starts[p.first_request + r + 1], p.first_row + p.rows);
        ASSERT_EQ(piece_starts[r + 1] - piece_starts[r], std::max<std::int64_t>(end - begin, 0));
        if (shape.cut == Cut::kRequests) {
          ASSERT_EQ(piece_starts[r + 1] - piece_starts[r],
                    starts[p.first_request + r + 1] - starts[p.first_request + r]);
        }
      }
    }
    const bool last_layer = p.first_layer + p.layers == shape.layers;
    if (p.rows == shape.rows) {
      UpdatePiece larger = p;
      ++larger.layers;
      if (!last_layer) {
        ASSERT_GT(BytesOf(shape, larger), max_bytes);
      }
    } else if (p.first_row + p.rows < shape.rows) {
      // The row, or the request, that follows would not have fitted.
      UpdatePiece larger = p;
      if (shape.cut == Cut::kRequests) {
        ++larger.requests;
        larger.rows = starts[p.first_request + larger.requests] - p.first_row;
      } else {
        ++larger.rows;
        if (shape.cut == Cut::kRowsOfRequests && p.first_request + p.requests < requests &&
            starts[p.first_request + p.requests] == p.first_row + p.rows) {
          ++larger.requests;
        }
      }
      ASSERT_GT(BytesOf(shape, larger), max_bytes);
    }
    row += p.rows;
    if (row == shape.rows) {
      row = 0;
      layer += p.layers;
    }
  }
  ASSERT_EQ(layer, shape.layers);
  ASSERT_EQ(row, 0);
}

TEST(SplitUpdate, DecodeOfEverySmallShape) {
  for (std::int32_t layers = 1; layers <= 4; ++layers) {
    for (std::int64_t rows = 0; rows <= 6; ++rows) {
      for (std::int64_t max_bytes = kRow; max_bytes <= 26 * kRow; max_bytes += kRow / 3) {
        const UpdateShape shape{
            .layers = layers, .rows = rows, .array_bytes_per_row = 24, .query_start_loc = {}};
        const auto pieces = SplitUpdate(shape, max_bytes);
        ASSERT_TRUE(pieces.ok()) << pieces.status();
        CheckSplit(shape, max_bytes, *pieces);
        ASSERT_FALSE(testing::Test::HasFatalFailure())
            << layers << " layers " << rows << " rows " << max_bytes << " bytes";
      }
    }
  }
}

// Every way to cut `rows` rows into up to four requests, empty ones among them.
std::vector<std::vector<std::int32_t>> EveryStarts(std::int32_t rows) {
  std::vector<std::vector<std::int32_t>> all;
  for (std::int32_t a = 0; a <= rows; ++a) {
    for (std::int32_t b = a; b <= rows; ++b) {
      for (std::int32_t c = b; c <= rows; ++c) all.push_back({0, a, b, c, rows});
    }
  }
  return all;
}

TEST(SplitUpdate, RequestsOfEverySmallShape) {
  for (const Cut cut : {Cut::kRequests, Cut::kRowsOfRequests}) {
    for (std::int32_t layers = 1; layers <= 3; ++layers) {
      for (std::int32_t rows = 0; rows <= 6; ++rows) {
        for (const auto& starts : EveryStarts(rows)) {
          std::int32_t longest = 1;
          for (std::size_t i = 1; i < starts.size(); ++i)
            longest = std::max(longest, starts[i] - starts[i - 1]);
          const std::int64_t least = (cut == Cut::kRequests ? longest : 1) * kRow + 8;
          for (std::int64_t max_bytes = least; max_bytes <= 20 * kRow; max_bytes += kRow / 2 - 5) {
            const UpdateShape shape{.cut = cut,
                                    .layers = layers,
                                    .rows = rows,
                                    .array_bytes_per_row = 24,
                                    .array_bytes_per_request = 8,
                                    .query_start_loc = starts};
            const auto pieces = SplitUpdate(shape, max_bytes);
            ASSERT_TRUE(pieces.ok()) << pieces.status();
            CheckSplit(shape, max_bytes, *pieces);
            ASSERT_FALSE(testing::Test::HasFatalFailure())
                << layers << " layers " << rows << " rows " << max_bytes << " bytes";
          }
        }
      }
    }
  }
}

TEST(SplitUpdate, CutsLayersBeforeRows) {
  const UpdateShape shape{.layers = 5, .rows = 10, .array_bytes_per_row = 24, .query_start_loc = {}};
  const auto pieces = SplitUpdate(shape, 10 * (2 * kRowBytes + 24));
  ASSERT_TRUE(pieces.ok());
  const std::vector<UpdatePiece> expected{{.first_layer = 0, .layers = 2, .rows = 10},
                                          {.first_layer = 2, .layers = 2, .rows = 10},
                                          {.first_layer = 4, .layers = 1, .rows = 10}};
  EXPECT_EQ(*pieces, expected);
}

TEST(SplitUpdate, PrefillContinuesARequestInTheNextPiece) {
  const std::vector<std::int32_t> starts{0, 1, 4};
  const UpdateShape shape{.cut = Cut::kRowsOfRequests,
                          .rows = 4,
                          .array_bytes_per_row = 24,
                          .array_bytes_per_request = 4,
                          .query_start_loc = starts};
  const auto pieces = SplitUpdate(shape, 2 * kRow + 8);
  ASSERT_TRUE(pieces.ok());
  const std::vector<UpdatePiece> expected{
      {.layers = 1, .rows = 2, .first_request = 0, .requests = 2},
      {.layers = 1, .first_row = 2, .rows = 2, .first_request = 1, .requests = 1}};
  EXPECT_EQ(*pieces, expected);
  EXPECT_EQ(PieceStarts((*pieces)[0], starts), (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(PieceStarts((*pieces)[1], starts), (std::vector<std::int32_t>{0, 2}));
}

TEST(SplitUpdate, RefusesARowThatFitsNoMessage) {
  const UpdateShape shape{.rows = 1, .array_bytes_per_row = 24, .query_start_loc = {}};
  EXPECT_TRUE(SplitUpdate(shape, kRow).ok());
  EXPECT_EQ(SplitUpdate(shape, kRow - 1).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SplitUpdate, RefusesAVerifyRequestThatFitsNoMessage) {
  const std::vector<std::int32_t> starts{0, 1, 4};
  UpdateShape shape{.cut = Cut::kRequests,
                    .rows = 4,
                    .array_bytes_per_row = 24,
                    .array_bytes_per_request = 8,
                    .query_start_loc = starts};
  EXPECT_TRUE(SplitUpdate(shape, 3 * kRow + 8).ok());
  const auto status = SplitUpdate(shape, 3 * kRow + 7).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(status.message()).find("request 1 "), std::string::npos) << status;
  shape.cut = Cut::kRowsOfRequests;
  EXPECT_TRUE(SplitUpdate(shape, 3 * kRow + 7).ok());
}

TEST(SplitUpdate, RefusesStartsThatItCannotCutBy) {
  const auto field = [](const std::vector<std::int32_t>& starts) {
    const UpdateShape shape{
        .cut = Cut::kRowsOfRequests, .rows = 4, .array_bytes_per_row = 24, .query_start_loc = starts};
    const auto status = SplitUpdate(shape, 2 * kRow).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "QUERY_START_LOC_INVALID");
    return FieldOf(status);
  };
  EXPECT_EQ(field({}), "query_start_loc[0]");
  EXPECT_EQ(field({1, 4}), "query_start_loc[0]");
  EXPECT_EQ(field({0, 3, 2, 4}), "query_start_loc[2]");
  EXPECT_EQ(field({0, 3}), "query_start_loc[1]");
  EXPECT_EQ(field({0, 3, 5}), "query_start_loc[2]");
}

TEST(ProgressAfter, TellsWholeLayersAndTheRowsOfOne) {
  const UpdateShape shape{.layers = 2, .rows = 5, .array_bytes_per_row = 24, .query_start_loc = {}};
  const auto pieces = SplitUpdate(shape, 2 * kRow);
  ASSERT_TRUE(pieces.ok());
  ASSERT_EQ(pieces->size(), 6);
  const auto expect = [&](std::size_t done, std::int32_t layers, std::int32_t partial, std::int64_t rows) {
    const Progress p = ProgressAfter(*pieces, done);
    EXPECT_EQ(p.layers, layers) << done;
    EXPECT_EQ(p.partial_layers, partial) << done;
    EXPECT_EQ(p.rows, rows) << done;
  };
  expect(0, 0, 0, 0);
  expect(1, 0, 1, 2);
  expect(2, 0, 1, 4);
  expect(3, 1, 0, 0);
  expect(5, 1, 1, 4);
  expect(6, 2, 0, 0);
}

TEST(SplitBlocks, EverySmallShapeIsCoveredInOrderWithinTheLimits) {
  constexpr std::int64_t kItem = 100;
  for (std::int64_t blocks = 0; blocks <= 7; ++blocks) {
    for (std::int32_t layers = 1; layers <= 4; ++layers) {
      for (std::int64_t max_blocks = 1; max_blocks <= 8; ++max_blocks) {
        for (std::int64_t max_bytes = kItem + kBlockIndexBytes; max_bytes < 3000; max_bytes += 37) {
          const auto pieces = SplitBlocks(blocks, layers, kItem, max_bytes, max_blocks);
          ASSERT_TRUE(pieces.ok());
          std::int64_t item = 0;
          for (const BlockPiece& p : *pieces) {
            ASSERT_EQ(p.first_block * layers + p.first_layer, item);
            ASSERT_TRUE(p.layers == layers || p.blocks == 1);
            ASSERT_LE(p.first_layer + p.layers, layers);
            ASSERT_LE(p.blocks, max_blocks);
            ASSERT_LE(p.blocks * (p.layers * kItem + kBlockIndexBytes), max_bytes);
            item += p.blocks * p.layers;
          }
          ASSERT_EQ(item, blocks * layers);
        }
      }
    }
  }
}

TEST(SplitBlocks, AnEmptyCallIsOnePiece) {
  const auto pieces = SplitBlocks(0, 3, 100, 1000, 10);
  ASSERT_TRUE(pieces.ok());
  EXPECT_EQ(*pieces, (std::vector<BlockPiece>{{.layers = 3}}));
}

TEST(SplitBlocks, RefusesAnItemThatFitsNoMessage) {
  EXPECT_TRUE(SplitBlocks(1, 2, 100, 110, 10).ok());
  EXPECT_EQ(SplitBlocks(1, 2, 100, 109, 10).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace kvsummary
