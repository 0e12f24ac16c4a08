#include "server/session/references.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kMin = INT64_MIN;
constexpr std::int64_t kMax = INT64_MAX;
constexpr std::int64_t kBytes = 16384;

class TestBuffer final : public Buffer {
 public:
  explicit TestBuffer(char* data, std::string device = "") : Buffer(data, kBytes, std::move(device)) {}
};

alignas(64) std::array<char, kBytes + 64> memory;

std::string Fault(const absl::Status& status) { return RefusalReason(status) + " " + RefusalField(status); }

// Two layers of three rows, key and z side by side, that end with the buffer.
constexpr RowsPlace kPlace = {.key_offset = kBytes - 6 * 1024,
                              .z_offset = kBytes - 6 * 1024 + 512,
                              .row_stride = 1024,
                              .layer_stride = 3072};

TEST(References, RowsBecomeAStridedView) {
  const TestBuffer buffer(memory.data());
  const RowsPlace place = {.key_offset = 64, .z_offset = 8192, .row_stride = 640, .layer_stride = 2048};
  const auto rows = FindRows(buffer, place, 2, 3);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(reinterpret_cast<const char*>(rows->key), memory.data() + 64);
  EXPECT_EQ(reinterpret_cast<const char*>(rows->z), memory.data() + 8192);
  EXPECT_EQ(rows->key_stride, 320);
  EXPECT_EQ(rows->z_stride, 320);
  EXPECT_EQ(rows->key_layer_stride, 1024);
  EXPECT_EQ(rows->z_layer_stride, 1024);
}

TEST(References, RowsThatEndWithTheBufferFit) {
  const TestBuffer buffer(memory.data());
  EXPECT_TRUE(FindRows(buffer, kPlace, 2, 3).ok());
  RowsPlace place = kPlace;  // a single row or layer does not use its stride
  place.layer_stride = kMax - 1;
  place.row_stride = kMaxRowStride - 1;
  EXPECT_TRUE(FindRows(buffer, place, 1, 1).ok());
}

TEST(References, NoRowsNeedOnlyAnOffsetInside) {
  const TestBuffer buffer(memory.data());
  const RowsPlace end = {.key_offset = kBytes, .z_offset = kBytes, .row_stride = 512, .layer_stride = 0};
  EXPECT_TRUE(FindRows(buffer, end, 23, 0).ok());
  const RowsPlace beyond = {.key_offset = kBytes + 2, .z_offset = 0, .row_stride = 512, .layer_stride = 0};
  EXPECT_EQ(Fault(FindRows(buffer, beyond, 1, 0).status()), "BUFFER_RANGE rows.reference.key_offset_bytes");
}

struct RowsCase {
  const char* name;
  std::function<void(RowsPlace&)> change;
  const char* field;
  std::int64_t layers = 2;
  std::int64_t rows = 3;
};

class RowsRefused : public ::testing::TestWithParam<RowsCase> {};

TEST_P(RowsRefused, WithTheFieldAtFault) {
  const TestBuffer buffer(memory.data());
  RowsPlace place = kPlace;
  GetParam().change(place);
  const auto rows = FindRows(buffer, place, GetParam().layers, GetParam().rows);
  EXPECT_EQ(Fault(rows.status()), std::string("BUFFER_RANGE rows.reference.") + GetParam().field)
      << rows.status();
}

INSTANTIATE_TEST_SUITE_P(
    All, RowsRefused,
    ::testing::Values(
        RowsCase{"KeyBeyond", [](RowsPlace& p) { p.key_offset += 514; }, "key_offset_bytes"},
        RowsCase{"ZBeyond", [](RowsPlace& p) { p.z_offset += 2; }, "z_offset_bytes"},
        RowsCase{"KeyNegative", [](RowsPlace& p) { p.key_offset = -2; }, "key_offset_bytes"},
        RowsCase{"ZMin", [](RowsPlace& p) { p.z_offset = kMin; }, "z_offset_bytes"},
        RowsCase{"KeyMax", [](RowsPlace& p) { p.key_offset = kMax - 1; }, "key_offset_bytes"},
        RowsCase{"KeyOdd", [](RowsPlace& p) { p.key_offset = 1; }, "key_offset_bytes"},
        RowsCase{"ZOdd", [](RowsPlace& p) { p.z_offset = 3; }, "z_offset_bytes"},
        RowsCase{"RowStrideBelowARow", [](RowsPlace& p) { p.row_stride = 510; }, "row_stride_bytes"},
        RowsCase{"RowStrideZero", [](RowsPlace& p) { p.row_stride = 0; }, "row_stride_bytes"},
        RowsCase{"RowStrideNegative", [](RowsPlace& p) { p.row_stride = -1024; }, "row_stride_bytes"},
        RowsCase{"RowStrideHuge", [](RowsPlace& p) { p.row_stride = kMax; }, "row_stride_bytes"},
        RowsCase{"RowStrideOdd", [](RowsPlace& p) { p.row_stride = 1023; }, "row_stride_bytes"},
        RowsCase{"LayerStrideNegative", [](RowsPlace& p) { p.layer_stride = -2; }, "layer_stride_bytes"},
        RowsCase{"LayerStrideMin", [](RowsPlace& p) { p.layer_stride = kMin; }, "layer_stride_bytes"},
        RowsCase{"LayerStrideOdd", [](RowsPlace& p) { p.layer_stride = 3071; }, "layer_stride_bytes"},
        RowsCase{"LayerStrideLeaves", [](RowsPlace& p) { p.layer_stride += 2; }, "z_offset_bytes"},
        RowsCase{"LayerStrideMax", [](RowsPlace& p) { p.layer_stride = kMax - 1; }, "key_offset_bytes"},
        RowsCase{"AllMax",
                 [](RowsPlace& p) {
                   p = {kMax - 1, kMax - 1, kMaxRowStride - 1, kMax - 1};
                 },
                 "key_offset_bytes", 0x7fffffff, 0x7fffffff},
        // 4 * 2^62 bytes are 0 in 64 bits.
        RowsCase{"SumWrapsAround",
                 [](RowsPlace& p) {
                   p = {0, 0, 1024, std::int64_t{1} << 62};
                 },
                 "key_offset_bytes", 5, 3},
        RowsCase{"TooManyRows", [](RowsPlace&) {}, "key_offset_bytes", 2, 0x7fffffff}),
    [](const auto& info) { return info.param.name; });

TEST(References, DeviceRowsAreAlignedForTheKernels) {
  const TestBuffer device(memory.data(), "cuda:0");
  const auto fault = [&](std::int64_t key, std::int64_t z, std::int64_t row, std::int64_t layer) {
    return Fault(FindRows(device, {key, z, row, layer}, 2, 3).status());
  };
  EXPECT_EQ(fault(16, 528, 1040, 4096), " ");
  EXPECT_EQ(fault(8, 528, 1040, 4096), "BUFFER_RANGE rows.reference.key_offset_bytes");
  EXPECT_EQ(fault(16, 520, 1040, 4096), "BUFFER_RANGE rows.reference.z_offset_bytes");
  EXPECT_EQ(fault(16, 528, 1032, 4096), "BUFFER_RANGE rows.reference.row_stride_bytes");
  EXPECT_EQ(fault(16, 528, 1040, 4098), "BUFFER_RANGE rows.reference.layer_stride_bytes");
  const TestBuffer odd(memory.data() + 8, "cuda:0");  // it is the address that counts
  EXPECT_TRUE(FindRows(odd, {8, 520, 1040, 4096}, 2, 3).ok());
  EXPECT_FALSE(FindRows(odd, {16, 528, 1040, 4096}, 2, 3).ok());
}

TEST(References, ArraysAreCopied) {
  const TestBuffer buffer(memory.data());
  auto* numbers = reinterpret_cast<std::int64_t*>(memory.data() + kBytes - 24);
  for (int i = 0; i < 3; ++i) numbers[i] = 7 + i;
  const auto copy = CopyArray<std::int64_t>(buffer, kBytes - 24, 3, "slots");
  ASSERT_TRUE(copy.ok()) << copy.status();
  numbers[1] = -1;
  EXPECT_EQ(*copy, (std::vector<std::int64_t>{7, 8, 9}));
  EXPECT_TRUE(CopyArray<std::int32_t>(buffer, kBytes, 0, "slots").ok());
}

TEST(References, ArraysOutsideAreRefused) {
  const TestBuffer buffer(memory.data());
  const auto fault = [&](std::int64_t offset, std::int64_t count) {
    return Fault(CopyArray<std::int64_t>(buffer, offset, count, "f").status());
  };
  EXPECT_EQ(fault(-8, 1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(kMin, 1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, -1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, kMin), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, kBytes / 8 + 1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, kMax), "BUFFER_RANGE f");
  EXPECT_EQ(fault(kMax - 7, 1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(kBytes + 8, 0), "BUFFER_RANGE f");
  EXPECT_EQ(fault(4, 1), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, kBytes / 8), " ");
  EXPECT_EQ(Fault(CopyArray<std::int32_t>(buffer, 4, 1, "f").status()), " ");
  EXPECT_EQ(Fault(CopyArray<std::int32_t>(buffer, 2, 1, "f").status()), "BUFFER_RANGE f");
  const TestBuffer device(memory.data(), "cuda:0");
  EXPECT_EQ(Fault(CopyArray<std::int64_t>(device, 0, 1, "f").status()), "BUFFER_DEVICE f");
}

TEST(References, ACounterIsReachedAtItsValueAndBeyond) {
  auto buffer = std::make_shared<TestBuffer>(memory.data());
  auto* word = reinterpret_cast<std::uint64_t*>(memory.data() + 8);
  *word = 4;
  const auto counter = Counter::Find(buffer, 8, 5, "f");
  ASSERT_TRUE(counter.ok()) << counter.status();
  EXPECT_FALSE(counter->Reached());
  *word = 5;
  EXPECT_TRUE(counter->Reached());
  *word = UINT64_MAX;
  EXPECT_TRUE(counter->Reached());
  counter->Set();
  EXPECT_EQ(*word, 5u);
  EXPECT_EQ(buffer.use_count(), 2);
}

TEST(References, CountersOutsideAreRefused) {
  const auto fault = [](std::int64_t offset, const char* device = "") {
    return Fault(Counter::Find(std::make_shared<TestBuffer>(memory.data(), device), offset, 1, "f").status());
  };
  EXPECT_EQ(fault(kBytes - 8), " ");
  EXPECT_EQ(fault(kBytes), "BUFFER_RANGE f");
  EXPECT_EQ(fault(kBytes - 4), "BUFFER_RANGE f");
  EXPECT_EQ(fault(4), "BUFFER_RANGE f");
  EXPECT_EQ(fault(-8), "BUFFER_RANGE f");
  EXPECT_EQ(fault(kMax), "BUFFER_RANGE f");
  EXPECT_EQ(fault(0, "cuda:0"), "BUFFER_DEVICE f");
}

}  // namespace
}  // namespace kvsummary
