// The host kernels against the engine's own: every golden file, on the case's own memory layout.
#include "client/golden.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kernels/update.h"

namespace kvsummary {
namespace {

std::string Sha256(std::span<const std::uint8_t> bytes) {
  std::array<std::uint8_t, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
  std::string hex;
  for (unsigned i = 0; i < size; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
  }
  return hex;
}

std::span<const std::uint8_t> Bytes(std::span<const std::uint16_t> x) {
  return {reinterpret_cast<const std::uint8_t*>(x.data()), x.size_bytes()};
}

// The summaries without the bytes between blocks.
std::vector<std::uint8_t> Dense(const GoldenCase& golden, std::span<const std::uint8_t> backing) {
  std::vector<std::uint8_t> out;
  for (std::int64_t b = 0; b < golden.blocks; ++b) {
    const auto page = backing.subspan(b * golden.block_stride_bytes, golden.page_bytes());
    out.insert(out.end(), page.begin(), page.end());
  }
  return out;
}

// `layers` copies of a case's first state; the case runs in one of them or in a run of them.
struct State {
  State(const GoldenCase& golden, int layers) : golden(golden) {
    for (int l = 0; l < layers; ++l) {
      backing.insert(backing.end(), golden.initial_backing.begin(), golden.initial_backing.end());
      ring.insert(ring.end(), golden.initial_ring.begin(), golden.initial_ring.end());
    }
  }
  CacheView View(int first, int layers) {
    CacheView v;
    v.layer_stride = static_cast<std::int64_t>(golden.initial_backing.size());
    v.summaries = backing.data() + first * v.layer_stride;
    v.block_stride = golden.block_stride_bytes;
    v.blocks = golden.blocks;
    v.block_size = golden.block_size;
    v.layers = layers;
    v.ring_layer_stride = golden.ring_rows();
    v.ring = ring.data() + first * v.ring_layer_stride * kRowElements;
    v.ring_blocks = golden.ring_blocks;
    v.rows_per_block = golden.ring_rows_per_block;
    v.capacity = golden.ring_capacity;
    return v;
  }
  std::span<const std::uint8_t> LayerBacking(int layer) const {
    const std::size_t size = golden.initial_backing.size();
    return std::span(backing).subspan(layer * size, size);
  }
  std::span<const std::uint16_t> LayerRing(int layer) const {
    const std::size_t size = golden.initial_ring.size();
    return std::span(ring).subspan(layer * size, size);
  }

  const GoldenCase& golden;
  std::vector<std::uint8_t> backing;
  std::vector<std::uint16_t> ring;
};

// Every layer gets the same rows. Returns the number of bad rows.
unsigned long long RunStep(const UpdateKernels& kernels, const CacheView& view, const GoldenStep& step) {
  unsigned long long skipped = 0;
  const Launch launch{nullptr, &skipped};
  const auto rows = static_cast<std::int32_t>(step.rows);
  const RowsView in{step.key.data(), step.z.data(), kChannels, kChannels, 0, 0};
  switch (step.kind) {
    case GoldenStep::Kind::kDecode:
      kernels.Decode(view, {rows, in, step.slots.data(), step.positions.data(), step.ring_bases.data()},
                     launch);
      break;
    case GoldenStep::Kind::kVerify:
      kernels.Verify(view,
                     {rows, static_cast<std::int32_t>(step.requests()), in, step.slots.data(),
                      step.query_start_loc.data(), step.seq_lens.data(), step.ring_bases.data()},
                     launch);
      break;
    case GoldenStep::Kind::kPrefill:
      kernels.Prefill(view,
                      {rows, static_cast<std::int32_t>(step.requests()), in, step.slots.data(),
                       step.positions.data(), step.query_start_loc.data(), step.ring_bases.data()},
                      launch);
      break;
  }
  return skipped;
}

class KernelsGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") +
                             "/tests/data/golden/" + GetParam() + ".safetensors");
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
    kernels_ = {&ScalarKernels()};
    if (Avx2Kernels() != nullptr) kernels_.push_back(Avx2Kernels());
  }

  GoldenCase golden_;
  std::vector<const UpdateKernels*> kernels_;
};

TEST_P(KernelsGoldenTest, EveryStepLeavesTheEnginesBytes) {
  for (const UpdateKernels* kernels : kernels_) {
    SCOPED_TRACE(kernels->name());
    State state(golden_, 1);
    for (std::size_t i = 0; i < golden_.steps.size(); ++i) {
      const GoldenStep& step = golden_.steps[i];
      SCOPED_TRACE("step " + std::to_string(i) + ", " + GoldenKindName(step.kind));
      EXPECT_EQ(RunStep(*kernels, state.View(0, 1), step), 0u);
      ASSERT_EQ(Sha256(Dense(golden_, state.backing)), step.mean_sha256);
      ASSERT_EQ(Sha256(state.backing), step.backing_sha256);
      ASSERT_EQ(Sha256(Bytes(state.ring)), step.ring_sha256);
    }
    EXPECT_EQ(state.backing, golden_.final_backing);
    EXPECT_EQ(state.ring, golden_.final_ring);
  }
}

TEST_P(KernelsGoldenTest, ALayerOfThreeLeavesTheOthersAlone) {
  for (const UpdateKernels* kernels : kernels_) {
    SCOPED_TRACE(kernels->name());
    State state(golden_, 3);
    for (const GoldenStep& step : golden_.steps) RunStep(*kernels, state.View(1, 1), step);
    for (const int layer : {0, 2}) {
      EXPECT_TRUE(std::ranges::equal(state.LayerBacking(layer), golden_.initial_backing));
      EXPECT_TRUE(std::ranges::equal(state.LayerRing(layer), golden_.initial_ring));
    }
    EXPECT_TRUE(std::ranges::equal(state.LayerBacking(1), golden_.final_backing));
    EXPECT_TRUE(std::ranges::equal(state.LayerRing(1), golden_.final_ring));
  }
}

TEST_P(KernelsGoldenTest, ThreeLayersAtOnceEndAlike) {
  for (const UpdateKernels* kernels : kernels_) {
    SCOPED_TRACE(kernels->name());
    State state(golden_, 3);
    for (const GoldenStep& step : golden_.steps) RunStep(*kernels, state.View(0, 3), step);
    for (const int layer : {0, 1, 2}) {
      EXPECT_TRUE(std::ranges::equal(state.LayerBacking(layer), golden_.final_backing));
      EXPECT_TRUE(std::ranges::equal(state.LayerRing(layer), golden_.final_ring));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, KernelsGoldenTest,
                         testing::Values("arithmetic", "decode_b64", "specials", "verify_k1_min_ring",
                                         "verify_k3", "verify_k9"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kvsummary
