// Speed of the host updates on one core, in token-layers a second (one row of one layer), beside memcpy.
//
//   bazel run //tests/bench:bench_host -- [--json] [--repeats=N]
//
// Every case walks once over 256 MiB of rows, so that inputs come from memory, as they do for a daemon.
// "GB/s" counts the rows read and what the case writes (summaries, ring rows) and reads back from the
// ring; memcpy's counts the bytes read and those written. Figures are medians of the repeats, in time of
// the thread, so that other processes on the core disturb them little.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/update.h"

namespace kvsummary {
namespace {

constexpr int kLayers = 4;
constexpr int kTokens = 1 << 16;  // of all requests
constexpr std::int64_t kTokenLayers = std::int64_t{kTokens} * kLayers;
constexpr std::int64_t kInputBytes = kTokenLayers * kRowBytes;
constexpr int kDrafts = 3;

enum class Kind { kPrefill, kDecode, kVerify };

// How the tokens are cut into steps.
struct Shape {
  Kind kind;
  const char* name;
  int requests;
  int rows_a_request;  // in one step
  double bytes_a_row;  // read and written, one layer
};

constexpr double kSummary = double{kSummaryBytes} / kRegionTokens;
constexpr Shape kShapes[] = {
    {Kind::kPrefill, "prefill", 16, 512, kRowBytes + kSummary + 2.0 * kRowBytes * 10 / 512},
    // Seven rows of eight are copied to the ring and read back when the eighth one comes.
    {Kind::kDecode, "decode", 256, 1, kRowBytes + kSummary + 2.0 * kRowBytes * 7 / 8},
    {Kind::kVerify, "verify", 64, 1 + kDrafts, kRowBytes + kSummary + 2.0 * kRowBytes},
};

struct Result {
  std::string kernels;
  std::string name;
  float spread;
  double token_layers;  // a second
  double bytes;         // a second
};

double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class F>
double MedianSeconds(int repeats, F run) {
  std::vector<double> seconds;
  run();  // pages are mapped and caches warm
  for (int i = 0; i < repeats; ++i) {
    const double start = ThreadSeconds();
    run();
    seconds.push_back(ThreadSeconds() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

// Rows of normal numbers, z with the given spread. Repeats itself after a few MiB, but not in step with a
// region's rows.
void FillRows(float spread, std::vector<std::uint16_t>& rows) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> pool((1 << 20) - 3);
  for (float& x : pool) x = normal(random);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float x = pool[i % pool.size()] * (i / kChannels % 2 == 1 ? spread : 1.0f);
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    rows[i] = static_cast<std::uint16_t>(bits >> 16);
  }
}

class Run {
 public:
  explicit Run(const Shape& shape) : shape_(shape), tokens_a_request_(kTokens / shape.requests) {
    g_.layers = kLayers;
    g_.block_size = 64;
    g_.blocks = 1 + kTokens / g_.block_size;
    g_.block_stride = g_.dense_block_stride();
    g_.ring_blocks = 1 + shape.requests;
    g_.capacity = g_.rows_per_layer = 7 + kDrafts;
    g_.k = kDrafts;
    memory_.resize(g_.total_bytes());
    for (int r = 0; r <= shape.requests; ++r) starts_.push_back(r * shape.rows_a_request);
    for (int p = 0; p < tokens_a_request_; p += shape.rows_a_request) AddStep(p);
  }

  void operator()(const UpdateKernels& kernels, const std::vector<std::uint16_t>& rows) {
    const CacheView view = MakeView(g_, memory_.data(), {0, kLayers});
    const std::int32_t n = starts_.back();
    const std::uint16_t* data = rows.data();
    for (const Step& s : steps_) {
      const RowsView in = PackedRows(data, n);
      switch (shape_.kind) {
        case Kind::kPrefill:
          kernels.Prefill(
              view,
              {n, shape_.requests, in, s.slots.data(), s.positions.data(), starts_.data(), s.bases.data()},
              {});
          break;
        case Kind::kDecode:
          kernels.Decode(view, {n, in, s.slots.data(), s.positions.data(), s.bases.data()}, {});
          break;
        case Kind::kVerify:
          kernels.Verify(
              view,
              {n, shape_.requests, in, s.slots.data(), starts_.data(), s.seq_lens.data(), s.bases.data()},
              {});
          break;
      }
      data += std::int64_t{n} * kLayers * kRowElements;
    }
  }

 private:
  struct Step {
    std::vector<std::int64_t> slots, positions, bases;
    std::vector<std::int32_t> seq_lens;
  };

  void AddStep(int first) {
    Step s;
    for (int r = 0; r < shape_.requests; ++r) {
      for (int p = first; p < first + shape_.rows_a_request; ++p) {
        s.slots.push_back(g_.block_size + std::int64_t{r} * tokens_a_request_ + p);
        s.positions.push_back(p);
        s.bases.push_back((r + 1) * g_.rows_per_block());
      }
      s.seq_lens.push_back(first + shape_.rows_a_request);
    }
    steps_.push_back(std::move(s));
  }

  const Shape shape_;
  const int tokens_a_request_;
  CacheGeometry g_;
  std::vector<std::uint8_t> memory_;
  std::vector<std::int32_t> starts_;
  std::vector<Step> steps_;
};

int Main(bool json, int repeats) {
  std::vector<std::uint16_t> rows(kInputBytes / sizeof(std::uint16_t));
  double memcpy_bytes = 0;
  {
    std::vector<std::uint8_t> copy(kInputBytes);
    memcpy_bytes = 2.0 * kInputBytes /
                   MedianSeconds(repeats, [&] { std::memcpy(copy.data(), rows.data(), kInputBytes); });
  }

  std::vector<const UpdateKernels*> all = {&ScalarKernels()};
  if (Avx2Kernels() != nullptr) all.push_back(Avx2Kernels());
  std::vector<Result> results;
  for (const float spread : {3.0f, 0.25f, 30.0f, 120.0f}) {
    FillRows(spread, rows);
    for (const Shape& shape : kShapes) {
      if (spread != 3.0f && shape.kind != Kind::kPrefill) continue;
      Run run(shape);
      for (const UpdateKernels* kernels : all) {
        const double seconds = MedianSeconds(repeats, [&] { run(*kernels, rows); });
        const double rate = kTokenLayers / seconds;
        results.push_back({kernels->name(), shape.name, spread, rate, rate * shape.bytes_a_row});
      }
    }
  }

  if (json) {
    std::printf("{\"memcpy_bytes_per_s\": %.4g, \"results\": [", memcpy_bytes);
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Result& r = results[i];
      std::printf("%s\n  {\"kernels\": \"%s\", \"update\": \"%s\", \"z_spread\": %g, ", i ? "," : "",
                  r.kernels.c_str(), r.name.c_str(), r.spread);
      std::printf("\"token_layers_per_s\": %.4g, \"bytes_per_s\": %.4g, \"of_memcpy\": %.3f}", r.token_layers,
                  r.bytes, r.bytes / memcpy_bytes);
    }
    std::printf("\n]}\n");
    return 0;
  }
  std::printf("one core, %d layers, %d tokens, medians of %d; memcpy %.1f GB/s\n\n", kLayers, kTokens,
              repeats, memcpy_bytes / 1e9);
  std::printf("%-8s %-8s %8s %18s %8s %10s\n", "kernels", "update", "z spread", "M token-layers/s", "GB/s",
              "of memcpy");
  for (const Result& r : results) {
    std::printf("%-8s %-8s %8g %18.2f %8.2f %9.0f%%\n", r.kernels.c_str(), r.name.c_str(), r.spread,
                r.token_layers / 1e6, r.bytes / 1e9, 100 * r.bytes / memcpy_bytes);
  }
  return 0;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  bool json = false;
  int repeats = 5;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--json") {
      json = true;
    } else if (arg.substr(0, 10) == "--repeats=" && std::atoi(argv[i] + 10) > 0) {
      repeats = std::atoi(argv[i] + 10);
    } else {
      std::fprintf(stderr, "usage: bench_host [--json] [--repeats=N]\n");
      return 2;
    }
  }
  return kvsummary::Main(json, repeats);
}
