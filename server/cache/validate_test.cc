#include "server/cache/validate.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "server/error.h"

namespace kvsummary {
namespace {

// 2 layers, 10 blocks of 16 tokens (slots 16 to 159), 4 ring blocks of 2 * 12 rows (bases 24, 48, 72).
constexpr CacheGeometry kGeometry = {.layers = 2,
                                     .blocks = 10,
                                     .block_size = 16,
                                     .block_stride = 1024,
                                     .ring_blocks = 4,
                                     .capacity = 10,
                                     .rows_per_layer = 12,
                                     .k = 3};
constexpr LayerSpan kBoth{0, 2};

struct Arrays {
  std::vector<std::int64_t> slots{}, positions{}, ring_bases{};
  std::vector<std::int32_t> query_start_loc{}, seq_lens{};
  CacheGeometry geometry = kGeometry;
  LayerSpan layers = kBoth;
  std::int64_t extra_bytes = 0;

  StepArrays Spans() const { return {slots, positions, query_start_loc, seq_lens, ring_bases}; }
  std::size_t RowBytes() const {
    return static_cast<std::size_t>(2 * static_cast<std::int64_t>(slots.size()) * kRowBytes + extra_bytes);
  }
};

// Decode: two requests, one closing a region.
Arrays Decode() { return {.slots = {16 + 7, 40}, .positions = {7, 8}, .ring_bases = {24, 48}}; }
// Verify: requests of 4 and 1 rows; positions 5..8 and 0.
Arrays Verify() {
  return {.slots = {21, 22, 23, 24, 32},
          .ring_bases = {24, 24, 24, 24, 48},
          .query_start_loc = {0, 4, 5},
          .seq_lens = {9, 1}};
}
// Prefill: requests of 3, 0 and 2 rows; positions 6..8 and 0..1.
Arrays Prefill() {
  return {.slots = {22, 23, 24, 32, 33},
          .positions = {6, 7, 8, 0, 1},
          .ring_bases = {24, 24, 24, 48, 48},
          .query_start_loc = {0, 3, 3, 5}};
}

absl::StatusOr<StepEffect> Check(const char kind, const Arrays& a) {
  switch (kind) {
    case 'd':
      return CheckDecode(a.geometry, a.layers, a.Spans(), a.RowBytes());
    case 'v':
      return CheckVerify(a.geometry, a.layers, a.Spans(), a.RowBytes());
    default:
      return CheckPrefill(a.geometry, a.layers, a.Spans(), a.RowBytes());
  }
}

Arrays Good(char kind) { return kind == 'd' ? Decode() : kind == 'v' ? Verify() : Prefill(); }

TEST(Validate, GoodStepsPassAndAreCounted) {
  const auto d = Check('d', Decode());
  ASSERT_TRUE(d.ok()) << d.status();
  EXPECT_EQ(d->rows, 2);
  EXPECT_EQ(d->regions_closed, 1);
  const auto v = Check('v', Verify());
  ASSERT_TRUE(v.ok()) << v.status();
  EXPECT_EQ(v->rows, 5);
  EXPECT_EQ(v->regions_closed, 1);
  const auto p = Check('p', Prefill());
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->rows, 5);
  EXPECT_EQ(p->regions_closed, 1);
}

struct Case {
  const char* name;
  const char* kinds;  // of update that it applies to
  std::function<void(Arrays&)> change;
  const char* reason;
  const char* field;
};

class StepRefused : public ::testing::TestWithParam<Case> {};

TEST_P(StepRefused, WithItsReasonAndField) {
  for (const char* kind = GetParam().kinds; *kind != 0; ++kind) {
    Arrays a = Good(*kind);
    ASSERT_TRUE(Check(*kind, a).ok());
    GetParam().change(a);
    const auto result = Check(*kind, a);
    ASSERT_FALSE(result.ok()) << *kind;
    EXPECT_EQ(RefusalReason(result.status()), GetParam().reason) << *kind << ' ' << result.status();
    EXPECT_EQ(RefusalField(result.status()), GetParam().field) << *kind << ' ' << result.status();
  }
}

constexpr std::int64_t kMin = INT64_MIN;
constexpr std::int64_t kMax = INT64_MAX;

INSTANTIATE_TEST_SUITE_P(
    All, StepRefused,
    ::testing::Values(
        Case{"NoLayers", "dvp", [](Arrays& a) { a.layers = {0, 0}; }, "LAYERS_OUT_OF_RANGE", "layers"},
        Case{"LayersBeyond", "dvp", [](Arrays& a) { a.layers = {1, 2}; }, "LAYERS_OUT_OF_RANGE", "layers"},
        Case{"LayersNegative", "dvp", [](Arrays& a) { a.layers = {-1, 2}; }, "LAYERS_OUT_OF_RANGE", "layers"},
        Case{"LayersOverflow", "dvp", [](Arrays& a) { a.layers = {0x7fffffff, 0x7fffffff}; },
             "LAYERS_OUT_OF_RANGE", "layers"},
        Case{"RowsTruncated", "dvp", [](Arrays& a) { a.extra_bytes = -1; }, "SIZE_MISMATCH", "rows.inline"},
        Case{"RowsTooMany", "dvp", [](Arrays& a) { a.extra_bytes = kRowBytes; }, "SIZE_MISMATCH", "rows.inline"},
        Case{"RowsOfOneLayer", "dvp", [](Arrays& a) { a.layers = {0, 1}; }, "SIZE_MISMATCH", "rows.inline"},
        Case{"PositionsShort", "dp", [](Arrays& a) { a.positions.pop_back(); }, "SIZE_MISMATCH", "positions"},
        Case{"BasesLong", "dvp", [](Arrays& a) { a.ring_bases.push_back(24); }, "SIZE_MISMATCH", "ring_bases"},
        Case{"SeqLensShort", "v", [](Arrays& a) { a.seq_lens.pop_back(); }, "SIZE_MISMATCH", "seq_lens"},
        Case{"SlotBeyond", "dvp", [](Arrays& a) { a.slots[1] = 160; }, "SLOT_OUT_OF_RANGE", "slots[1]"},
        Case{"SlotHuge", "dvp", [](Arrays& a) { a.slots[1] = kMax; }, "SLOT_OUT_OF_RANGE", "slots[1]"},
        Case{"SlotInNullBlock", "dvp", [](Arrays& a) { a.slots[1] = 15; }, "NULL_BLOCK", "slots[1]"},
        Case{"SlotZero", "dvp", [](Arrays& a) { a.slots[0] = 0; }, "NULL_BLOCK", "slots[0]"},
        Case{"BaseMisaligned", "dvp", [](Arrays& a) { a.ring_bases[0] = 23; }, "RING_BASE_MISALIGNED",
             "ring_bases[0]"},
        Case{"BaseBeyond", "dvp", [](Arrays& a) { a.ring_bases[0] = 96; }, "RING_OUT_OF_RANGE", "ring_bases[0]"},
        Case{"BaseNull", "dvp", [](Arrays& a) { a.ring_bases[0] = 0; }, "NULL_RING_BLOCK", "ring_bases[0]"},
        Case{"PositionNegative", "dp", [](Arrays& a) { a.positions[0] = -1; }, "POSITION_OUT_OF_RANGE",
             "positions[0]"},
        Case{"PositionMin", "dp", [](Arrays& a) { a.positions[0] = kMin; }, "POSITION_OUT_OF_RANGE",
             "positions[0]"},
        Case{"PositionHuge", "dp", [](Arrays& a) { a.positions[0] = kMaxIndex + 1; }, "POSITION_OUT_OF_RANGE",
             "positions[0]"},
        Case{"SlotDisagreesWithPosition", "dvp", [](Arrays& a) { a.slots[0] += 1; }, "SLOT_POSITION_MISMATCH",
             "slots[0]"},
        Case{"DuplicateSlot", "d", [](Arrays& a) { a.slots = {23, 23}, a.positions = {7, 7}; }, "DUPLICATE_SLOT",
             "slots[1]"},
        Case{"DuplicateSlotAcrossRequests", "v", [](Arrays& a) { a.slots[4] = 24; }, "DUPLICATE_SLOT",
             "slots[4]"},
        Case{"DuplicateSlotWithinRequest", "p",
             [](Arrays& a) {
               a.slots = {24, 25, 26, 27, 28, 29, 30, 31, 24};
               a.positions = {0, 1, 2, 3, 4, 5, 6, 7, 8};
               a.ring_bases.assign(9, 24);
               a.query_start_loc = {0, 9};
             },
             "DUPLICATE_SLOT", "slots[8]"},
        Case{"OneRingForTwoDecodes", "d", [](Arrays& a) { a.ring_bases[1] = 24; }, "DUPLICATE_RING_BASE",
             "ring_bases[1]"},
        Case{"OneRingForTwoVerifies", "v", [](Arrays& a) { a.ring_bases[4] = 24; }, "DUPLICATE_RING_BASE",
             "ring_bases[4]"},
        Case{"OneRingForTwoPrefills", "p", [](Arrays& a) { a.ring_bases[3] = a.ring_bases[4] = 24; },
             "DUPLICATE_RING_BASE", "ring_bases[3]"},
        Case{"BaseDiffersWithinRequest", "vp", [](Arrays& a) { a.ring_bases[2] = 72; }, "RING_BASE_DIFFERS",
             "ring_bases[2]"},
        Case{"QueryStartEmpty", "vp", [](Arrays& a) { a.query_start_loc.clear(); }, "QUERY_START_LOC_INVALID",
             "query_start_loc"},
        Case{"QueryStartNotZero", "vp", [](Arrays& a) { a.query_start_loc[0] = 1; }, "QUERY_START_LOC_INVALID",
             "query_start_loc[0]"},
        Case{"QueryStartFalls", "p", [](Arrays& a) { a.query_start_loc[2] = 2; }, "QUERY_START_LOC_INVALID",
             "query_start_loc[2]"},
        Case{"QueryStartNegative", "vp", [](Arrays& a) { a.query_start_loc[1] = -1; }, "QUERY_START_LOC_INVALID",
             "query_start_loc[1]"},
        Case{"QueryStartEndsEarly", "v", [](Arrays& a) { a.query_start_loc[2] = 4; }, "QUERY_START_LOC_INVALID",
             "query_start_loc[2]"},
        Case{"QueryStartEndsLate", "p", [](Arrays& a) { a.query_start_loc[3] = 6; }, "QUERY_START_LOC_INVALID",
             "query_start_loc[3]"},
        Case{"SeqLenBelowRows", "v", [](Arrays& a) { a.seq_lens[0] = 3; }, "SEQ_LEN_INVALID", "seq_lens[0]"},
        Case{"SeqLenNegative", "v", [](Arrays& a) { a.seq_lens[1] = INT32_MIN; }, "SEQ_LEN_INVALID",
             "seq_lens[1]"},
        Case{"QueryAboveKPlus1", "v", [](Arrays& a) { a.geometry.k = 2; }, "QUERY_TOO_LONG",
             "query_start_loc[1]"},
        Case{"VerifyOnShortRing", "v", [](Arrays& a) { a.geometry.capacity = 7, a.geometry.k = 0; },
             "VERIFY_CAPACITY", "cache"},
        Case{"PositionsSkip", "p", [](Arrays& a) { a.positions[2] = 16; }, "POSITIONS_NOT_CONSECUTIVE",
             "positions[2]"},
        Case{"PositionsRepeat", "p", [](Arrays& a) { a.positions[4] = 0, a.slots[4] = 40; },
             "POSITIONS_NOT_CONSECUTIVE", "positions[4]"},
        Case{"PaddingBetweenByslot", "vp", [](Arrays& a) { a.slots[1] = -1; }, "PADDING_BETWEEN_ROWS",
             "slots[1]"},
        Case{"PaddingBetweenByBase", "vp", [](Arrays& a) { a.ring_bases[1] = -1; }, "PADDING_BETWEEN_ROWS",
             "slots[1]"},
        Case{"VerifyFirstRowPadding", "v", [](Arrays& a) { a.slots[0] = -1; }, "PADDING_BETWEEN_ROWS",
             "slots[0]"},
        Case{"VerifyLastRowPaddingByBase", "v", [](Arrays& a) { a.ring_bases[3] = -1; }, "RING_BASE_DIFFERS",
             "ring_bases[3]"},
        Case{"VerifyPaddingByDifferentRules", "v", [](Arrays& a) { a.slots[0] = a.ring_bases[1] =
             a.ring_bases[2] = a.ring_bases[3] = -1; }, "RING_BASE_DIFFERS", "ring_bases[1]"}),
    [](const auto& info) { return info.param.name; });

TEST(Validate, PaddingIsNotLookedAt) {
  Arrays d = Decode();
  d.slots = {-1, kMax};
  d.ring_bases = {kMax, -5};
  d.positions = {kMin, -3};
  const auto decode = Check('d', d);
  ASSERT_TRUE(decode.ok()) << decode.status();
  EXPECT_EQ(decode->rows, 0);

  Arrays v = Verify();
  v.slots.assign(5, -1);
  v.seq_lens = {0, -7};
  v.geometry.k = 1;
  EXPECT_TRUE(Check('v', v).ok());

  Arrays p = Prefill();  // padding at both ends of a request
  p.slots[0] = p.slots[2] = -1;
  const auto prefill = Check('p', p);
  ASSERT_TRUE(prefill.ok()) << prefill.status();
  EXPECT_EQ(prefill->rows, 3);
}

TEST(Validate, EmptyStepsPass) {
  Arrays none;
  EXPECT_TRUE(Check('d', none).ok());
  none.query_start_loc = {0};
  EXPECT_TRUE(Check('v', none).ok());
  EXPECT_TRUE(Check('p', none).ok());
}

TEST(Validate, SlotsInAnyOrderPass) {
  Arrays a = {.slots = {147, 19, 83}, .positions = {3, 3, 3}, .ring_bases = {72, 24, 48}};
  EXPECT_TRUE(Check('d', a).ok());
}

TEST(Blocks, ReadsTakeTheNullBlockAndRepeatsAndWritesDoNot) {
  const std::vector<std::int64_t> repeats = {0, 3, 3, 9};
  EXPECT_TRUE(CheckBlocks(kGeometry, repeats, Access::kRead).ok());
  const std::vector<std::int64_t> good = {9, 1, 3};
  EXPECT_TRUE(CheckBlocks(kGeometry, good, Access::kWrite).ok());
  const auto reason = [](std::vector<std::int64_t> ids, Access access) {
    return RefusalReason(CheckBlocks(kGeometry, ids, access)) + " " +
           RefusalField(CheckBlocks(kGeometry, ids, access));
  };
  EXPECT_EQ(reason({1, 0}, Access::kWrite), "NULL_BLOCK blocks[1]");
  EXPECT_EQ(reason({2, 1, 2}, Access::kWrite), "DUPLICATE_BLOCK blocks[2]");
  EXPECT_EQ(reason({1, 10}, Access::kRead), "BLOCK_OUT_OF_RANGE blocks[1]");
  EXPECT_EQ(reason({-1}, Access::kRead), "BLOCK_OUT_OF_RANGE blocks[0]");
  const std::vector<std::int64_t> beyond = {4};
  const auto ring = CheckRingBlocks(kGeometry, beyond, Access::kRead);
  EXPECT_EQ(RefusalReason(ring), "RING_OUT_OF_RANGE");
  EXPECT_EQ(RefusalField(ring), "ring_blocks[0]");
  const std::vector<std::int64_t> null = {0};
  EXPECT_EQ(RefusalReason(CheckRingBlocks(kGeometry, null, Access::kWrite)), "NULL_RING_BLOCK");
}

}  // namespace
}  // namespace kvsummary
