// Hand-offs on GPUs: the bytes are right between caches of other shapes, on one device and over two, and how
// fast 131,072 tokens of 23 layers are handed over. Needs a CUDA device; ends with status 1 when anything is
// wrong.
//
// Prints the device phases (the movements themselves, between two events) beside a plain copy of the same
// bytes, on the device or between the two, and the time from the call to its answer.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/update.h"
#include "server/cache/cache.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/local_pull.h"
#include "server/handoff/offers.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLongTokens = 131'072;
constexpr std::int64_t kShortTokens = 512;

int failures = 0;

void Expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

double Us(std::chrono::nanoseconds time) { return std::chrono::duration<double, std::micro>(time).count(); }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

CacheGeometry GeometryFor(std::int64_t tokens, int block_size, int capacity, std::int64_t padding) {
  CacheGeometry g{.layers = 23,
                  .blocks = tokens / block_size + 2,
                  .block_size = block_size,
                  .ring_blocks = 3,
                  .capacity = capacity,
                  .rows_per_layer = capacity,
                  .k = 3};
  g.block_stride = g.dense_block_stride() + padding;
  return g;
}

class Handoffs {
 public:
  Handoffs() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), std::int64_t{8} << 30));
    for (auto& device : MakeCudaDevices(0)) devices.push_back(std::move(device));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1);
    offers_ = std::make_unique<Offers>(caches_->devices(), Offers::Options{});
    bounces_ = std::make_unique<Bounces>(caches_->devices());
  }

  std::size_t gpus() const { return caches_->devices().size() - 1; }

  std::shared_ptr<Cache> MakeCache(const std::string& device, const CacheGeometry& geometry) {
    std::promise<CacheManager::CacheOr> made;
    caches_->Create(
        {.name = "cache-" + std::to_string(++made_), .device = device, .geometry = geometry},
        [] { return false; }, [&](CacheManager::CacheOr cache) { made.set_value(std::move(cache)); });
    auto cache = made.get_future().get();
    Expect(cache.ok(), cache.status().ToString());
    return cache.value_or(nullptr);
  }
  void Delete(const std::shared_ptr<Cache>& cache) {
    caches_->Delete(cache->name(), cache->generation(), [](const absl::Status&) {});
  }

  void Fill(Cache& cache, const std::string& bytes) {
    const Piece all{0, cache.geometry().total_bytes()};
    OnExecutor(cache, [&] { Expect(cache.CopyIn({&all, 1}, bytes.data()).ok(), "CopyIn"); });
  }
  std::string Read(Cache& cache) {
    const Piece all{0, cache.geometry().total_bytes()};
    std::string bytes(static_cast<std::size_t>(all.bytes), '\0');
    OnExecutor(cache, [&] { Expect(cache.CopyOut({&all, 1}, bytes.data()).ok(), "CopyOut"); });
    return bytes;
  }

  struct Times {
    double offer_us = 0, offer_device_us = 0, accept_us = 0, accept_device_us = 0;
    std::int64_t bytes = 0;
  };
  Times HandOver(const std::shared_ptr<Cache>& from, const std::vector<std::int64_t>& from_blocks,
                 const std::shared_ptr<Cache>& to, const std::vector<std::int64_t>& to_blocks, std::int64_t n,
                 std::int64_t resume) {
    Times times;
    Offers::OpenArgs args;
    args.cache = from;
    args.part = {.layers = {0, from->geometry().layers},
                 .committed_tokens = n,
                 .blocks = from_blocks,
                 .tail = Addition::Tail{.ring_block = 1}};
    std::promise<absl::StatusOr<Offers::Opened>> opened;
    auto start = Clock::now();
    offers_->Open(std::move(args), [&](auto result) { opened.set_value(std::move(result)); });
    const auto offer = opened.get_future().get();
    times.offer_us = Us(Clock::now() - start);
    Expect(offer.ok(), offer.status().ToString());
    if (!offer.ok()) return times;
    times.offer_device_us = Us(offer->device_time);
    std::promise<absl::StatusOr<Accepted>> accepted;
    start = Clock::now();
    const auto bound = offers_->Bind(offer->secret, "consumer");
    const auto acceptance = std::make_shared<Acceptance>(
        AcceptTarget{.cache = to, .blocks = to_blocks, .ring_block = 2, .resume = resume}, *bounces_,
        [&](auto result) { accepted.set_value(std::move(result)); });
    auto pull = LocalPull::Start(*bound, acceptance);
    const auto result = accepted.get_future().get();
    times.accept_us = Us(Clock::now() - start);
    pull = nullptr;
    Expect(result.ok(), result.status().ToString());
    Expect(offers_->Acknowledge(offer->secret, "consumer").ok(), "Acknowledge");
    if (!result.ok()) return times;
    times.accept_device_us = Us(result->device_time);
    times.bytes = result->bytes;
    return times;
  }

 private:
  template <typename Work>
  static void OnExecutor(Cache& cache, Work work) {
    std::promise<void> done;
    cache.device().executor().SubmitFree([&] {
      work();
      done.set_value();
    });
    done.get_future().wait();
  }

  int made_ = 0;
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Bounces> bounces_;
  std::unique_ptr<Offers> offers_;
};

std::string RandomBytes(std::int64_t count) {
  std::string bytes(static_cast<std::size_t>(count), '\0');
  std::uint64_t word = 0x9e3779b97f4a7c15u;
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(&bytes[i], &word, 8);
  }
  return bytes;
}

std::vector<std::int64_t> BlocksOf(const CacheGeometry& g, std::int64_t tokens) {
  std::vector<std::int64_t> blocks(static_cast<std::size_t>((tokens + g.block_size - 1) / g.block_size));
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = g.blocks - 1 - static_cast<std::int64_t>(i);
  return blocks;
}

// What the target must hold, by the layout's own arithmetic.
void Expected(const CacheGeometry& from, const std::string& source,
              const std::vector<std::int64_t>& from_blocks, const CacheGeometry& to,
              const std::vector<std::int64_t>& to_blocks, std::int64_t resume, std::string& target) {
  const auto move = [&](std::int64_t source_offset, std::int64_t target_offset, std::int64_t bytes) {
    std::memcpy(&target[static_cast<std::size_t>(target_offset)],
                &source[static_cast<std::size_t>(source_offset)], static_cast<std::size_t>(bytes));
  };
  const auto summary = [](const CacheGeometry& g, const std::vector<std::int64_t>& blocks, std::int64_t layer,
                          std::int64_t region) {
    const std::int64_t token = region * kRegionTokens;
    return g.page_offset(blocks[static_cast<std::size_t>(token / g.block_size)], layer) +
           token % g.block_size / kRegionTokens * kSummaryBytes;
  };
  for (std::int64_t layer = 0; layer < from.layers; ++layer) {
    for (std::int64_t region = 0; region < resume / kRegionTokens; ++region) {
      move(summary(from, from_blocks, layer, region), summary(to, to_blocks, layer, region), kSummaryBytes);
    }
    for (std::int64_t p = resume / kRegionTokens * kRegionTokens; p < resume; ++p) {
      move(from.ring_row_offset(1, layer, p % from.capacity), to.ring_row_offset(2, layer, p % to.capacity),
           kRowBytes);
    }
  }
}

void CheckBytes(Handoffs& handoffs, const std::string& from_device, const std::string& to_device) {
  std::printf("bytes from %s to %s\n", from_device.c_str(), to_device.c_str());
  for (const int from_block : {16, 64}) {
    for (const int to_block : {8, 64, 384}) {
      const CacheGeometry from_geometry = GeometryFor(2304, from_block, 12, 256);
      const CacheGeometry to_geometry = GeometryFor(2304, to_block, 10, 1024);
      const auto from = handoffs.MakeCache(from_device, from_geometry);
      const auto to = handoffs.MakeCache(to_device, to_geometry);
      if (from == nullptr || to == nullptr) return;
      const std::string source = RandomBytes(from_geometry.total_bytes());
      const std::string before(static_cast<std::size_t>(to_geometry.total_bytes()), '\x5a');
      handoffs.Fill(*from, source);
      for (const std::int64_t n : {1, 8, 15, 200, 1000, 2303}) {
        for (const std::int64_t resume : {n, n - 1}) {
          handoffs.Fill(*to, before);
          const auto from_blocks = BlocksOf(from_geometry, n);
          const auto to_blocks = BlocksOf(to_geometry, n);
          handoffs.HandOver(from, from_blocks, to, to_blocks, n, resume);
          std::string expected = before;
          Expected(from_geometry, source, from_blocks, to_geometry, to_blocks, resume, expected);
          Expect(handoffs.Read(*to) == expected, "blocks of " + std::to_string(from_block) + " to " +
                                                     std::to_string(to_block) + ", " + std::to_string(n) +
                                                     " tokens resumed at " + std::to_string(resume));
        }
      }
      handoffs.Delete(from);
      handoffs.Delete(to);
    }
  }
}

// Best of some plain copies of so many bytes, in microseconds.
double PlainCopyUs(int from, int to, std::int64_t bytes) {
  void* source = nullptr;
  void* target = nullptr;
  cudaSetDevice(from);
  bool good = cudaMalloc(&source, static_cast<std::size_t>(bytes)) == cudaSuccess;
  cudaSetDevice(to);
  good = good && cudaMalloc(&target, static_cast<std::size_t>(bytes)) == cudaSuccess;
  if (from != to && cudaDeviceEnablePeerAccess(from, 0) != cudaSuccess) cudaGetLastError();
  Expect(good, "no memory for a plain copy");
  cudaEvent_t events[2];
  cudaEventCreate(&events[0]);
  cudaEventCreate(&events[1]);
  float best = 1e9F;
  for (int i = 0; i < 10; ++i) {
    float ms = 0;
    cudaEventRecord(events[0]);
    cudaMemcpyAsync(target, source, static_cast<std::size_t>(bytes), cudaMemcpyDefault);
    cudaEventRecord(events[1]);
    cudaEventSynchronize(events[1]);
    cudaEventElapsedTime(&ms, events[0], events[1]);
    best = std::min(best, ms);
  }
  cudaEventDestroy(events[0]);
  cudaEventDestroy(events[1]);
  cudaFree(target);
  cudaSetDevice(from);
  cudaFree(source);
  return best * 1000;
}

void Measure(Handoffs& handoffs, int from_gpu, int to_gpu) {
  const std::string from_device = "cuda:" + std::to_string(from_gpu);
  const std::string to_device = "cuda:" + std::to_string(to_gpu);
  std::printf("%s to %s\n", from_device.c_str(), to_device.c_str());
  const CacheGeometry g = GeometryFor(kLongTokens + 64, 64, 12, 0);
  const auto from = handoffs.MakeCache(from_device, g);
  const auto to = handoffs.MakeCache(to_device, g);
  if (from == nullptr || to == nullptr) return;
  for (const std::int64_t tokens : {kLongTokens + 5, kShortTokens + 5}) {
    const auto blocks = BlocksOf(g, tokens);
    std::vector<double> offer, offer_device, accept, accept_device, both;
    std::int64_t bytes = 0;
    for (int i = 0; i < 21; ++i) {
      const auto times = handoffs.HandOver(from, blocks, to, blocks, tokens, tokens);
      if (i == 0) continue;  // takes the staging memory
      offer.push_back(times.offer_us);
      offer_device.push_back(times.offer_device_us);
      accept.push_back(times.accept_us);
      accept_device.push_back(times.accept_device_us);
      both.push_back(times.offer_us + times.accept_us);
      bytes = times.bytes;
    }
    const double local = PlainCopyUs(from_gpu, from_gpu, bytes);
    const double across = PlainCopyUs(from_gpu, to_gpu, bytes);
    const auto report = [&](const char* what, double device_us, double plain_us, double wall_us) {
      std::printf(
          "  %6lld tokens, %-6s device phase %8.1f us, %6.0f GB/s, %5.2f of the plain copy (%.1f us); end to "
          "end %8.1f us\n",
          static_cast<long long>(tokens), what, device_us, static_cast<double>(bytes) / device_us / 1000,
          plain_us / device_us, plain_us, wall_us);
    };
    report("offer", Median(offer_device), local, Median(offer));
    report("accept", Median(accept_device), across, Median(accept));
    std::printf("  %6lld tokens, end to end: %.1f us\n", static_cast<long long>(tokens), Median(both));
  }
  handoffs.Delete(from);
  handoffs.Delete(to);
}

int Main() {
  Handoffs handoffs;
  if (handoffs.gpus() == 0) {
    std::printf("no CUDA device\n");
    return 1;
  }
  CheckBytes(handoffs, "cuda:0", "cuda:0");
  CheckBytes(handoffs, "cuda:0", "host");
  CheckBytes(handoffs, "host", "cuda:0");
  Measure(handoffs, 0, 0);
  if (handoffs.gpus() > 1) {
    CheckBytes(handoffs, "cuda:0", "cuda:1");
    Measure(handoffs, 0, 1);
  }
  std::printf("%s\n", failures == 0 ? "all bytes as they were offered" : "FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvsummary

int main() { return kvsummary::Main(); }
