// Properties of the host updates: whatever the split into steps, a region's summary is that of its rows.
#include "kernels/update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/summary_math.h"

namespace kvsummary {
namespace {

using Random = std::mt19937;

int Below(Random& random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

CacheGeometry Geometry(int k) {
  CacheGeometry g;
  g.layers = 3;
  g.blocks = 40;
  g.block_size = 16;
  g.block_stride = g.dense_block_stride() + 256;  // a gap that must keep its bytes
  g.ring_blocks = 6;
  g.capacity = 7 + k;
  g.rows_per_layer = g.capacity + 2;
  g.k = k;
  return g;
}

// A cache full of random bytes.
struct TestCache {
  TestCache(const CacheGeometry& g, std::uint32_t seed) : geometry(g), memory(g.total_bytes()) {
    Random random(seed);
    for (std::uint8_t& byte : memory) byte = static_cast<std::uint8_t>(random());
  }
  CacheView View() { return View({0, geometry.layers}); }
  CacheView View(LayerSpan layers) { return MakeView(geometry, memory.data(), layers); }

  CacheGeometry geometry;
  std::vector<std::uint8_t> memory;
};

// z of a spread, key of spread 1, and now and then a special value.
std::vector<std::uint16_t> RandomRows(Random& random, std::size_t rows, float spread, bool specials) {
  std::normal_distribution<float> normal;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float special[] = {std::nanf(""), kInfinity, -kInfinity, 0.0f, -0.0f, 3e38f, -3e38f, 1e-40f};
  std::vector<std::uint16_t> out(rows * kRowElements);
  for (std::size_t i = 0; i < out.size(); ++i) {
    float x = normal(random) * (i / kChannels % 2 == 1 ? spread : 1.0f);
    if (specials && Below(random, 5000) == 0) x = special[Below(random, 8)];
    out[i] = RoundToBf16(x);
  }
  if (specials) {  // whole rows of -infinity, first rows of regions among them
    for (std::size_t row = 0; row < rows; row += 1 + random() % 40) {
      std::fill_n(&out[row * kRowElements + kChannels], kChannels, RoundToBf16(-kInfinity));
    }
  }
  return out;
}

// The tokens of one request, in every layer, and where they live.
struct Request {
  std::vector<std::vector<std::uint16_t>> layers;  // [layer][position][512]
  std::vector<std::int64_t> blocks;
  std::int64_t base = 0;
  int done = 0;  // committed tokens

  const std::uint16_t* row(int layer, int position) const { return &layers[layer][position * kRowElements]; }
  int length() const { return static_cast<int>(layers[0].size()) / kRowElements; }
  std::int64_t slot(int position, int block_size) const {
    return blocks[position / block_size] * block_size + position % block_size;
  }
};

std::vector<Request> MakeRequests(Random& random, const CacheGeometry& g, int count, int tokens, float spread,
                                  bool specials) {
  std::vector<std::int64_t> free;
  for (std::int64_t b = 1; b < g.blocks; ++b) free.push_back(b);
  std::shuffle(free.begin(), free.end(), random);
  std::vector<Request> out(count);
  for (int i = 0; i < count; ++i) {
    for (int l = 0; l < g.layers; ++l) out[i].layers.push_back(RandomRows(random, tokens, spread, specials));
    for (int b = 0; b < (tokens + g.block_size - 1) / g.block_size; ++b) {
      out[i].blocks.push_back(free.back());
      free.pop_back();
    }
    out[i].base = (i + 1) * g.rows_per_block();
  }
  return out;
}

// A step under construction, in a layout that is not aligned and not dense.
class Step {
 public:
  explicit Step(const CacheGeometry& g) : g_(g), rows_(g.layers) {}

  void AddRow(const Request& request, int position, const std::uint16_t* draft = nullptr) {
    AddRow(request.slot(position, g_.block_size), position, request.base);
    for (int l = 0; l < g_.layers; ++l) {
      const std::uint16_t* row = draft != nullptr ? draft : request.row(l, position);
      rows_[l].resize(rows_[l].size() - kRowElements);
      rows_[l].insert(rows_[l].end(), row, row + kRowElements);
    }
  }
  void AddRow(std::int64_t slot, std::int64_t position, std::int64_t base) {
    slots.push_back(slot);
    positions.push_back(position);
    bases.push_back(base);
    for (auto& layer : rows_) layer.resize(layer.size() + kRowElements, 0x3f80);
  }
  void EndRequest(std::int32_t seq_len = 0) {
    starts.push_back(static_cast<std::int32_t>(slots.size()));
    seq_lens.push_back(seq_len);
  }

  // Bad rows that the kernels counted.
  unsigned long long Decode(const UpdateKernels& kernels, const CacheView& view) {
    unsigned long long skipped = 0;
    kernels.Decode(view, {Rows(), In(), slots.data(), positions.data(), bases.data()}, {nullptr, &skipped});
    return skipped;
  }
  unsigned long long Verify(const UpdateKernels& kernels, const CacheView& view) {
    unsigned long long skipped = 0;
    kernels.Verify(view,
                   {Rows(), Requests(), In(), slots.data(), starts.data(), seq_lens.data(), bases.data()},
                   {nullptr, &skipped});
    return skipped;
  }
  unsigned long long Prefill(const UpdateKernels& kernels, const CacheView& view) {
    unsigned long long skipped = 0;
    kernels.Prefill(view,
                    {Rows(), Requests(), In(), slots.data(), positions.data(), starts.data(), bases.data()},
                    {nullptr, &skipped});
    return skipped;
  }

  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::int32_t> starts = {0}, seq_lens;

 private:
  std::int32_t Rows() const { return static_cast<std::int32_t>(slots.size()); }
  std::int32_t Requests() const { return static_cast<std::int32_t>(starts.size()) - 1; }
  // Key and z as column slices of a wide matrix, at an odd element.
  RowsView In() {
    constexpr std::int64_t kStride = kRowElements + 11;
    const std::int64_t layer_stride = Rows() * kStride;
    wide_.assign(g_.layers * layer_stride + 8, 0);
    for (int l = 0; l < g_.layers; ++l) {
      for (std::int64_t r = 0; r < Rows(); ++r) {
        std::uint16_t* to = &wide_[1 + l * layer_stride + r * kStride];
        std::memcpy(to, &rows_[l][r * kRowElements], kRowBytes / 2);
        std::memcpy(to + kChannels + 5, &rows_[l][r * kRowElements + kChannels], kRowBytes / 2);
      }
    }
    return {&wide_[1], &wide_[1 + kChannels + 5], kStride, kStride, layer_stride, layer_stride};
  }

  CacheGeometry g_;
  std::vector<std::vector<std::uint16_t>> rows_;
  std::vector<std::uint16_t> wide_;
};

RegionRows RowsOf(const Request& request, int layer, int region) {
  RegionRows rows;
  for (int t = 0; t < kRegionTokens; ++t) {
    rows.key[t] = request.row(layer, region * kRegionTokens + t);
    rows.z[t] = rows.key[t] + kChannels;
  }
  return rows;
}

// What the pages must hold once the first `done` tokens of every request are in.
void WriteExpected(const std::vector<Request>& requests, TestCache& cache) {
  const CacheView view = cache.View();
  for (const Request& request : requests) {
    for (int region = 0; region < request.done / kRegionTokens; ++region) {
      for (int l = 0; l < view.layers; ++l) {
        const RegionRows rows = RowsOf(request, l, region);
        CloseRegionScalar(rows, view.summary(l, request.slot(region * kRegionTokens, view.block_size)));
      }
    }
  }
}

class UpdateTest : public testing::TestWithParam<const UpdateKernels*> {
 protected:
  const UpdateKernels& kernels() const { return *GetParam(); }

  // Advances random requests by random steps until all are done, in `cache` and, by scalar code, in `check`.
  void RunRandomSteps(Random& random, std::vector<Request>& requests, TestCache& cache, TestCache& check) {
    const CacheGeometry& g = cache.geometry;
    for (;;) {
      std::vector<Request*> open;
      for (Request& request : requests) {
        if (request.done < request.length()) open.push_back(&request);
      }
      if (open.empty()) return;
      std::shuffle(open.begin(), open.end(), random);
      open.resize(1 + Below(random, static_cast<int>(open.size())));
      Step step(g);
      unsigned long long skipped = 0;
      switch (Below(random, g.capacity >= kMinVerifyCapacity ? 3 : 2)) {
        case 0:
          for (Request* request : open) {
            step.AddRow(*request, request->done++);
            if (Below(random, 3) == 0) step.AddRow(-1 - Below(random, 2), Below(random, 99), 5);
          }
          skipped = step.Decode(kernels(), cache.View());
          step.Decode(ScalarKernels(), check.View());
          break;
        case 1:
          for (Request* request : open) {
            const int left = request->length() - request->done;
            for (int n = 1 + Below(random, std::min(left, 3 * g.capacity)); n > 0; --n) {
              step.AddRow(*request, request->done++);
            }
            step.EndRequest();
          }
          skipped = step.Prefill(kernels(), cache.View());
          step.Prefill(ScalarKernels(), check.View());
          break;
        case 2:
          for (Request* request : open) {
            const int left = request->length() - request->done;
            const int rows = std::min(left, 1 + Below(random, g.k + 1));
            const int accepted = 1 + Below(random, rows);
            const std::vector<std::uint16_t> drafts = RandomRows(random, rows, 2.0f, false);
            for (int i = 0; i < rows; ++i) {
              step.AddRow(*request, request->done + i, i < accepted ? nullptr : &drafts[i * kRowElements]);
            }
            step.EndRequest(request->done + rows);
            request->done += accepted;
          }
          skipped = step.Verify(kernels(), cache.View());
          step.Verify(ScalarKernels(), check.View());
          break;
      }
      ASSERT_EQ(skipped, 0u);
      ASSERT_EQ(cache.memory, check.memory);
    }
  }
};

TEST_P(UpdateTest, AnySplitIntoStepsGivesTheSummariesOfTheRows) {
  std::uint32_t seed = 1;
  for (const int k : {0, 1, 3, 9}) {
    for (const float spread : {0.25f, 3.0f, 30.0f, 100.0f, 300.0f}) {
      for (const bool specials : {false, true}) {
        SCOPED_TRACE(testing::Message() << "k " << k << " spread " << spread << " specials " << specials);
        Random random(++seed);
        const CacheGeometry g = Geometry(k);
        TestCache cache(g, seed), check(g, seed), want(g, seed);
        std::vector<Request> requests = MakeRequests(random, g, 4, 90, spread, specials);
        RunRandomSteps(random, requests, cache, check);
        WriteExpected(requests, want);
        // Pages with their gaps; the null block is among them.
        ASSERT_TRUE(
            std::equal(want.memory.begin(), want.memory.begin() + g.ring_offset(), cache.memory.begin()));
      }
    }
  }
}

TEST_P(UpdateTest, ChunkLongerThanTheRingLeavesItsLastRows) {
  const CacheGeometry g = Geometry(3);
  Random random(7);
  TestCache cache(g, 7);
  const std::vector<Request> requests = MakeRequests(random, g, 1, 90, 1.0f, false);
  Step step(g);
  for (int p = 0; p < 77; ++p) step.AddRow(requests[0], p);
  for (int p = 77; p < 90; ++p) step.AddRow(-1, p, requests[0].base);  // dead rows at the end change nothing
  step.EndRequest();
  EXPECT_EQ(step.Prefill(kernels(), cache.View()), 0u);
  const CacheView view = cache.View();
  for (int l = 0; l < g.layers; ++l) {
    for (int p = 77 - g.capacity; p < 77; ++p) {
      EXPECT_EQ(std::memcmp(view.ring_row(l, requests[0].base, p), requests[0].row(l, p), kRowBytes), 0) << p;
    }
  }
}

// The first step's drafts close a region, fill the ring (7 + k rows) and are rejected but for the token
// itself.
TEST_P(UpdateTest, RejectedDraftsThatClosedARegionLeaveNoTrace) {
  for (int first = 1; first < kRegionTokens; ++first) {
    const CacheGeometry g = Geometry(3);
    Random random(static_cast<std::uint32_t>(first));
    TestCache cache(g, 7), want(g, 7);
    std::vector<Request> requests = MakeRequests(random, g, 1, 24, 1.0f, false);
    Request& request = requests[0];
    Step prompt(g);
    while (request.done < first) prompt.AddRow(request, request.done++);
    prompt.EndRequest();
    prompt.Prefill(kernels(), cache.View());
    const std::vector<std::uint16_t> drafts = RandomRows(random, 3, 1.0f, false);
    while (request.done < 16) {
      Step rejected(g);
      rejected.AddRow(request, request.done);
      for (int i = 0; i < 3; ++i) rejected.AddRow(request, request.done + 1 + i, &drafts[i * kRowElements]);
      rejected.EndRequest(request.done + 4);
      rejected.Verify(kernels(), cache.View());
      ++request.done;
    }
    WriteExpected(requests, want);
    const CacheView got = cache.View(), expected = want.View();
    for (int region = 0; region < 2; ++region) {
      const std::int64_t slot = request.slot(region * kRegionTokens, g.block_size);
      for (int l = 0; l < g.layers; ++l) {
        EXPECT_EQ(std::memcmp(got.summary(l, slot), expected.summary(l, slot), kSummaryBytes), 0)
            << "first " << first << " region " << region;
      }
    }
  }
}

TEST_P(UpdateTest, ARecycledRingBlockGivesNothingOfItsFormerRequest) {
  const CacheGeometry g = Geometry(3);
  Random random(5);
  TestCache fresh(g, 5), recycled(g, 6);  // rings of different former contents
  std::vector<Request> requests = MakeRequests(random, g, 1, 24, 1.0f, false);
  for (TestCache* cache : {&fresh, &recycled}) {
    Step prompt(g);
    for (int p = 0; p < 5; ++p) prompt.AddRow(requests[0], p);
    prompt.EndRequest();
    prompt.Prefill(kernels(), cache->View());
    for (int p = 5; p < 24; ++p) {
      Step step(g);
      step.AddRow(requests[0], p);
      step.Decode(kernels(), cache->View());
    }
  }
  for (int region = 0; region < 3; ++region) {
    const std::int64_t slot = requests[0].slot(region * kRegionTokens, g.block_size);
    for (int l = 0; l < g.layers; ++l) {
      EXPECT_EQ(std::memcmp(fresh.View().summary(l, slot), recycled.View().summary(l, slot), kSummaryBytes),
                0);
    }
  }
}

TEST_P(UpdateTest, DecodeDoesNotStoreTheClosingRow) {
  const CacheGeometry g = Geometry(1);
  Random random(8);
  TestCache cache(g, 8);
  const std::vector<Request> requests = MakeRequests(random, g, 1, 16, 1.0f, false);
  Step step(g);
  step.AddRow(requests[0], 7);
  const std::vector<std::uint8_t> before = cache.memory;
  step.Decode(kernels(), cache.View());
  EXPECT_TRUE(
      std::equal(before.begin() + g.ring_offset(), before.end(), cache.memory.begin() + g.ring_offset()));
  EXPECT_NE(cache.memory, before);
}

TEST_P(UpdateTest, VerifyOfMoreRowsThanTheRingStaysRightAndInside) {
  const CacheGeometry g = Geometry(1);
  Random random(9);
  TestCache cache(g, 9), want(g, 9);
  std::vector<Request> requests = MakeRequests(random, g, 1, 45, 1.0f, false);
  Step step(g);
  for (int p = 0; p < 45; ++p) step.AddRow(requests[0], p);
  step.EndRequest(45);
  step.Verify(kernels(), cache.View());
  requests[0].done = 45;
  WriteExpected(requests, want);
  const CacheView view = want.View();
  for (int l = 0; l < g.layers; ++l) {
    for (int p = 45 - g.capacity; p < 45; ++p) {
      std::memcpy(view.ring_row(l, requests[0].base, p), requests[0].row(l, p), kRowBytes);
    }
  }
  EXPECT_EQ(cache.memory, want.memory);
}

TEST_P(UpdateTest, LayersOutsideTheSpanKeepTheirBytes) {
  const CacheGeometry g = Geometry(3);
  Random random(10);
  TestCache cache(g, 10);
  const std::vector<std::uint8_t> before = cache.memory;
  const std::vector<Request> requests = MakeRequests(random, g, 1, 40, 1.0f, false);
  Step step(g);
  for (int p = 0; p < 40; ++p) step.AddRow(requests[0], p);
  step.EndRequest();
  step.Prefill(kernels(), cache.View({1, 1}));  // takes the rows of the first layer
  const CacheView view = cache.View();
  for (int region = 0; region < 5; ++region) {
    const RegionRows rows = RowsOf(requests[0], 0, region);
    std::uint8_t want[kSummaryBytes];
    CloseRegionScalar(rows, want);
    EXPECT_EQ(std::memcmp(view.summary(1, requests[0].slot(8 * region, g.block_size)), want, kSummaryBytes),
              0);
  }
  const auto restore = [&](std::int64_t offset, std::int64_t bytes) {
    std::copy_n(&before[offset], bytes, &cache.memory[offset]);
  };
  for (std::int64_t b = 0; b < g.blocks; ++b) restore(g.page_offset(b, 1), g.page_bytes());
  for (std::int64_t b = 0; b < g.ring_blocks; ++b)
    restore(g.ring_row_offset(b, 1, 0), g.capacity * kRowBytes);
  EXPECT_EQ(cache.memory, before);
}

struct BadRow {
  const char* what;
  std::int64_t slot, position, base;
};

TEST_P(UpdateTest, BadRowsAreCountedOnceALayerAndChangeNothing) {
  const CacheGeometry g = Geometry(1);
  const std::int64_t base = g.rows_per_block(), slots = g.blocks * g.block_size;
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const BadRow bad[] = {
      {"slot in the null block", 15, 15, base},
      {"slot beyond the blocks", slots + 7, 7, base},
      {"huge slot", kHuge, 7, base},
      {"slot beyond 32 bits", (std::int64_t{1} << 32) + 23, 7, base},
      {"slot and position differ", 24, 7, base},
      {"negative position", 23, -1, base},
      {"huge position", 23, kHuge, base},
      {"least position", 23, -kHuge - 1, base},
      {"base of the null ring block", 23, 7, 0},
      {"base between ring blocks", 23, 7, base + 1},
      {"base beyond the ring", 23, 7, 6 * base},
      {"huge base", 23, 7, kHuge},
  };
  for (const BadRow& row : bad) {
    SCOPED_TRACE(row.what);
    TestCache cache(g, 11);
    const std::vector<std::uint8_t> before = cache.memory;
    Step step(g);
    step.AddRow(row.slot, row.position, row.base);
    step.EndRequest(8);
    EXPECT_EQ(step.Decode(kernels(), cache.View()), 3u);
    EXPECT_EQ(step.Prefill(kernels(), cache.View()), 3u);
    if (row.position == 7) {  // verify derives it
      EXPECT_EQ(step.Verify(kernels(), cache.View()), 3u);
    }
    EXPECT_EQ(cache.memory, before);
  }
}

TEST_P(UpdateTest, BadRangesSkipTheRequestAndCountOnceALayer) {
  const CacheGeometry g = Geometry(1);
  Random random(12);
  const std::vector<Request> requests = MakeRequests(random, g, 1, 16, 1.0f, false);
  constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::int32_t> bad_starts[] = {
      {-1, 4}, {0, 5}, {4, 0}, {-kLargest - 1, kLargest}, {kLargest, 4}};
  for (const auto& starts : bad_starts) {
    TestCache cache(g, 12);
    const std::vector<std::uint8_t> before = cache.memory;
    Step step(g);
    for (int p = 4; p < 8; ++p) step.AddRow(requests[0], p);
    step.EndRequest(8);
    step.starts = starts;
    EXPECT_EQ(step.Prefill(kernels(), cache.View()), 3u);
    EXPECT_EQ(step.Verify(kernels(), cache.View()), 3u);
    EXPECT_EQ(cache.memory, before);
  }
  for (const std::int32_t seq_len : {3, 0, -1, -kLargest - 1}) {
    TestCache cache(g, 12);
    const std::vector<std::uint8_t> before = cache.memory;
    Step step(g);
    for (int p = 4; p < 8; ++p) step.AddRow(requests[0], p);
    step.EndRequest(seq_len);
    EXPECT_EQ(step.Verify(kernels(), cache.View()), 3u);
    EXPECT_EQ(cache.memory, before);
  }
}

TEST_P(UpdateTest, BadRowsAreLikePadding) {
  const CacheGeometry g = Geometry(3);
  Random random(13);
  std::vector<Request> requests = MakeRequests(random, g, 1, 60, 1.0f, false);
  for (const bool prefill : {false, true}) {
    for (int bad = 0; bad < 20; ++bad) {
      TestCache with_bad(g, 13), with_padding(g, 13);
      Step step(g);
      for (int p = 3; p < 23; ++p) step.AddRow(requests[0], p);
      step.EndRequest(23);
      const auto run = [&](TestCache& cache) {
        return prefill ? step.Prefill(kernels(), cache.View()) : step.Verify(kernels(), cache.View());
      };
      step.slots[bad] = bad;  // in the null block
      EXPECT_EQ(run(with_bad), 3u);
      step.slots[bad] = -1;
      EXPECT_EQ(run(with_padding), 0u);
      ASSERT_EQ(with_bad.memory, with_padding.memory) << bad;
    }
  }
}

TEST(HostKernelsTest, AreTheFastestOfThisCpu) {
  EXPECT_STREQ(ScalarKernels().name(), "scalar");
  EXPECT_STREQ(HostKernels().name(), Avx2Kernels() != nullptr ? "avx2" : "scalar");
}

std::vector<const UpdateKernels*> AllHostKernels() {
  std::vector<const UpdateKernels*> out = {&ScalarKernels()};
  if (Avx2Kernels() != nullptr) out.push_back(Avx2Kernels());
  return out;
}

INSTANTIATE_TEST_SUITE_P(Host, UpdateTest, testing::ValuesIn(AllHostKernels()),
                         [](const auto& info) { return std::string(info.param->name()); });

}  // namespace
}  // namespace kvsummary
