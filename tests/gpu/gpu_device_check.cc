// Checks that the daemon's CUDA device applies steps to the same bytes as the host wherever their rows lie:
// packed or strided in host memory, or in the device's own.
//
//   gpu_device_check
//
// The last line is `N passed, N failed`; exit status 1 on a failure.
#include <cstdio>
#include <cstring>
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

// Applies the chunks on the device, and gives the cache's bytes.
absl::StatusOr<std::string> Run(Device& device, const RowsView& in, RowsIn rows_in) {
  std::promise<absl::StatusOr<std::string>> result;
  const auto work = [&]() -> absl::StatusOr<std::string> {
    if (auto s = device.Open(); !s.ok()) return s;
    const auto bytes_taken = device.AllocationBytes(kGeometry.total_bytes(), MemoryKind::kDefault);
    if (!bytes_taken.ok()) return bytes_taken.status();
    auto memory = device.Allocate(*bytes_taken, MemoryKind::kDefault);
    if (!memory.ok()) return memory.status();
    const Chunks chunks;
    const auto view = MakeView(kGeometry, (*memory)->data(), {0, kGeometry.layers});
    if (auto s = device.Apply(view, chunks.Step(in), rows_in); !s.ok()) return s;
    std::string bytes(static_cast<std::size_t>(kGeometry.total_bytes()), 0);
    const Piece all{0, kGeometry.total_bytes()};
    if (auto s = device.CopyOut(**memory, {&all, 1}, bytes.data()); !s.ok()) return s;
    return bytes;
  };
  if (auto s = device.executor().Submit([&] { result.set_value(work()); }); !s.ok()) return s;
  return result.get_future().get();
}

int Main() {
  int passed = 0;
  int failed = 0;
  auto host = MakeHostDevice(ScalarKernels(), kBufferBytes);
  auto devices = MakeCudaDevices(0);
  if (devices.empty()) {
    std::printf("no CUDA device\n0 passed, 1 failed\n");
    return 1;
  }
  std::printf("%s\n", DescribeDevice().c_str());
  const auto buffer = RandomBuffer(7);
  const Stream stream;
  DeviceMemory on_device(kBufferBytes);
  on_device.Upload(buffer.data(), kBufferBytes, stream);
  stream.Synchronize();
  for (const Place& place : kPlaces) {
    const auto want = Run(*host, At(buffer.data(), place), RowsIn::kHost);
    const auto check = [&](const char* where, const absl::StatusOr<std::string>& got) {
      const bool good = want.ok() && got.ok() && *got == *want;
      ++(good ? passed : failed);
      std::printf("%s %s: %s\n", good ? "PASS" : "FAIL", where, place.name);
      if (!got.ok()) std::printf("  %s\n", std::string(got.status().message()).c_str());
    };
    check("host memory", Run(*devices[0], At(buffer.data(), place), RowsIn::kHost));
    check("device memory", Run(*devices[0], At(on_device.get(), place), RowsIn::kDevice));
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvsummary::gpu

int main() { return kvsummary::gpu::Main(); }
