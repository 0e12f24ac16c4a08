// Checks CudaPages() on device 0 against HostPages(), byte for byte; with a second device, across both.
//
//   gpu_copy_check [--quick]
//
// --quick is small enough for compute-sanitizer. The last line is `N passed, N failed`; exit status 1 on a
// failure, 2 on a CUDA error.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/copy.h"
#include "kernels/copy_testing.h"
#include "tests/gpu/device.h"

namespace kvsummary::gpu {
namespace {

using testing::Below;
using testing::Layout;
using testing::Random;
using Bytes = std::vector<std::uint8_t>;
using Ids = std::vector<std::int64_t>;

constexpr std::int64_t kUnit = kCudaMoveAlignment;

// Host bytes and their copy on a device.
struct Twin {
  explicit Twin(Bytes bytes, const Stream& stream) : host(std::move(bytes)), device(host.size() + kUnit) {
    Upload(stream);
  }
  void Upload(const Stream& stream) { device.Upload(host.data(), host.size(), stream); }
  bool Same(const Stream& stream) const {
    Bytes found(host.size());
    device.Download(found.data(), found.size(), stream);
    return found == host;
  }

  Bytes host;
  DeviceMemory device;
};

template <typename T>
Bytes AsBytes(const std::vector<T>& values) {
  Bytes out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

// A cache on both sides; its views are in the memory of each.
struct TwinCache {
  TwinCache(Random& random, const std::vector<std::int64_t>& shape, std::int64_t blocks, const Stream& stream)
      : layout(testing::RandomLayout(random, shape, blocks, kUnit)),
        memory(testing::RandomBytes(random, layout.memory_bytes), stream),
        views(AsBytes(layout.views), stream) {}
  PageSet OnHost() { return layout.Set(memory.host.data(), layout.views.data()); }
  PageSet OnDevice() const {
    return layout.Set(memory.device.get(), static_cast<const PageView*>(views.device.get()));
  }

  Layout layout;
  Twin memory;
  Twin views;
};

struct TwinIds {
  TwinIds(Ids values, const Stream& stream) : host(std::move(values)), bytes(AsBytes(host), stream) {}
  const std::int64_t* on_device() const { return static_cast<const std::int64_t*>(bytes.device.get()); }
  std::int64_t count() const { return static_cast<std::int64_t>(host.size()); }

  Ids host;
  Twin bytes;
};

// Counts on both sides, from a start that is not zero.
struct Counter {
  explicit Counter(const Stream& stream) : device(sizeof(unsigned long long)) {
    device.Upload(&host, sizeof(host), stream);
  }
  unsigned long long* on_device() const { return static_cast<unsigned long long*>(device.get()); }
  bool Same(const Stream& stream) const {
    unsigned long long found = 0;
    device.Download(&found, sizeof(found), stream);
    return found == host;
  }

  unsigned long long host = 7;
  DeviceMemory device;
};

Ids SpoiledBlocks(Random& random, const Layout& layout, std::int64_t count, bool null_is_bad) {
  Ids ids = testing::RandomBlocks(random, layout.blocks, count);
  testing::SpoilSome(random, layout.blocks, null_is_bad, ids);
  return ids;
}

// All three movements between two caches of this shape and a buffer; an empty text when host and device
// agree on every byte and count. The calls are captured once and replayed, so that nothing they need may
// come from the host.
std::string CompareMoves(Random& random, const std::vector<std::int64_t>& shape, std::int64_t blocks) {
  const Stream stream;
  TwinCache source(random, shape, blocks + Below(random, 5), stream);
  TwinCache sink(random, shape, blocks + Below(random, 5), stream);
  const std::int64_t count = 1 + Below(random, blocks - 1);
  const TwinIds gathered(SpoiledBlocks(random, source.layout, count, false), stream);
  const TwinIds scattered(SpoiledBlocks(random, sink.layout, count, true), stream);
  const TwinIds copied_from(SpoiledBlocks(random, source.layout, count, false), stream);
  const TwinIds copied_to(SpoiledBlocks(random, sink.layout, count, true), stream);
  Twin buffer(testing::RandomBytes(random, count * source.layout.page_bytes), stream);
  Counter skipped(stream);

  const Launch host{.skipped = &skipped.host};
  const Launch device{.stream = stream.get(), .skipped = skipped.on_device()};
  const PageMover& ours = *CudaPages();
  const Graph graph(stream, [&] {
    Check(ours.Gather(source.OnDevice(), gathered.on_device(), count, buffer.device.get(), device), "gather");
    Check(ours.Scatter(buffer.device.get(), sink.OnDevice(), scattered.on_device(), count, device),
          "scatter");
    Check(ours.Copy(source.OnDevice(), copied_from.on_device(), sink.OnDevice(), copied_to.on_device(), count,
                    device),
          "copy");
  });
  for (int round = 0; round < 2; ++round) {
    graph.Replay();
    HostPages().Gather(source.OnHost(), gathered.host.data(), count, buffer.host.data(), host);
    HostPages().Scatter(buffer.host.data(), sink.OnHost(), scattered.host.data(), count, host);
    HostPages().Copy(source.OnHost(), copied_from.host.data(), sink.OnHost(), copied_to.host.data(), count,
                     host);
    if (!source.memory.Same(stream)) return "the source has changed";
    if (!buffer.Same(stream)) return "the buffer differs";
    if (!sink.memory.Same(stream)) return "the destination differs";
    if (!skipped.Same(stream)) return "the count of bad pages differs";
  }
  return "";
}

std::string RandomMoves(std::uint64_t trials, std::int64_t max_views, std::int64_t max_bytes,
                        std::int64_t max_blocks) {
  for (std::uint64_t seed = 0; seed < trials; ++seed) {
    Random random(seed);
    const auto shape = testing::RandomShape(random, max_views, max_bytes, kUnit);
    const std::string why = CompareMoves(random, shape, 2 + Below(random, max_blocks));
    if (!why.empty()) return "seed " + std::to_string(seed) + ": " + why;
  }
  return "";
}

std::string OneShape(const std::vector<std::int64_t>& shape, std::int64_t blocks) {
  Random random(1);
  return CompareMoves(random, shape, blocks);
}

// Views that the device alone can judge: nothing moves, every page counts.
std::string ViewsThatDoNotFit() {
  const Stream stream;
  Random random(1);
  const std::vector<std::vector<PageView>> bad = {
      {{0, 96, 64}},                                                     // too few bytes
      {{0, 96, 64}, {64, 96, 48}},                                       // too many
      {{0, 96, -16}, {0, 96, 64}, {0, 96, 48}},                          // negative
      {{8, 96, 96}},                                                     // misaligned offset
      {{0, 104, 96}},                                                    // misaligned stride
      {{0, 96, 88}, {88, 96, 8}},                                        // misaligned bytes
      {{0, 96, INT64_MAX - 15}, {0, 96, INT64_MAX - 15}, {0, 96, 128}},  // a sum that wraps around
  };
  for (std::size_t i = 0; i < bad.size(); ++i) {
    TwinCache cache(random, {96}, 4, stream);
    const Twin views(AsBytes(bad[i]), stream);
    PageSet set = cache.OnDevice();
    set.views = static_cast<const PageView*>(views.device.get());
    set.view_count = static_cast<std::int32_t>(bad[i].size());
    const TwinIds ids({1, 2, 3}, stream);
    const Twin buffer(testing::RandomBytes(random, 3 * 96), stream);
    Counter skipped(stream);
    const Launch launch{.stream = stream.get(), .skipped = skipped.on_device()};
    Check(CudaPages()->Gather(set, ids.on_device(), 3, buffer.device.get(), launch), "gather");
    Check(CudaPages()->Scatter(buffer.device.get(), set, ids.on_device(), 3, launch), "scatter");
    Check(CudaPages()->Copy(cache.OnDevice(), ids.on_device(), cache.OnDevice(), ids.on_device(), 0, launch),
          "copy of nothing");
    skipped.host += 6;
    if (!buffer.Same(stream) || !cache.memory.Same(stream))
      return "case " + std::to_string(i) + " moved bytes";
    if (!skipped.Same(stream)) return "case " + std::to_string(i) + " counted otherwise";
  }
  return "";
}

// Pointers that the host can judge.
std::string MisalignedPointers() {
  const Stream stream;
  Random random(1);
  TwinCache cache(random, {96}, 4, stream);
  const TwinIds ids({1}, stream);
  const Twin buffer(Bytes(96 + kUnit), stream);
  auto* odd = static_cast<std::uint8_t*>(buffer.device.get()) + 8;
  if (CudaPages()->Gather(cache.OnDevice(), ids.on_device(), 1, odd, {.stream = stream.get()}) !=
      kInvalidMove)
    return "a misaligned buffer is taken";
  PageSet set = cache.OnDevice();
  set.base += 8;
  if (CudaPages()->Scatter(buffer.device.get(), set, ids.on_device(), 1, {.stream = stream.get()}) !=
      kInvalidMove)
    return "a misaligned base is taken";
  return "";
}

// Pages of a cache on the other device, read and written by kernels of this one.
std::string AcrossDevices() {
  Check(cudaDeviceEnablePeerAccess(1, 0), "peer access");
  const Stream stream;
  Random random(1);
  for (const auto& shape : {std::vector<std::int64_t>{2048}, {47104, 16, 65536}}) {
    const Layout there_layout = testing::RandomLayout(random, shape, 200, kUnit);
    TwinCache here(random, shape, 200, stream);
    Bytes there_host = testing::RandomBytes(random, there_layout.memory_bytes);
    void* there = nullptr;
    Check(cudaSetDevice(1), "device 1");
    Check(cudaMalloc(&there, there_host.size()), "cudaMalloc");
    Check(cudaMemcpy(there, there_host.data(), there_host.size(), cudaMemcpyHostToDevice), "upload");
    Check(cudaSetDevice(0), "device 0");
    const Twin there_views(AsBytes(there_layout.views), stream);
    const PageSet there_set = there_layout.Set(there, static_cast<const PageView*>(there_views.device.get()));
    const PageSet there_set_host = there_layout.Set(there_host.data(), there_layout.views.data());
    const TwinIds pull_from(SpoiledBlocks(random, there_layout, 150, false), stream);
    const TwinIds pull_to(SpoiledBlocks(random, here.layout, 150, true), stream);
    const TwinIds push_from(SpoiledBlocks(random, here.layout, 150, false), stream);
    const TwinIds push_to(SpoiledBlocks(random, there_layout, 150, true), stream);
    const Launch launch{.stream = stream.get()};
    Check(CudaPages()->Copy(there_set, pull_from.on_device(), here.OnDevice(), pull_to.on_device(), 150,
                            launch),
          "pull");
    Check(CudaPages()->Copy(here.OnDevice(), push_from.on_device(), there_set, push_to.on_device(), 150,
                            launch),
          "push");
    HostPages().Copy(there_set_host, pull_from.host.data(), here.OnHost(), pull_to.host.data(), 150, {});
    HostPages().Copy(here.OnHost(), push_from.host.data(), there_set_host, push_to.host.data(), 150, {});
    if (!here.memory.Same(stream)) return "this device's pages differ";
    Bytes found(there_host.size());
    Check(cudaMemcpy(found.data(), there, found.size(), cudaMemcpyDeviceToHost), "download");
    Check(cudaFree(there), "cudaFree");
    if (found != there_host) return "the other device's pages differ";
  }
  return "";
}

int Main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  std::printf("%s\n", DescribeDevice().c_str());
  int passed = 0, failed = 0;
  const auto run = [&](const char* name, const std::string& why) {
    std::printf("%s %s%s%s\n", why.empty() ? "PASS" : "FAIL", name, why.empty() ? "" : ": ", why.c_str());
    std::fflush(stdout);
    ++(why.empty() ? passed : failed);
  };
  const std::uint64_t trials = quick ? 5 : 300;
  run("small pages of few views", RandomMoves(trials, 4, 512, 40));
  run("pages of many views", RandomMoves(trials / 5 + 1, 40, 9000, 60));
  run("as many views as a set has", OneShape(std::vector<std::int64_t>(kMaxPageViews, 48), 20));
  run("many 2 KiB pages", OneShape({2048}, quick ? 700 : 50'000));
  run("pages of 23 views", OneShape(std::vector<std::int64_t>(23, 2048), quick ? 30 : 1'000));
  run("large pages", OneShape({47104, 1'130'496}, quick ? 4 : 60));
  run("one small page", OneShape({16}, 2));
  run("views that do not fit", ViewsThatDoNotFit());
  run("misaligned pointers", MisalignedPointers());
  int devices = 0;
  Check(cudaGetDeviceCount(&devices), "device count");
  int peers = 0;
  if (devices > 1) Check(cudaDeviceCanAccessPeer(&peers, 0, 1), "peer access");
  if (peers) run("across two devices", AcrossDevices());
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace kvsummary::gpu

int main(int argc, char** argv) { return kvsummary::gpu::Main(argc, argv); }
