#include "server/device/packed_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace kvsummary {
namespace {

constexpr std::int64_t kLayers = 3;
constexpr std::int64_t kRows = 37;

// Rows in host memory with strides in bytes; aligned to 2 bytes only.
struct Rows {
  Rows(std::int64_t row_stride, std::int64_t layer_stride, std::int64_t z_offset) {
    std::mt19937 random(7);
    const auto bytes =
        std::max<std::int64_t>(0, z_offset) + kLayers * layer_stride + kRows * row_stride + 1024;
    memory.resize(static_cast<std::size_t>(bytes / 2));
    for (auto& v : memory) v = static_cast<std::uint16_t>(random());
    view = {memory.data() + 1, memory.data() + 1 + z_offset / 2,
            row_stride / 2,    row_stride / 2,
            layer_stride / 2,  layer_stride / 2};
  }
  std::vector<std::uint16_t> memory;
  RowsView view;
};

struct Arrays {
  Arrays() : slots(kRows), positions(kRows), bases(kRows), seq_lens{5, 32} {
    std::iota(slots.begin(), slots.end(), 100);
    std::iota(positions.begin(), positions.end(), 200);
    std::iota(bases.begin(), bases.end(), 300);
  }
  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::int32_t> starts = {0, 5, static_cast<std::int32_t>(kRows)};
  std::vector<std::int32_t> seq_lens;
};

std::vector<char> Pack(const PackedStep& packed, std::int64_t part) {
  std::vector<char> out(static_cast<std::size_t>(packed.bytes()), '#');
  for (std::int64_t begin = 0; begin < packed.bytes(); begin += part)
    packed.Write(begin, std::min(begin + part, packed.bytes()), out.data() + begin);
  return out;
}

template <typename T>
void ExpectSame(const T* got, const std::vector<T>& want) {
  EXPECT_TRUE(std::equal(want.begin(), want.end(), got));
}

void ExpectRows(const RowsView& got, const RowsView& want) {
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto at = [&](const std::uint16_t* p, std::int64_t layer_stride, std::int64_t stride) {
        return p + layer * layer_stride + row * stride;
      };
      ASSERT_EQ(std::memcmp(at(got.key, got.key_layer_stride, got.key_stride),
                            at(want.key, want.key_layer_stride, want.key_stride), 512),
                0);
      ASSERT_EQ(std::memcmp(at(got.z, got.z_layer_stride, got.z_stride),
                            at(want.z, want.z_layer_stride, want.z_stride), 512),
                0);
    }
  }
}

TEST(PackedStep, HoldsArraysAndRowsWhateverTheStridesAndTheParts) {
  const Arrays arrays;
  struct Place {
    std::int64_t row_stride, layer_stride, z_offset;
  };
  for (const Place p : {Place{1024, kRows * 1024, 512}, Place{1024, kRows * 1024 + 2, 512},
                        Place{3074, kRows * 3074, 1030}, Place{kLayers * 1024, 1024, 512},
                        Place{512, kRows * 512, kLayers * kRows * 512}, Place{512, kRows * 1024, 512}}) {
    const Rows rows(p.row_stride, p.layer_stride, p.z_offset);
    const PrefillStep step{static_cast<std::int32_t>(kRows),
                           2,
                           rows.view,
                           arrays.slots.data(),
                           arrays.positions.data(),
                           arrays.starts.data(),
                           arrays.bases.data()};
    const PackedStep packed(step, kLayers, true);
    const auto whole = Pack(packed, packed.bytes());
    for (const std::int64_t part : {1024, 2048, 5120}) {
      const auto parts = Pack(packed, part);
      const auto got = std::get<PrefillStep>(packed.At(parts.data()));
      EXPECT_EQ(got.rows, kRows);
      EXPECT_EQ(got.requests, 2);
      ExpectSame(got.slots, arrays.slots);
      ExpectSame(got.positions, arrays.positions);
      ExpectSame(got.query_start_loc, arrays.starts);
      ExpectSame(got.ring_bases, arrays.bases);
      ExpectRows(got.in, step.in);
      EXPECT_EQ(parts, whole);
    }
  }
}

TEST(PackedStep, KeepsRowsWhereTheyAreWhenAsked) {
  const Arrays arrays;
  const Rows rows(1024, kRows * 1024, 512);
  const VerifyStep step{static_cast<std::int32_t>(kRows),
                        2,
                        rows.view,
                        arrays.slots.data(),
                        arrays.starts.data(),
                        arrays.seq_lens.data(),
                        arrays.bases.data()};
  const PackedStep packed(step, kLayers, false);
  EXPECT_EQ(packed.bytes(), packed.rows_offset());
  const auto memory = Pack(packed, packed.bytes());
  const auto got = std::get<VerifyStep>(packed.At(memory.data()));
  EXPECT_EQ(got.in.key, step.in.key);
  EXPECT_EQ(got.in.z_layer_stride, step.in.z_layer_stride);
  ExpectSame(got.slots, arrays.slots);
  ExpectSame(got.query_start_loc, arrays.starts);
  ExpectSame(got.seq_lens, arrays.seq_lens);
  ExpectSame(got.ring_bases, arrays.bases);
}

TEST(PackedStep, ArraysAreAlignedForKernels) {
  const Arrays arrays;
  const Rows rows(1024, kRows * 1024, 512);
  const DecodeStep step{static_cast<std::int32_t>(kRows), rows.view, arrays.slots.data(),
                        arrays.positions.data(), arrays.bases.data()};
  const PackedStep packed(step, kLayers, true);
  const auto got = std::get<DecodeStep>(packed.At(nullptr));
  for (const std::int64_t* array : {got.slots, got.positions, got.ring_bases})
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array) % 256, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(got.in.key) % 1024, 0u);
  EXPECT_EQ(packed.bytes() % PackedStep::kPartAlignment, 0);
}

}  // namespace
}  // namespace kvsummary
