// The page store on a GPU: every tier path moves the right bytes, and how fast publishes and loads of 2,048
// blocks of 23 layers are. Needs a CUDA device; ends with status 1 when anything is wrong.
//
// Prints the device phase (the movement itself, between two events) beside a plain copy on the device of the
// same bytes, and the time from the call to its answer.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/update.h"
#include "server/device/device.h"
#include "server/store/page_store.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kPrefixBlocks = 2048;
constexpr std::int64_t kLayers = 23;
constexpr std::int64_t kLayerBytes = 2048;  // of a block of 64 tokens
constexpr std::int64_t kPageBytes = kLayers * kLayerBytes;
constexpr std::int64_t kPrefixBytes = kPrefixBlocks * kPageBytes;
constexpr std::int64_t kCacheBlocks = kPrefixBlocks + 1;
constexpr std::uint64_t kSession = 1;
constexpr int kWidth = 32;

using Clock = std::chrono::steady_clock;

int failures = 0;

void Expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

template <typename Work>
void OnExecutor(Device& device, Work work) {
  std::promise<void> done;
  device.executor().SubmitFree([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

std::string HashesOf(std::uint64_t prefix) {
  std::mt19937_64 random(prefix);
  std::string hashes(kPrefixBlocks * kWidth, '\0');
  for (std::size_t i = 0; i < hashes.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(&hashes[i], &word, 8);
  }
  return hashes;
}

std::string BytesOf(std::uint64_t prefix) {
  std::string bytes(kPrefixBytes, '\0');
  std::uint64_t word = prefix * 0x9e3779b97f4a7c15 + 1;
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    word = word * 6364136223846793005 + 1442695040888963407;
    std::memcpy(&bytes[i], &word, 8);
  }
  return bytes;
}

class GpuStore {
 public:
  // `layer_major`: the cache's layers lie apart, 23 views; else one view.
  GpuStore(std::vector<std::unique_ptr<Device>>& devices, std::int64_t host_bytes, std::int64_t device_bytes,
           bool layer_major)
      : device_(*devices[1]) {
    auto store = PageStore::Create(devices, {.host_bytes = host_bytes, .device_bytes = device_bytes});
    Expect(store.ok(), store.status().ToString());
    if (!store.ok()) return;
    store_ = *std::move(store);
    NamespaceSpec spec;
    spec.key.model = "step-5";
    spec.key.layers = kLayers;
    spec.key.block_size = 64;
    spec.hash_width = kWidth;
    spec.groups = {{.bytes_per_block = kPageBytes}};
    name_space_ = store_->Declare(kSession, spec).value();
    OnExecutor(device_, [&] {
      Expect(device_.Open().ok(), "the device does not open");
      const auto bytes = device_.AllocationBytes(kCacheBlocks * kPageBytes, MemoryKind::kDefault);
      if (bytes.ok()) memory_ = device_.Allocate(*bytes, MemoryKind::kDefault).value_or(nullptr);
    });
    Expect(memory_ != nullptr, "the device has no room for a cache");
    if (memory_ == nullptr) return;
    BoundCache bound;
    bound.device = &device_;
    bound.blocks = kCacheBlocks;
    bound.block_size = 64;
    BoundCache::Group& group = bound.groups.emplace_back();
    group.base = static_cast<std::uint8_t*>(memory_->data());
    if (layer_major) {
      for (std::int64_t l = 0; l < kLayers; ++l) {
        group.views.push_back({l * kCacheBlocks * kLayerBytes, kLayerBytes, kLayerBytes});
      }
    } else {
      group.views.push_back({0, kPageBytes, kPageBytes});
    }
    cache_ = store_->Bind(kSession, name_space_, bound).value();
    for (std::int64_t b = 1; b < kCacheBlocks; ++b) blocks_.push_back(b);
  }
  ~GpuStore() {
    cache_ = nullptr;
    store_ = nullptr;
    OnExecutor(device_, [&] { memory_ = nullptr; });
  }

  bool good() const { return cache_ != nullptr; }
  PageStore& store() { return *store_; }

  // Sets every byte of the blocks but the null block, in the order of memory.
  void Fill(const std::string& bytes) {
    OnExecutor(device_, [&] { Expect(device_.CopyIn(*memory_, Pieces(), bytes.data()).ok(), "CopyIn"); });
  }
  bool Holds(const std::string& bytes) {
    std::string out(kPrefixBytes, '\0');
    OnExecutor(device_, [&] { Expect(device_.CopyOut(*memory_, Pieces(), out.data()).ok(), "CopyOut"); });
    return out == bytes;
  }

  void Publish(std::uint64_t prefix, const char* what) {
    PublishArgs args;
    args.session = kSession;
    args.name_space = name_space_;
    args.cache = cache_;
    args.committed_tokens = kPrefixBlocks * 64;
    args.hashes = HashesOf(prefix);
    args.groups = {{0, blocks_}};
    std::promise<absl::StatusOr<PublishResult>> done;
    const auto start = Clock::now();
    store_->Publish(std::move(args), [&](auto result) { done.set_value(std::move(result)); });
    const auto result = done.get_future().get();
    const auto end = Clock::now();
    Expect(result.ok() && result->stored == kPrefixBlocks, result.status().ToString());
    if (result.ok()) Report(what, result->device_time, end - start);
  }
  std::int64_t Load(std::uint64_t prefix, const char* what) {
    const auto hit = store_->Lookup(
        {.session = kSession, .name_space = name_space_, .hashes = HashesOf(prefix), .device = &device_});
    Expect(hit.ok(), hit.status().ToString());
    if (!hit.ok() || hit->blocks == 0) return 0;
    LoadArgs args;
    args.session = kSession;
    args.lease = hit->lease;
    args.cache = cache_;
    args.groups = {{0, 0, blocks_}};
    args.groups[0].block_ids.resize(static_cast<std::size_t>(hit->blocks));
    std::promise<absl::StatusOr<LoadResult>> done;
    const auto start = Clock::now();
    store_->Load(std::move(args), [&](auto result) { done.set_value(std::move(result)); });
    const auto result = done.get_future().get();
    const auto end = Clock::now();
    Expect(result.ok() && result->bad[0].empty(), result.status().ToString());
    if (result.ok()) Report(what, result->device_time, end - start);
    store_->Release(kSession, hit->lease);
    return hit->blocks;
  }

  // A plain copy of a prefix's bytes on the device.
  void PlainCopy() {
    OnExecutor(device_, [&] {
      void* other = nullptr;
      cudaEvent_t events[2];
      if (cudaMalloc(&other, kPrefixBytes) != cudaSuccess) return;
      cudaEventCreate(&events[0]);
      cudaEventCreate(&events[1]);
      float best = 1e9F;
      for (int i = 0; i < 10; ++i) {
        float ms = 0;
        cudaEventRecord(events[0]);
        cudaMemcpyAsync(other, memory_->data(), kPrefixBytes, cudaMemcpyDeviceToDevice);
        cudaEventRecord(events[1]);
        cudaEventSynchronize(events[1]);
        cudaEventElapsedTime(&ms, events[0], events[1]);
        best = std::min(best, ms);
      }
      plain_us_ = best * 1000;
      cudaFree(other);
      cudaEventDestroy(events[0]);
      cudaEventDestroy(events[1]);
    });
    std::printf("  plain copy on the device: %.1f us, %.0f GB/s\n", plain_us_,
                kPrefixBytes / plain_us_ / 1000);
  }

 private:
  // Of all blocks but the null block.
  std::vector<Piece> Pieces() const {
    std::vector<Piece> pieces;
    for (const PageView& view : cache_->groups[0].views) {
      pieces.push_back({view.offset + view.block_stride, kPrefixBlocks * view.bytes});
    }
    return pieces;
  }
  void Report(const char* what, std::chrono::nanoseconds device_time, Clock::duration wall) const {
    const double us = std::chrono::duration<double, std::micro>(device_time).count();
    std::printf("  %-28s device phase %8.1f us, %6.0f GB/s, %5.2f of the plain copy; end to end %8.1f us\n",
                what, us, kPrefixBytes / us / 1000, plain_us_ / us,
                std::chrono::duration<double, std::micro>(wall).count());
  }

  Device& device_;
  std::unique_ptr<PageStore> store_;
  NamespaceId name_space_{};
  std::unique_ptr<Memory> memory_;
  std::shared_ptr<const BoundCache> cache_;
  std::vector<std::int64_t> blocks_;
  double plain_us_ = 0;
};

// Everything stays on the device.
void CheckUpper(std::vector<std::unique_ptr<Device>>& devices, bool layer_major) {
  std::printf("%s cache, upper tier\n", layer_major ? "layer-major" : "block-major");
  GpuStore gpu(devices, 0, 8 * kPrefixBytes, layer_major);
  if (!gpu.good()) return;
  gpu.PlainCopy();
  for (std::uint64_t prefix = 1; prefix <= 4; ++prefix) {
    gpu.Fill(BytesOf(prefix));
    gpu.Publish(prefix, "publish");
  }
  for (std::uint64_t prefix = 1; prefix <= 4; ++prefix) {
    gpu.Fill(BytesOf(99));
    Expect(gpu.Load(prefix, "load") == kPrefixBlocks, "the hit is not whole");
    Expect(gpu.Holds(BytesOf(prefix)), "a load brought other bytes");
  }
  Expect(gpu.store().Check().empty(), "Check finds something");
}

// Two prefixes fit on the device, the others go down and come up again.
void CheckTiers(std::vector<std::unique_ptr<Device>>& devices) {
  std::printf("upper tier and host tier\n");
  GpuStore gpu(devices, 4 * kPrefixBytes, 2 * kPrefixBytes, true);
  if (!gpu.good()) return;
  gpu.PlainCopy();
  for (std::uint64_t prefix = 1; prefix <= 4; ++prefix) {
    gpu.Fill(BytesOf(prefix));
    gpu.Publish(prefix, prefix <= 2 ? "publish" : "publish behind copies down");
  }
  for (const std::uint64_t prefix : {1, 2, 3, 4, 1}) {
    gpu.Fill(BytesOf(99));
    Expect(gpu.Load(prefix, "load from the host tier") == kPrefixBlocks, "the hit is not whole");
    Expect(gpu.Holds(BytesOf(prefix)), "a load brought other bytes");
  }
  gpu.store().Quiesce();
  for (const std::string& problem : gpu.store().Check()) Expect(false, problem);
  Expect(gpu.store().stats().bad_pages == 0, "checksums differ");
}

int Main() {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeHostDevice(HostKernels(), std::int64_t{8} << 30));
  for (auto& device : MakeCudaDevices(0)) devices.push_back(std::move(device));
  if (devices.size() < 2) {
    std::printf("no CUDA device\n");
    return 1;
  }
  devices.resize(2);
  for (const bool layer_major : {false, true}) CheckUpper(devices, layer_major);
  CheckTiers(devices);
  std::printf("%s\n", failures == 0 ? "all bytes as published" : "FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvsummary

int main() { return kvsummary::Main(); }
