// Checks the CUDA kernels of this build on device 0 against the host kernels, byte for byte.
//
//   gpu_check [--quick] [--regions=N] [--seed=S]
//
// --quick is small enough for compute-sanitizer. The last line is `N passed, N failed`; exit status 1 on a
// failure, 2 on a CUDA error.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda_probe.h"
#include "kernels/exp.h"
#include "tests/gpu/device.h"
#include "tests/gpu/traffic.h"
#include "tests/gpu/twin.h"

namespace kvsummary::gpu {
namespace {

struct Options {
  bool quick = false;
  std::int64_t regions = 4'000'000;
  std::uint64_t seed = 1;
};

class Report {
 public:
  // Runs one check: an empty text is a pass.
  void Run(const std::string& name, const std::function<std::string()>& check) {
    const auto start = std::chrono::steady_clock::now();
    const std::string why = check();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%s %s (%.1f s)%s%s\n", why.empty() ? "PASS" : "FAIL", name.c_str(), took.count(),
                why.empty() ? "" : ": ", why.c_str());
    std::fflush(stdout);
    ++(why.empty() ? passed_ : failed_);
  }
  int Finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ ? 1 : 0;
  }

 private:
  int passed_ = 0, failed_ = 0;
};

// Runs trial(0), trial(1), ... on all cores until `more()` is false; the first difference that a trial
// returns ends it.
std::string Trials(bool quick, const std::function<bool()>& more,
                   const std::function<std::string(int)>& trial) {
  std::atomic<int> next = 0;
  std::mutex mutex;
  std::string first;
  const auto work = [&] {
    while (more()) {
      {
        const std::lock_guard lock(mutex);
        if (!first.empty()) return;
      }
      const int index = next++;
      const std::string why = trial(index);
      const std::lock_guard lock(mutex);
      if (!why.empty() && first.empty()) first = "trial " + std::to_string(index) + ": " + why;
    }
  };
  std::vector<std::thread> threads(quick ? 1 : std::max(1u, std::thread::hardware_concurrency()));
  for (auto& t : threads) t = std::thread(work);
  for (auto& t : threads) t.join();
  return first;
}

Arrangement AnyArrangement(Random& random) { return static_cast<Arrangement>(random.In(0, 2)); }

RowSource AnySource(Random& random) {
  constexpr double kSpreads[] = {0.25, 1, 4, 16, 60, 120, 300};
  const double key = std::exp2(random.In(-8, 10));
  return RowSource(key, kSpreads[random.In(0, std::size(kSpreads) - 1)], random.OneIn(2), random);
}

std::string ExpfDigest(const Options& options) {
  Stream stream;
  DeviceMemory memory(sizeof(unsigned long long));
  unsigned long long digest = 0;
  memory.Upload(&digest, sizeof(digest), stream);
  const std::uint32_t last = options.quick ? kFirstNegativeFloat + 0xffff : kLastNegativeFloat;
  Check(LaunchExpfDigest(kFirstNegativeFloat, last, static_cast<unsigned long long*>(memory.get()),
                         stream.get()),
        "expf digest");
  memory.Download(&digest, sizeof(digest), stream);
  std::uint64_t want = kExpfDigest;
  if (options.quick) {
    want = 0;
    for (std::uint32_t bits = kFirstNegativeFloat; bits <= last; ++bits) {
      want += ExpfDigestShare(bits, std::bit_cast<std::uint32_t>(Exp(std::bit_cast<float>(bits))));
    }
  }
  char text[96];
  std::snprintf(text, sizeof(text), "digest %016llx, want %016llx", digest,
                static_cast<unsigned long long>(want));
  return digest == want ? "" : text;
}

std::string ExpfProbe(const Options& options) {
  const std::int64_t n = options.quick ? 1 << 12 : 1 << 20;
  Stream stream;
  DeviceMemory memory(n * sizeof(float));
  Check(LaunchExpfProbe(static_cast<float*>(memory.get()), n, stream.get()), "expf probe");
  std::vector<float> results(n);
  memory.Download(results.data(), n * sizeof(float), stream);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float want = Exp(std::bit_cast<float>(ProbeArgument(i, n)));
    different += std::bit_cast<std::uint32_t>(results[i]) != std::bit_cast<std::uint32_t>(want);
  }
  return different ? std::to_string(different) + " of " + std::to_string(n) + " differ from the host model"
                   : "";
}

// Kernels have shapes for small and for large steps: traffic of both.
enum class Size { kSmall, kLarge };
constexpr int kLargeRequests = 400, kLargeLayers = 3;

// A random cache under random traffic, compared at the end; adds the regions closed to `regions`.
std::string RandomTrial(std::uint64_t seed, Size size, bool quick, std::atomic<std::int64_t>& regions) {
  Random random(seed);
  const bool large = size == Size::kLarge;
  const int requests = large ? kLargeRequests : static_cast<int>(random.In(1, quick ? 4 : 12));
  const int tokens = static_cast<int>(large ? 120 : random.In(1, quick ? 100 : 900));
  const CacheGeometry geometry = Traffic::RandomGeometry(requests, tokens, large ? kLargeLayers : 1, random);
  const int first = static_cast<int>(large ? 0 : random.In(0, geometry.layers - 1));
  const int layers = static_cast<int>(large ? geometry.layers : random.In(1, geometry.layers - first));
  Twin twin(geometry, first, layers, Traffic::MaxRows(requests, tokens), random.Next());
  Traffic traffic(geometry, requests, tokens, random);
  const RowSource source = AnySource(random);
  traffic.Restart(random);
  for (int step = 0; step < (quick ? 12 : 400) && !traffic.done(); ++step) {
    const Indices x = traffic.Next(random);
    twin.Apply(x, AnyArrangement(random), source, random);
    regions += x.closing * layers;
  }
  const std::string why = twin.Difference();
  if (!why.empty()) return why;
  return twin.host_skipped() ? "good rows were skipped" : "";
}

// Chunks longer than the ring, each of which begins at position 7 modulo 8, so that the first region needs
// seven ring rows that the same launch overwrites.
std::string LongChunkTrial(std::uint64_t seed, Size size, int launches) {
  Random random(seed);
  constexpr int kTokens = 512;
  const bool large = size == Size::kLarge;
  const int requests = large ? kLargeRequests : 4;
  const CacheGeometry geometry = Traffic::RandomGeometry(requests, kTokens, large ? kLargeLayers : 1, random);
  Twin twin(geometry, 0, geometry.layers, Traffic::MaxRows(requests, kTokens), random.Next());
  Traffic traffic(geometry, requests, kTokens, random);
  const RowSource source = AnySource(random);
  const std::int64_t shortest = geometry.capacity / kRegionTokens + 1;  // regions
  for (int i = 0; i < launches; ++i) {
    if (i % 8 == 0) {
      traffic.RestartAt(7);
    }
    const Indices x = traffic.Prefill(
        random, [&] { return kRegionTokens * random.In(shortest, shortest + 2); }, false);
    twin.Apply(x, AnyArrangement(random), source, random);
    const std::string why = twin.Difference();
    if (!why.empty()) return "launch " + std::to_string(i) + ": " + why;
  }
  return "";
}

// Steps whose arrays hold values from outside the cache.
std::string BadRowsTrial(std::uint64_t seed, Size size) {
  Random random(seed);
  constexpr int kTokens = 120;
  const bool large = size == Size::kLarge;
  const int requests = large ? kLargeRequests : 6;
  const CacheGeometry geometry = Traffic::RandomGeometry(requests, kTokens, large ? kLargeLayers : 1, random);
  Twin twin(geometry, 0, geometry.layers, Traffic::MaxRows(requests, kTokens), random.Next());
  Traffic traffic(geometry, requests, kTokens, random);
  const RowSource source = AnySource(random);
  const auto wild = [&random] {
    const std::int64_t sign = random.OneIn(2) ? 1 : -1;
    return sign * static_cast<std::int64_t>(random.Next() >> random.In(1, 63));
  };
  // Never an index of somebody else's, for then what is written would be up to chance.
  const auto beyond = [&wild](std::int64_t end) {
    const std::int64_t x = wild();
    return x >= 0 && x < end ? end + x : x;
  };
  const std::int64_t slots = geometry.blocks * geometry.block_size;
  const std::int64_t ring_rows = geometry.ring_blocks * geometry.rows_per_block();
  for (int step = 0; step < 12; ++step) {
    Indices x = traffic.Next(random);
    for (int i = 0; i < x.rows(); ++i) {
      if (random.OneIn(6)) {
        const std::int64_t bad[] = {beyond(slots),  random.In(0, geometry.block_size - 1),
                                    slots,          slots + random.In(1, 99),
                                    x.slots[i] + 1, std::int64_t{1} << 32};
        x.slots[i] = bad[random.In(0, 5)];
      }
      if (random.OneIn(8)) {
        const std::int64_t bad[] = {beyond(ring_rows), 0,
                                    ring_rows,         ring_rows + random.In(1, 99),
                                    x.bases[i] + 1,    std::int64_t{1} << 32};
        x.bases[i] = bad[random.In(0, 5)];
      }
      // Only where rows do not lean on their neighbours' positions.
      if (x.kind == Kind::kDecode && random.OneIn(8)) x.positions[i] = wild();
    }
    for (int i = 0; i < x.requests(); ++i) {
      if (x.kind == Kind::kVerify && random.OneIn(5)) x.seq_lens[i] = static_cast<std::int32_t>(wild());
    }
    if (x.kind != Kind::kDecode && random.OneIn(3)) {
      // The ends of the array: no two ranges may overlap, or what is written is up to chance.
      if (random.OneIn(2)) x.query_start_loc.front() = static_cast<std::int32_t>(-random.In(1, 1 << 30));
      if (random.OneIn(2))
        x.query_start_loc.back() = static_cast<std::int32_t>(x.rows() + random.In(1, 1 << 30));
    }
    twin.Apply(x, AnyArrangement(random), source, random);
    const std::string why = twin.Difference();
    if (!why.empty()) return "step " + std::to_string(step) + ": " + why;
  }
  return twin.host_skipped() ? "" : "no row was skipped";
}

// Arrays of noise. What the rows mean is undefined: only the guard zones, the null blocks and the gaps must
// keep their bytes.
std::string NoiseTrial(std::uint64_t seed, Size size) {
  Random random(seed);
  constexpr int kTokens = 120;
  const bool large = size == Size::kLarge;
  const int requests = large ? kLargeRequests : 6;
  const CacheGeometry geometry = Traffic::RandomGeometry(requests, kTokens, large ? kLargeLayers : 1, random);
  Twin twin(geometry, 0, geometry.layers, Traffic::MaxRows(requests, kTokens), random.Next());
  Traffic traffic(geometry, requests, kTokens, random);
  const RowSource source = AnySource(random);
  const std::int64_t slots = geometry.blocks * geometry.block_size;
  for (int step = 0; step < 12; ++step) {
    Indices x = traffic.Next(random);
    for (int i = 0; i < x.rows(); ++i) {
      if (random.OneIn(2)) x.positions[i] = random.In(-20, 200);
      if (random.OneIn(2)) x.slots[i] = random.In(-20, slots + 20);
      if (random.OneIn(2)) {
        x.bases[i] = random.In(-1, geometry.ring_blocks + 1) * geometry.rows_per_block() + random.In(0, 1);
      }
    }
    for (auto& q : x.query_start_loc) {
      if (random.OneIn(2)) q = static_cast<std::int32_t>(random.In(-5, x.rows() + 5));
    }
    for (auto& s : x.seq_lens) {
      if (random.OneIn(2)) s = static_cast<std::int32_t>(random.In(-5, 200));
    }
    twin.Stage(x, AnyArrangement(random), source, random);
    twin.QueueDevice();
  }
  return twin.DifferenceOutside();
}

// Every kind captured once and replayed on changed arrays.
std::string GraphTrial(std::uint64_t seed, Kind kind, int replays) {
  Random random(seed);
  constexpr int kRequests = 5, kTokens = 400;
  CacheGeometry geometry = Traffic::RandomGeometry(kRequests, kTokens, 1, random);
  geometry.k = 3;
  geometry.capacity = 10;
  geometry.rows_per_layer = 11;
  Twin twin(geometry, 0, geometry.layers, Traffic::MaxRows(kRequests, kTokens), random.Next());
  Traffic traffic(geometry, kRequests, kTokens, random);
  const RowSource source = AnySource(random);
  traffic.Restart(random);
  const auto next = [&] {
    if (kind == Kind::kDecode) return traffic.Decode(random);
    Indices x = kind == Kind::kVerify ? traffic.Verify(random)
                                      : traffic.Prefill(
                                            random, [&] { return random.In(0, 30); }, true);
    // A graph is captured for a fixed number of rows: the rest is padding, of a request of its own.
    while (x.rows() < kRequests * 30) x.Add(-1, 0, -1);
    x.EndRequest(kRequests * 30);
    return x;
  };
  twin.Stage(next(), Arrangement::kSeparate, source, random);
  twin.UpdateHost();
  const Graph graph(twin.stream(), [&] { twin.QueueDevice(); });
  graph.Replay();
  for (int i = 1; i < replays; ++i) {
    twin.Stage(next(), Arrangement::kSeparate, source, random);
    graph.Replay();
    twin.UpdateHost();
    const std::string why = twin.Difference();
    if (!why.empty()) return "replay " + std::to_string(i) + ": " + why;
  }
  return twin.host_skipped() ? "good rows were skipped" : "";
}

int Main(const Options& options) {
  const bool quick = options.quick;
  const std::uint64_t seed = options.seed << 32;
  std::printf("device: %s\nhost kernels: %s\n", DescribeDevice().c_str(), HostKernels().name());
  Report report;
  report.Run(quick ? "expf digest, 2^16 arguments" : "expf digest, all negative floats",
             [&] { return ExpfDigest(options); });
  report.Run("expf probe", [&] { return ExpfProbe(options); });

  // Every so many trials is a large one.
  const auto size = [](int trial, int every) { return trial % every == 0 ? Size::kLarge : Size::kSmall; };
  std::atomic<std::int64_t> regions = 0;
  std::atomic<int> trials = 0;
  const std::int64_t enough = quick ? 400 : options.regions;
  report.Run("random traffic, " + std::to_string(enough) + " regions", [&] {
    return Trials(
        quick, [&] { return regions < enough; },
        [&](int i) { return ++trials, RandomTrial(seed + i, size(i + 1, 40), quick, regions); });
  });
  std::printf("     %lld regions in %d trials\n", static_cast<long long>(regions), trials.load());

  const int groups = quick ? 2 : 200, launches = quick ? 8 : 50;
  const auto repeat = [&](int n, auto trial) {
    std::atomic<int> left = n;
    return Trials(
        quick, [&] { return left-- > 0; }, trial);
  };
  report.Run("random traffic of large steps", [&] {
    return repeat(quick ? 1 : 16, [&](int i) { return RandomTrial(seed + i, Size::kLarge, quick, regions); });
  });
  report.Run(std::to_string(groups * launches) + " launches of chunks longer than the ring", [&] {
    return repeat(groups, [&](int i) { return LongChunkTrial(seed + i, size(i + 1, 40), launches); });
  });
  report.Run("bad rows are skipped and counted", [&] {
    return repeat(quick ? 3 : 400, [&](int i) { return BadRowsTrial(seed + i, size(i, 40)); });
  });
  report.Run("noise never leaves the cache", [&] {
    return repeat(quick ? 3 : 400, [&](int i) { return NoiseTrial(seed + i, size(i, 40)); });
  });
  const auto graph = [&](const char* name, Kind kind) {
    report.Run(std::string("graph replay, ") + name, [&] {
      return repeat(quick ? 1 : 8, [&](int i) { return GraphTrial(seed + i, kind, quick ? 4 : 40); });
    });
  };
  graph("decode", Kind::kDecode);
  graph("verify", Kind::kVerify);
  graph("prefill", Kind::kPrefill);
  return report.Finish();
}

}  // namespace
}  // namespace kvsummary::gpu

int main(int argc, char** argv) {
  kvsummary::gpu::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      options.quick = true;
    } else if (std::strncmp(argv[i], "--regions=", 10) == 0) {
      options.regions = std::atoll(argv[i] + 10);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      options.seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: gpu_check [--quick] [--regions=N] [--seed=S]\n");
      return 2;
    }
  }
  return kvsummary::gpu::Main(options);
}
