#include "server/cache/geometry.h"

#include <gtest/gtest.h>

#include "server/error.h"
#include "server/name.h"

namespace kvsummary {
namespace {

CacheGeometry Good() {
  return {.layers = 3, .blocks = 10, .block_size = 64, .ring_blocks = 4, .capacity = 10, .k = 3};
}

struct Case {
  const char* name;
  void (*change)(CacheGeometry&);
  const char* reason;
  const char* field;
};

class GeometryRefused : public ::testing::TestWithParam<Case> {};

TEST_P(GeometryRefused, WithItsReasonAndField) {
  CacheGeometry g = Good();
  GetParam().change(g);
  const auto result = CheckGeometry(g);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(RefusalReason(result.status()), GetParam().reason);
  EXPECT_EQ(RefusalField(result.status()), GetParam().field);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
}

constexpr std::int64_t kBig = std::int64_t{1} << 40;

INSTANTIATE_TEST_SUITE_P(
    All, GeometryRefused,
    ::testing::Values(
        Case{"NoLayers", [](CacheGeometry& g) { g.layers = 0; }, "COUNT_OUT_OF_RANGE", "geometry.layers"},
        Case{"NegativeLayers", [](CacheGeometry& g) { g.layers = -1; }, "COUNT_OUT_OF_RANGE",
             "geometry.layers"},
        Case{"ManyLayers", [](CacheGeometry& g) { g.layers = kMaxLayers + 1; }, "COUNT_OUT_OF_RANGE",
             "geometry.layers"},
        Case{"NoBlocks", [](CacheGeometry& g) { g.blocks = 0; }, "COUNT_OUT_OF_RANGE", "geometry.blocks"},
        Case{"ManyBlocks", [](CacheGeometry& g) { g.blocks = kBig; }, "COUNT_OUT_OF_RANGE",
             "geometry.blocks"},
        Case{"NoRing", [](CacheGeometry& g) { g.ring_blocks = 0; }, "COUNT_OUT_OF_RANGE",
             "geometry.ring_blocks"},
        Case{"BlockSizeZero", [](CacheGeometry& g) { g.block_size = 0; }, "BLOCK_SIZE_INVALID",
             "geometry.block_size"},
        Case{"BlockSizeOdd", [](CacheGeometry& g) { g.block_size = 60; }, "BLOCK_SIZE_INVALID",
             "geometry.block_size"},
        Case{"BlockSizeNegative", [](CacheGeometry& g) { g.block_size = -8; }, "BLOCK_SIZE_INVALID",
             "geometry.block_size"},
        Case{"BlockSizeHuge", [](CacheGeometry& g) { g.block_size = 32776; }, "BLOCK_SIZE_INVALID",
             "geometry.block_size"},
        Case{"NegativeK", [](CacheGeometry& g) { g.k = -1; }, "K_INVALID", "geometry.k"},
        Case{"CapacityBelow7PlusK", [](CacheGeometry& g) { g.capacity = 9; }, "CAPACITY_TOO_SMALL",
             "geometry.capacity"},
        Case{"HugeK", [](CacheGeometry& g) { g.k = 0x7fffffff; }, "CAPACITY_TOO_SMALL", "geometry.capacity"},
        Case{"NegativeCapacity", [](CacheGeometry& g) { g.capacity = -10; }, "CAPACITY_TOO_SMALL",
             "geometry.capacity"},
        Case{"HugeCapacity", [](CacheGeometry& g) { g.capacity = kMaxCapacity + 1; }, "COUNT_OUT_OF_RANGE",
             "geometry.capacity"},
        Case{"CapacityAboveRows", [](CacheGeometry& g) { g.rows_per_layer = 9; }, "CAPACITY_ABOVE_ROWS",
             "geometry.rows_per_layer"},
        Case{"NegativeRows", [](CacheGeometry& g) { g.rows_per_layer = -1; }, "CAPACITY_ABOVE_ROWS",
             "geometry.rows_per_layer"},
        Case{"SlotsBeyond31Bits", [](CacheGeometry& g) { g.blocks = (std::int64_t{1} << 31) / 64; },
             "CACHE_TOO_LARGE", "geometry.blocks"},
        Case{"RingRowsBeyond31Bits", [](CacheGeometry& g) { g.ring_blocks = 0x7fffffff; }, "CACHE_TOO_LARGE",
             "geometry.ring_blocks"},
        Case{"RingRowsOverflow",
             [](CacheGeometry& g) { g.rows_per_layer = 0x7fffffff, g.ring_blocks = 0x7fffffff; },
             "CACHE_TOO_LARGE", "geometry.ring_blocks"},
        Case{"StrideTooSmall", [](CacheGeometry& g) { g.block_stride = 3 * 2048 - 256; },
             "BLOCK_STRIDE_INVALID", "geometry.block_stride"},
        Case{"StrideOdd", [](CacheGeometry& g) { g.block_stride = 3 * 2048 + 128; }, "BLOCK_STRIDE_INVALID",
             "geometry.block_stride"},
        Case{"StrideNegative", [](CacheGeometry& g) { g.block_stride = -256; }, "BLOCK_STRIDE_INVALID",
             "geometry.block_stride"},
        Case{"StrideOverflow", [](CacheGeometry& g) { g.block_stride = std::int64_t{1} << 62; },
             "CACHE_TOO_LARGE", "geometry.block_stride"}),
    [](const auto& info) { return info.param.name; });

TEST(Geometry, DefaultsAreFilledIn) {
  const auto g = CheckGeometry(Good());
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_EQ(g->block_stride, 3 * 2048);
  EXPECT_EQ(g->rows_per_layer, 10);
  EXPECT_EQ(g->rows_per_block(), 30);
}

TEST(Geometry, CapacityOfExactly7PlusKIsEnough) {
  CacheGeometry g = Good();
  g.k = 0;
  g.capacity = 7;
  EXPECT_TRUE(CheckGeometry(g).ok());
}

TEST(Geometry, LargestSlotCountPasses) {
  CacheGeometry g = Good();
  g.layers = 1;
  g.block_size = 8;
  g.blocks = (std::int64_t{1} << 31) / 8 - 1;
  EXPECT_TRUE(CheckGeometry(g).ok());
}

TEST(Name, LettersDigitsAndAFewMarks) {
  for (const char* name : {"a", "engine-0", "a.b_c:d/e", "0"}) EXPECT_TRUE(CheckName(name).ok()) << name;
  EXPECT_TRUE(CheckName(std::string(128, 'x')).ok());
  for (const std::string& name : {std::string(), std::string(129, 'x'), std::string("a b"),
                                  std::string("a\n"), std::string("a\0b", 3), std::string("\xc3\xa4")}) {
    EXPECT_EQ(RefusalReason(CheckName(name)), "NAME_INVALID");
  }
}

}  // namespace
}  // namespace kvsummary
