// Checks that the daemon's CUDA device does what the host's does, byte for byte: steps of every size and
// wherever their rows lie (packed or strided in host memory, pinned host memory, or the device's own), and
// copies of pieces. Tells what a step takes.
//
//   gpu_device_check
//
// The last line is `N passed, N failed`; exit status 1 on a failure.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "server/device/device.h"
#include "tests/gpu/device.h"

namespace kvsummary::gpu {
namespace {

constexpr CacheGeometry kGeometry = {.layers = 3,
                                     .blocks = 20,
                                     .block_size = 64,
                                     .block_stride = 3 * 2048,
                                     .ring_blocks = 6,
                                     .capacity = 10,
                                     .rows_per_layer = 12,
                                     .k = 3};
constexpr std::int64_t kLayers = kGeometry.layers;
constexpr std::int64_t kRows = 100;
constexpr std::int64_t kBufferBytes = 4 << 20;

// Where rows lie in a buffer; bytes.
struct Place {
  const char* name;
  std::int64_t key, z, row_stride, layer_stride;
};
constexpr Place kPlaces[] = {
    {"packed", 0, 512, 1024, kRows * 1024},
    {"packed layers apart", 0, 512, 1024, kRows * 1024 + 512},
    {"wide rows", 1024, 1536, 4096, kRows * 4096},
    {"wide rows, layers apart", 1024, 1536, 4096, kRows * 4096 + 16},
    {"z before key", 2048, 0, 4096, kRows * 4096 + 16},
    {"layers within a row", 0, 512, kLayers * 1024, 1024},
    {"keys, then z", 0, kLayers* kRows * 512, 512, kRows * 512},
    {"overlapping rows", 0, 512, 512, kRows * 1024},
};

RowsView At(const void* buffer, const Place& p) {
  const auto* base = static_cast<const char*>(buffer);
  return {reinterpret_cast<const std::uint16_t*>(base + p.key),
          reinterpret_cast<const std::uint16_t*>(base + p.z),
          p.row_stride / 2,
          p.row_stride / 2,
          p.layer_stride / 2,
          p.layer_stride / 2};
}

std::vector<std::uint16_t> RandomBuffer(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> values(kBufferBytes / 2);
  for (auto& v : values) v = static_cast<std::uint16_t>(0x3c00 + random() % 0x400 + (random() % 2) * 0x8000);
  return values;
}

// Two chunks: rows 0 to 59 of one request, 60 to 99 of another.
struct Chunks {
  Chunks() {
    for (std::int64_t i = 0; i < kRows; ++i) {
      const bool second = i >= 60;
      slots.push_back((second ? 4 * 64 - 60 : 64) + i);
      positions.push_back(second ? i - 60 : i);
      bases.push_back((second ? 2 : 1) * kGeometry.rows_per_block());
    }
  }
  PrefillStep Step(const RowsView& in) const {
    return {static_cast<std::int32_t>(kRows), 2, in, slots.data(), positions.data(), starts, bases.data()};
  }
  std::vector<std::int64_t> slots, positions, bases;
  std::int32_t starts[3] = {0, 60, kRows};
};

// Runs work on the device's thread.
absl::Status OnExecutor(Device& device, const std::function<absl::Status()>& work) {
  std::promise<absl::Status> result;
  if (auto s = device.executor().Submit([&] { result.set_value(work()); }); !s.ok()) return s;
  return result.get_future().get();
}

// Memory of a cache of a geometry, and work on it, on the device's thread.
absl::StatusOr<std::string> WithCache(Device& device, const CacheGeometry& g,
                                      const std::function<absl::Status(Memory&, const CacheView&)>& work) {
  std::string bytes(static_cast<std::size_t>(g.total_bytes()), 0);
  const auto status = OnExecutor(device, [&]() -> absl::Status {
    if (auto s = device.Open(); !s.ok()) return s;
    const auto bytes_taken = device.AllocationBytes(g.total_bytes(), MemoryKind::kDefault);
    if (!bytes_taken.ok()) return bytes_taken.status();
    auto memory = device.Allocate(*bytes_taken, MemoryKind::kDefault);
    if (!memory.ok()) return memory.status();
    if (auto s = work(**memory, MakeView(g, (*memory)->data(), {0, g.layers})); !s.ok()) return s;
    const Piece all{0, g.total_bytes()};
    return device.CopyOut(**memory, {&all, 1}, bytes.data());
  });
  if (!status.ok()) return status;
  return bytes;
}

// Applies the chunks on the device, and gives the cache's bytes.
absl::StatusOr<std::string> Run(Device& device, const RowsView& in, RowsIn rows_in) {
  const Chunks chunks;
  return WithCache(device, kGeometry, [&](Memory&, const CacheView& view) {
    return device.Apply(view, chunks.Step(in), rows_in);
  });
}

// A prefill of requests of as many tokens each, from position 0 on, and rows for it.
struct Prefill {
  Prefill(std::int64_t requests, std::int64_t tokens, std::int32_t layers, unsigned seed)
      : geometry{.layers = layers,
                 .blocks = 1 + requests * ((tokens + 63) / 64),
                 .block_size = 64,
                 .block_stride = layers * std::int64_t{2048},
                 .ring_blocks = requests + 1,
                 .capacity = 10,
                 .rows_per_layer = 10,
                 .k = 3} {
    for (std::int64_t r = 0; r < requests; ++r) {
      starts.push_back(static_cast<std::int32_t>(slots.size()));
      for (std::int64_t t = 0; t < tokens; ++t) {
        slots.push_back((1 + r * ((tokens + 63) / 64)) * 64 + t);
        positions.push_back(t);
        bases.push_back((r + 1) * geometry.rows_per_block());
      }
    }
    starts.push_back(static_cast<std::int32_t>(slots.size()));
    std::mt19937 random(seed);
    rows.resize(slots.size() * static_cast<std::size_t>(layers) * kRowElements);
    for (auto& v : rows) v = static_cast<std::uint16_t>(0x3e00 + random() % 0x200 + (random() % 2) * 0x8000);
  }
  Step At(const void* rows_at) const {
    const auto count = static_cast<std::int32_t>(slots.size());
    return PrefillStep{count,
                       static_cast<std::int32_t>(starts.size()) - 1,
                       PackedRows(rows_at, count),
                       slots.data(),
                       positions.data(),
                       starts.data(),
                       bases.data()};
  }
  std::int64_t row_bytes() const { return static_cast<std::int64_t>(rows.size()) * 2; }

  const CacheGeometry geometry;
  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::int32_t> starts;
  std::vector<std::uint16_t> rows;
};

// Pages of host memory, as a client's memfd has them.
class Pages {
 public:
  explicit Pages(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        data_(static_cast<char*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (data_ == MAP_FAILED) std::abort();
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  char* get() const { return data_; }

 private:
  const std::size_t bytes_;
  char* const data_;
};

class Checks {
 public:
  Checks(Device& host, Device& device) : host_(host), device_(device) {}

  int Run() {
    Places();
    Sizes();
    Check("steps of many sizes one after the other", Sequence());
    Check("a step beyond the stage gives its memory back", Transient());
    Check("pieces in and out", Pieces());
    Check("host memory is pinned and unpinned in a loop", PinInALoop());
    Check("what the device takes is told", Overheads());
    for (const std::int64_t requests : {1, 64, 256, 1024}) StepTime(requests, 1);
    StepTime(256, 23);
    CopyTime();
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  using Bytes = absl::StatusOr<std::string>;

  // An empty text is a pass.
  void Check(const std::string& name, const std::string& why) {
    ++(why.empty() ? passed_ : failed_);
    std::printf("%s %s%s%s\n", why.empty() ? "PASS" : "FAIL", name.c_str(), why.empty() ? "" : ": ",
                why.c_str());
    std::fflush(stdout);
  }
  static std::string Differ(const Bytes& got, const Bytes& want) {
    if (!want.ok()) return "the host: " + std::string(want.status().message());
    if (!got.ok()) return std::string(got.status().message());
    if (*got == *want) return "";
    const auto at = std::mismatch(got->begin(), got->end(), want->begin(), want->end()).first - got->begin();
    return "byte " + std::to_string(at) + " differs";
  }

  void Places() {
    const auto buffer = RandomBuffer(7);
    const Stream stream;
    DeviceMemory on_device(kBufferBytes);
    on_device.Upload(buffer.data(), kBufferBytes, stream);
    stream.Synchronize();
    const Pages pages(kBufferBytes);
    std::memcpy(pages.get(), buffer.data(), kBufferBytes);
    for (const Place& place : kPlaces) {
      const auto want = gpu::Run(host_, At(buffer.data(), place), RowsIn::kHost);
      const std::string name = std::string(": ") + place.name;
      Check("host memory" + name, Differ(gpu::Run(device_, At(buffer.data(), place), RowsIn::kHost), want));
      Check("device memory" + name,
            Differ(gpu::Run(device_, At(on_device.get(), place), RowsIn::kDevice), want));
      Pin(pages.get(), kBufferBytes);
      Check("pinned memory" + name, Differ(gpu::Run(device_, At(pages.get(), place), RowsIn::kHost), want));
      Unpin(pages.get());
    }
  }
  void Pin(char* data, std::int64_t bytes) {
    OnExecutor(device_, [&] {
      device_.PinHost(data, bytes);
      return absl::OkStatus();
    }).IgnoreError();
  }
  void Unpin(char* data) {
    OnExecutor(device_, [&] {
      device_.UnpinHost(data);
      return absl::OkStatus();
    }).IgnoreError();
  }

  // From a kernel's worth of rows to several halves of the staging memory, to more than the stage.
  void Sizes() {
    for (const std::int64_t tokens : {1, 9, 100, 511, 2000, 10'000, 30'000}) {
      const Prefill prefill(2, tokens, 3, static_cast<unsigned>(tokens));
      const auto on = [&](Device& device, const void* rows) {
        return WithCache(device, prefill.geometry, [&](Memory&, const CacheView& view) {
          return device.Apply(view, prefill.At(rows), RowsIn::kHost);
        });
      };
      const auto want = on(host_, prefill.rows.data());
      const std::string name = std::to_string(prefill.row_bytes() >> 10) + " KiB of rows";
      Check(name, Differ(on(device_, prefill.rows.data()), want));
      const Pages pages(prefill.row_bytes());
      std::memcpy(pages.get(), prefill.rows.data(), static_cast<std::size_t>(prefill.row_bytes()));
      Pin(pages.get(), prefill.row_bytes());
      Check(name + ", pinned", Differ(on(device_, pages.get()), want));
      Unpin(pages.get());
    }
  }

  // Each step's memory is overwritten as soon as Apply has returned: a copy that still runs then would show.
  std::string Sequence() {
    std::vector<Prefill> prefills;
    for (unsigned i = 0; i < 40; ++i) prefills.emplace_back(4, 1 + (i * 977) % 1500, 3, i);
    const CacheGeometry g = Prefill(4, 1500, 3, 0).geometry;
    const auto on = [&](Device& device) {
      return WithCache(device, g, [&](Memory&, const CacheView& view) -> absl::Status {
        for (const Prefill& prefill : prefills) {
          std::vector<std::uint16_t> rows = prefill.rows;
          if (auto s = device.Apply(view, prefill.At(rows.data()), RowsIn::kHost); !s.ok()) return s;
          std::fill(rows.begin(), rows.end(), 0xffff);
        }
        return absl::OkStatus();
      });
    };
    return Differ(on(device_), on(host_));
  }

  std::string Transient() {
    const std::int64_t used = device_.budget().used_bytes();
    const Prefill prefill(1, 50'000, 1, 5);
    std::int64_t during = 0;
    const auto applied = WithCache(device_, prefill.geometry, [&](Memory&, const CacheView& view) {
      auto status = device_.Apply(view, prefill.At(prefill.rows.data()), RowsIn::kHost);
      during = device_.budget().used_bytes();
      return status;
    });
    if (!applied.ok()) return std::string(applied.status().message());
    return during == used ? "" : std::to_string(during - used) + " bytes of the budget are still taken";
  }

  std::string Pieces() {
    std::mt19937 random(11);
    const auto number = [&](std::int64_t below) { return static_cast<std::int64_t>(random()) % below; };
    constexpr std::int64_t kBytes = 40 << 20;
    const CacheGeometry g{.layers = 1,
                          .blocks = kBytes / 256,
                          .block_size = 8,
                          .block_stride = 256,
                          .ring_blocks = 0,
                          .capacity = 8,
                          .rows_per_layer = 8};
    for (const std::int64_t unit : {256, 2048, 3 * 2048 + 256, 47'104}) {
      std::vector<Piece> pieces;
      std::string bytes;
      for (std::int64_t at = number(4) * unit; at + 60 * unit <= kBytes; at += (1 + number(20)) * unit) {
        const std::int64_t units = 1 + number(30);
        pieces.push_back({at, units * unit});
        at += units * unit;
        for (std::int64_t i = 0; i < units * unit; ++i) bytes.push_back(static_cast<char>(random()));
      }
      std::shuffle(pieces.begin(), pieces.end(), random);
      std::string back(bytes.size(), 0);
      const auto on = [&](Device& device) {
        return WithCache(device, g, [&](Memory& memory, const CacheView&) -> absl::Status {
          if (auto s = device.CopyIn(memory, pieces, bytes.data()); !s.ok()) return s;
          return device.CopyOut(memory, pieces, back.data());
        });
      };
      const auto got = on(device_);
      if (back != bytes) return "what was written in units of " + std::to_string(unit) + " is not read back";
      if (auto why = Differ(got, on(host_)); !why.empty()) return std::to_string(unit) + ": " + why;
    }
    return "";
  }

  std::string PinInALoop() {
    const std::int64_t before = device_.overhead().pinned_host_bytes;
    const Pages pages(kBufferBytes);
    for (int i = 0; i < 20; ++i) {
      Pin(pages.get(), kBufferBytes);
      if (device_.overhead().pinned_host_bytes != before + kBufferBytes) return "it was not pinned";
      Unpin(pages.get());
      if (device_.overhead().pinned_host_bytes != before) return "it was not unpinned";
    }
    Pin(pages.get(), std::int64_t{1} << 40);
    return device_.overhead().pinned_host_bytes == before ? "" : "a terabyte was pinned";
  }

  std::string Overheads() {
    const auto overhead = device_.overhead();
    std::printf("     %lld MiB of the device, %lld MiB of pinned host memory\n",
                static_cast<long long>(overhead.device_bytes >> 20),
                static_cast<long long>(overhead.pinned_host_bytes >> 20));
    if (overhead.pinned_host_bytes <= 0) return "no pinned memory";
    return overhead.device_bytes > 0 ? "" : "nothing of the device (no libnvidia-ml?)";
  }

  // The executor's time for a step of host rows: medians.
  void StepTime(std::int64_t requests, std::int32_t layers) {
    const Prefill prefill(requests, 1, layers, 9);
    const Pages pages(prefill.row_bytes());
    std::memcpy(pages.get(), prefill.rows.data(), static_cast<std::size_t>(prefill.row_bytes()));
    double us[2] = {};
    for (const bool pinned : {false, true}) {
      if (pinned) Pin(pages.get(), prefill.row_bytes());
      std::vector<double> times;
      const auto status =
          WithCache(device_, prefill.geometry, [&](Memory&, const CacheView& view) -> absl::Status {
            const DecodeStep step{static_cast<std::int32_t>(requests), PackedRows(pages.get(), requests),
                                  prefill.slots.data(), prefill.positions.data(), prefill.bases.data()};
            for (int i = 0; i < 500; ++i) {
              const auto start = std::chrono::steady_clock::now();
              if (auto s = device_.Apply(view, step, RowsIn::kHost); !s.ok()) return s;
              times.push_back(
                  std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                      .count());
            }
            return absl::OkStatus();
          });
      if (pinned) Unpin(pages.get());
      if (!status.ok()) return Check("a step's time", std::string(status.status().message()));
      std::sort(times.begin(), times.end());
      us[pinned ? 1 : 0] = times[times.size() / 2];
    }
    std::printf("     decode of %lld requests, %d layers: %.1f us, rows pinned %.1f us\n",
                static_cast<long long>(requests), layers, us[0], us[1]);
  }

  void CopyTime() {
    const CacheGeometry g{.layers = 23,
                          .blocks = 1000,
                          .block_size = 64,
                          .block_stride = 23 * 2048,
                          .ring_blocks = 1,
                          .capacity = 10,
                          .rows_per_layer = 10};
    std::vector<Piece> pieces;
    for (std::int64_t i = 0; i < 22; ++i)
      pieces.push_back({(1 + i * 37 % 999) * g.block_stride, g.block_stride});
    std::string host(static_cast<std::size_t>(22 * g.block_stride), 1);
    const auto status = WithCache(device_, g, [&](Memory& memory, const CacheView&) -> absl::Status {
      const auto time = [&](const std::function<absl::Status()>& copy) {
        std::vector<double> times;
        for (int i = 0; i < 200; ++i) {
          const auto start = std::chrono::steady_clock::now();
          copy().IgnoreError();
          times.push_back(
              std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
        }
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
      };
      const double out = time([&] { return device_.CopyOut(memory, pieces, host.data()); });
      const double in = time([&] { return device_.CopyIn(memory, pieces, host.data()); });
      std::printf("     22 pages of 47,104 bytes: out %.1f us, in %.1f us\n", out, in);
      return absl::OkStatus();
    });
    if (!status.ok()) Check("a copy's time", std::string(status.status().message()));
  }

  Device& host_;
  Device& device_;
  int passed_ = 0, failed_ = 0;
};

int Main() {
  auto host = MakeHostDevice(ScalarKernels(), kBufferBytes);
  auto devices = MakeCudaDevices(0);
  if (devices.empty()) {
    std::printf("no CUDA device\n0 passed, 1 failed\n");
    return 1;
  }
  std::printf("%s\n", DescribeDevice().c_str());
  return Checks(*host, *devices[0]).Run();
}

}  // namespace
}  // namespace kvsummary::gpu

int main() { return kvsummary::gpu::Main(); }
