// Measures CudaPages() against cudaMemcpy of as many bytes, on device 0 and, with a second device, between
// the two over their link.
//
//   bench_copy [--json]
//
// Pages are picked at random from caches of 4 GiB. Each figure is the median over replays of a CUDA graph of
// several launches, each on other pages and other buffer memory, more than the L2 holds from 96 MiB on. GB/s
// count the bytes moved, once. The first 32 MiB of every movement are checked; exit status 1 when they
// differ.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/copy.h"
#include "tests/gpu/device.h"

namespace kvsummary {
namespace {

using gpu::Check;
using gpu::DeviceMemory;
using gpu::Graph;
using gpu::Stream;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kCacheBytes = 4096 * kMiB;
constexpr std::int64_t kBufferBytes = 1920 * kMiB;
constexpr std::int64_t kPatternBytes = 61 * kMiB;  // caches repeat this; no multiple of any page
constexpr int kReplays = 15;

struct PageKind {
  const char* name;
  std::int64_t page_bytes;
  int views;  // layer-major: one region of the cache for each
};

constexpr PageKind kKinds[] = {
    {"2 KiB", 2048, 1},
    {"47,104 B", 47104, 1},
    {"47,104 B in 23 views", 47104, 23},
    {"1.18 MB", 1179648, 1},
};
constexpr std::int64_t kSizes[] = {1 * kMiB, 96 * kMiB, 960 * kMiB};

struct Row {
  std::string operation, pages;
  std::int64_t bytes = 0;
  double us = 0, memcpy_us = 0;

  double gb_per_s(double time_us) const { return static_cast<double>(bytes) / time_us / 1e3; }
};

// Memory and streams of one device, which is current when they are made.
struct Memories {
  Memories() : cache(kCacheBytes), buffer(kBufferBytes) {}
  DeviceMemory cache;
  DeviceMemory buffer;
};

std::vector<std::uint8_t> Pattern() {
  std::mt19937_64 random(1);
  std::vector<std::uint8_t> out(kPatternBytes);
  for (std::size_t i = 0; i < out.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(&out[i], &word, 8);
  }
  return out;
}

void Fill(DeviceMemory& memory, const std::vector<std::uint8_t>& pattern, const Stream& stream) {
  auto* bytes = static_cast<std::uint8_t*>(memory.get());
  memory.Upload(pattern.data(), pattern.size(), stream);
  for (std::size_t at = pattern.size(); at < memory.size(); at += pattern.size()) {
    Check(cudaMemcpyAsync(bytes + at, bytes, std::min(pattern.size(), memory.size() - at), cudaMemcpyDefault,
                          static_cast<cudaStream_t>(stream.get())),
          "fill");
  }
}

// Microseconds of one of `launches` launches, launch(0) to launch(launches - 1) in one graph.
double MedianUs(const Stream& stream, int launches, const std::function<void(int)>& launch) {
  const Graph graph(stream, [&] {
    for (int i = 0; i < launches; ++i) launch(i);
  });
  const auto s = static_cast<cudaStream_t>(stream.get());
  cudaEvent_t start, end;
  Check(cudaEventCreate(&start), "event");
  Check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < kReplays + 2; ++i) {
    Check(cudaEventRecord(start, s), "event");
    graph.Replay();
    Check(cudaEventRecord(end, s), "event");
    stream.Synchronize();
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, start, end), "event");
    if (i >= 2) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return 1e3 * times[kReplays / 2] / launches;
}

class Bench {
 public:
  // `near` is on the current device, whose kernels and copies are measured; `far` on the same or another.
  // Blocks of `far` are copied to `sink`, on the current device.
  Bench(Memories& near, Memories& far, Memories& sink, const Stream& stream,
        const std::vector<std::uint8_t>& pattern)
      : near_(near), far_(far), sink_(sink), stream_(stream), pattern_(pattern) {}

  void Run(const PageKind& kind, std::int64_t size, std::vector<Row>& rows) {
    kind_ = &kind;
    blocks_ = kCacheBytes / kind.page_bytes;
    pages_ = size / kind.page_bytes;
    if (pages_ == 0) return;
    moved_ = pages_ * kind.page_bytes;
    launches_ = static_cast<int>(std::min<std::int64_t>(8, kBufferBytes / moved_));
    launches_ = static_cast<int>(std::min<std::int64_t>(launches_, (blocks_ - 1) / pages_));
    PlaceViews();
    PlaceBlocks();
    const bool across = &near_ != &far_;
    const std::string tag = across ? "peer " : "";
    const double in = Memcpy(near_.buffer, far_.cache, size);
    const double out = across ? Memcpy(far_.cache, near_.buffer, size) : in;

    Fill(far_.cache, pattern_, stream_);
    const double gather = MedianUs(stream_, launches_, [&](int i) { Gather(far_, from_, i); });
    CheckBuffer("gather");
    // What the buffer holds goes to other blocks; gathered back, it must be the same.
    const double scatter = MedianUs(stream_, launches_, [&](int i) {
      Check(CudaPages()->Scatter(Buffer(i), Set(far_), Ids(to_, i), pages_, OnStream()), "scatter");
    });
    GatherBack(far_);
    CheckBuffer("scatter");
    rows.push_back({tag + "gather", kind.name, moved_, gather, in});
    rows.push_back({tag + "scatter", kind.name, moved_, scatter, out});
    rows.push_back({tag + (across ? "copy in" : "copy"), kind.name, moved_, Copy(far_, sink_), in});
    if (across) rows.push_back({tag + "copy out", kind.name, moved_, Copy(sink_, far_), out});
  }

  bool failed() const { return failed_; }

 private:
  void PlaceViews() {
    std::vector<PageView> views;
    views.reserve(static_cast<std::size_t>(kind_->views));
    const std::int64_t bytes = kind_->page_bytes / kind_->views;
    for (int v = 0; v < kind_->views; ++v) views.push_back({v * blocks_ * bytes, bytes, bytes});
    views_ = Uploaded(views);
  }
  void PlaceBlocks() {
    std::mt19937_64 random(2);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(blocks_ - 1));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), random);
    from_host_ = ids;
    from_ = Uploaded(ids);
    std::shuffle(ids.begin(), ids.end(), random);
    to_ = Uploaded(ids);
  }
  template <typename T>
  std::unique_ptr<DeviceMemory> Uploaded(const std::vector<T>& values) {
    auto memory = std::make_unique<DeviceMemory>(values.size() * sizeof(T));
    memory->Upload(values.data(), values.size() * sizeof(T), stream_);
    stream_.Synchronize();
    return memory;
  }

  PageSet Set(const Memories& m) const {
    return {static_cast<std::uint8_t*>(m.cache.get()), blocks_, static_cast<const PageView*>(views_->get()),
            kind_->views, kind_->page_bytes};
  }
  const std::int64_t* Ids(const std::unique_ptr<DeviceMemory>& list, int launch) const {
    return static_cast<const std::int64_t*>(list->get()) + launch * pages_;
  }
  std::uint8_t* Buffer(int launch) const {
    return static_cast<std::uint8_t*>(near_.buffer.get()) + launch * moved_;
  }
  Launch OnStream() const { return {.stream = stream_.get()}; }

  // Microseconds that memcpy takes for the moved bytes, by its rate at the round size: it slows by a third at
  // some others.
  double Memcpy(const DeviceMemory& to, const DeviceMemory& from, std::int64_t size) {
    const double us = MedianUs(stream_, launches_, [&](int i) {
      Check(cudaMemcpyAsync(static_cast<std::uint8_t*>(to.get()) + i * size,
                            static_cast<const std::uint8_t*>(from.get()) + i * size,
                            static_cast<std::size_t>(size), cudaMemcpyDefault,
                            static_cast<cudaStream_t>(stream_.get())),
            "memcpy");
    });
    return us * static_cast<double>(moved_) / static_cast<double>(size);
  }
  void Gather(const Memories& m, const std::unique_ptr<DeviceMemory>& ids, int i) {
    Check(CudaPages()->Gather(Set(m), Ids(ids, i), pages_, Buffer(i), OnStream()), "gather");
  }
  double Copy(Memories& from, Memories& to) {
    Fill(from.cache, pattern_, stream_);
    const double us = MedianUs(stream_, launches_, [&](int i) {
      Check(CudaPages()->Copy(Set(from), Ids(from_, i), Set(to), Ids(to_, i), pages_, OnStream()), "copy");
    });
    GatherBack(to);
    CheckBuffer("copy");
    return us;
  }

  // Gathers what a movement has written to blocks to_, into a buffer that held something else.
  void GatherBack(const Memories& m) {
    Check(
        cudaMemsetAsync(near_.buffer.get(), 0, near_.buffer.size(), static_cast<cudaStream_t>(stream_.get())),
        "memset");
    for (int i = 0; i < launches_; ++i) Gather(m, to_, i);
  }
  // The buffer's first launch holds the pages of from_, as the pattern has them.
  void CheckBuffer(const char* what) {
    const std::int64_t pages = std::min(pages_, std::max<std::int64_t>(1, 32 * kMiB / kind_->page_bytes));
    std::vector<std::uint8_t> found(static_cast<std::size_t>(pages * kind_->page_bytes));
    near_.buffer.Download(found.data(), found.size(), stream_);
    const std::int64_t bytes = kind_->page_bytes / kind_->views;
    for (std::int64_t page = 0; page < pages; ++page) {
      for (int v = 0; v < kind_->views; ++v) {
        const std::int64_t at = (v * blocks_ + from_host_[static_cast<std::size_t>(page)]) * bytes;
        const std::uint8_t* got = &found[static_cast<std::size_t>(page * kind_->page_bytes + v * bytes)];
        for (std::int64_t done = 0; done < bytes;) {
          const std::int64_t in_pattern = (at + done) % kPatternBytes;
          const std::int64_t run = std::min(bytes - done, kPatternBytes - in_pattern);
          if (std::memcmp(got + done, &pattern_[static_cast<std::size_t>(in_pattern)],
                          static_cast<std::size_t>(run)) != 0) {
            std::fprintf(stderr, "%s of %s pages: page %lld differs\n", what, kind_->name,
                         static_cast<long long>(page));
            failed_ = true;
            return;
          }
          done += run;
        }
      }
    }
  }

  Memories& near_;
  Memories& far_;
  Memories& sink_;
  const Stream& stream_;
  const std::vector<std::uint8_t>& pattern_;
  bool failed_ = false;

  const PageKind* kind_ = nullptr;
  std::int64_t blocks_ = 0, pages_ = 0, moved_ = 0;
  int launches_ = 0;
  std::unique_ptr<DeviceMemory> views_, from_, to_;
  std::vector<std::int64_t> from_host_;
};

void PrintTable(const std::vector<Row>& rows) {
  std::printf("%-20s %-21s %10s %10s %9s %12s %9s\n", "operation", "pages", "MB", "us", "GB/s", "memcpy GB/s",
              "of memcpy");
  for (const Row& r : rows) {
    std::printf("%-20s %-21s %10.1f %10.2f %9.0f %12.0f %8.1f%%\n", r.operation.c_str(), r.pages.c_str(),
                static_cast<double>(r.bytes) / 1e6, r.us, r.gb_per_s(r.us), r.gb_per_s(r.memcpy_us),
                100 * r.memcpy_us / r.us);
  }
}

void PrintJson(const std::vector<Row>& rows) {
  std::printf("{\"device\": \"%s\", \"rows\": [\n", gpu::DescribeDevice().c_str());
  for (const Row& r : rows) {
    std::printf(
        "  {\"operation\": \"%s\", \"pages\": \"%s\", \"bytes\": %lld, \"us\": %.3f, \"memcpy_us\": "
        "%.3f}%s\n",
        r.operation.c_str(), r.pages.c_str(), static_cast<long long>(r.bytes), r.us, r.memcpy_us,
        &r == &rows.back() ? "" : ",");
  }
  std::printf("]}\n");
}

bool PeersReachable() {
  int devices = 0;
  Check(cudaGetDeviceCount(&devices), "device count");
  int reachable = 0;
  if (devices > 1) Check(cudaDeviceCanAccessPeer(&reachable, 0, 1), "peer access");
  return reachable != 0;
}

int Main(int argc, char** argv) {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  const Stream stream;
  const auto pattern = Pattern();
  std::vector<Row> rows;
  Memories near;
  bool failed = false;
  const auto run = [&](Bench& bench) {
    for (const std::int64_t size : kSizes) {
      for (const PageKind& kind : kKinds) bench.Run(kind, size, rows);
    }
    failed |= bench.failed();
  };
  Memories sink;
  Bench here(near, near, sink, stream, pattern);
  run(here);
  if (PeersReachable()) {
    Check(cudaSetDevice(1), "device 1");
    Memories far;
    Check(cudaSetDevice(0), "device 0");
    Check(cudaDeviceEnablePeerAccess(1, 0), "peer access");
    Bench across(near, far, sink, stream, pattern);
    run(across);
  }
  if (json) {
    PrintJson(rows);
  } else {
    std::printf("%s\n", gpu::DescribeDevice().c_str());
    PrintTable(rows);
  }
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) { return kvsummary::Main(argc, argv); }
