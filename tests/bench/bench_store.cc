// Lookups of the page store, as PageStore::Lookup does them inside the daemon: 2,048 hashes of 32 bytes that
// are all there, of random prefixes, beside the same lookups in a plain absl::flat_hash_map: of prefixes that
// were published whole, and of such that came 16 blocks at a time in turns. Then loads from the host tier,
// 2,048 pages of 47,104 bytes: how long one takes, checksums and copy.
//
//   bazel run //tests/bench:bench_store [-- PAGES...]     (default 100000 and 1000000)
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "kernels/update.h"
#include "server/device/device.h"
#include "server/store/page_store.h"

namespace kvsummary {
namespace {

constexpr std::size_t kWidth = 32;
constexpr std::int64_t kBlocks = 2048;  // of a prefix
constexpr int kRounds = 400;
constexpr std::uint64_t kSession = 1;

using Hash = std::array<char, kWidth>;
using Clock = std::chrono::steady_clock;

double Microseconds(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

double Least(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

void Die(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// A store with one namespace, and an engine's cache of kBlocks blocks.
struct Bench {
  Bench(std::int64_t page_bytes, std::int64_t pages) {
    devices.push_back(MakeHostDevice(HostKernels(), std::int64_t{1} << 40));
    const std::int64_t slot_bytes = (page_bytes + kPageUnit - 1) / kPageUnit * kPageUnit;
    auto made = PageStore::Create(devices, {.host_bytes = pages * slot_bytes});
    if (!made.ok()) Die(made.status());
    store = *std::move(made);
    NamespaceSpec spec;
    spec.key.model = "bench";
    spec.key.layers = 1;
    spec.key.block_size = 8;
    spec.hash_width = kWidth;
    spec.groups = {{.bytes_per_block = page_bytes}};
    const auto declared = store->Declare(kSession, spec);
    if (!declared.ok()) Die(declared.status());
    name_space = *declared;
    memory.resize(static_cast<std::size_t>((kBlocks + 1) * page_bytes), 1);
    BoundCache bound;
    bound.device = devices[0].get();
    bound.blocks = kBlocks + 1;
    bound.block_size = 8;
    bound.groups = {{memory.data(), {{0, page_bytes, page_bytes}}}};
    const auto made_cache = store->Bind(kSession, name_space, bound);
    if (!made_cache.ok()) Die(made_cache.status());
    cache = *made_cache;
  }

  // Blocks [first, first + count) of a prefix; answers how long it took.
  double Publish(const std::string& prefix, std::int64_t first, std::int64_t count) {
    const auto at = [](std::int64_t block) { return static_cast<std::size_t>(block) * kWidth; };
    PublishArgs args;
    args.session = kSession;
    args.name_space = name_space;
    args.cache = cache;
    args.committed_tokens = (first + count) * 8;
    args.first_block_index = first;
    if (first > 0) args.parent_hash = prefix.substr(at(first - 1), kWidth);
    args.hashes = prefix.substr(at(first), at(count));
    args.groups.resize(1);
    for (std::int64_t i = 0; i < count; ++i) args.groups[0].block_ids.push_back(i + 1);
    std::promise<absl::StatusOr<PublishResult>> done;
    const auto start = Clock::now();
    store->Publish(std::move(args), [&](auto result) { done.set_value(std::move(result)); });
    const auto published = done.get_future().get();
    const double us = Microseconds(Clock::now() - start);
    if (!published.ok() || published->stored != count) Die(published.status());
    return us;
  }
  Hit Find(const std::string& prefix) {
    const auto hit = store->Lookup({.session = kSession, .name_space = name_space, .hashes = prefix});
    if (!hit.ok() || hit->blocks != kBlocks) Die(hit.status());
    return *hit;
  }

  std::vector<std::unique_ptr<Device>> devices;
  std::unique_ptr<PageStore> store;
  NamespaceId name_space{};
  std::vector<std::uint8_t> memory;
  std::shared_ptr<const BoundCache> cache;
};

std::string RandomPrefix(std::mt19937_64& random) {
  std::string prefix(kBlocks * kWidth, '\0');
  for (std::size_t i = 0; i < prefix.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(&prefix[i], &word, 8);
  }
  return prefix;
}

// `part`: blocks that a prefix grows by at a time, all prefixes in turn.
void BenchLookups(std::int64_t pages, std::int64_t part) {
  const std::int64_t prefixes = (pages + kBlocks - 1) / kBlocks;
  Bench bench(kPageUnit, prefixes * kBlocks);
  std::mt19937_64 random(1);
  std::vector<std::string> hashes;
  for (std::int64_t p = 0; p < prefixes; ++p) hashes.push_back(RandomPrefix(random));
  absl::flat_hash_map<absl::string_view, std::uint32_t> map;
  map.reserve(static_cast<std::size_t>(prefixes * kBlocks));
  for (const std::string& prefix : hashes) {
    for (std::size_t at = 0; at < prefix.size(); at += kWidth) {
      map.emplace(absl::string_view(prefix.data() + at, kWidth), static_cast<std::uint32_t>(map.size()));
    }
  }
  std::vector<double> publish_us;
  for (std::int64_t first = 0; first < kBlocks; first += part) {
    for (const std::string& prefix : hashes) publish_us.push_back(bench.Publish(prefix, first, part));
  }

  std::vector<double> lookup_us;
  std::vector<double> release_us;
  std::vector<double> map_us;
  std::uint64_t found = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& prefix = hashes[random() % hashes.size()];
    auto start = Clock::now();
    const Hit hit = bench.Find(prefix);
    lookup_us.push_back(Microseconds(Clock::now() - start));
    start = Clock::now();
    bench.store->Release(kSession, hit.lease);
    release_us.push_back(Microseconds(Clock::now() - start));
    const std::string& other = hashes[random() % hashes.size()];
    start = Clock::now();
    for (std::size_t i = 0; i < kBlocks; ++i) {
      found += map.find(absl::string_view(other.data() + i * kWidth, kWidth))->second;
    }
    map_us.push_back(Microseconds(Clock::now() - start));
  }
  const auto start = Clock::now();
  const std::vector<std::string> problems = bench.store->Check();
  const double check_us = Microseconds(Clock::now() - start);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  const double lookup = Median(lookup_us);
  const double plain = Median(map_us);
  std::printf(
      "%9lld pages, %4lld at a time: lookup %6.1f us (least %.1f), release %.1f us, plain map %.1f us (least "
      "%.1f), ratio %.2f; publish %.0f us; check %.0f ms (%llu)\n",
      static_cast<long long>(prefixes * kBlocks), static_cast<long long>(part), lookup, Least(lookup_us),
      Median(release_us), plain, Least(map_us), lookup / plain, Median(publish_us), check_us / 1000,
      static_cast<unsigned long long>(found % 10));
}

void BenchLoads() {
  constexpr std::int64_t kPageBytes = 47'104;  // 23 layers of block size 64
  constexpr int kLoads = 21;
  Bench bench(kPageBytes, kBlocks);
  std::mt19937_64 random(1);
  const std::string prefix = RandomPrefix(random);
  const double publish_us = bench.Publish(prefix, 0, kBlocks);
  const Hit hit = bench.Find(prefix);
  LoadArgs args;
  args.session = kSession;
  args.lease = hit.lease;
  args.cache = bench.cache;
  args.groups.resize(1);
  for (std::int64_t i = 0; i < kBlocks; ++i) args.groups[0].block_ids.push_back(i + 1);
  std::vector<double> load_us;
  std::vector<double> copy_us;
  for (int i = 0; i < kLoads; ++i) {
    std::promise<absl::StatusOr<LoadResult>> done;
    const auto start = Clock::now();
    bench.store->Load(args, [&](auto result) { done.set_value(std::move(result)); });
    const auto loaded = done.get_future().get();
    load_us.push_back(Microseconds(Clock::now() - start));
    if (!loaded.ok() || loaded->pages != kBlocks) Die(loaded.status());
    copy_us.push_back(Microseconds(loaded->device_time));
  }
  std::printf(
      "load of %lld MB from the host tier: %.1f ms (least %.1f), %.1f of them the copy (least %.1f); "
      "publish %.1f ms\n",
      static_cast<long long>(kBlocks * kPageBytes / 1'000'000), Median(load_us) / 1000, Least(load_us) / 1000,
      Median(copy_us) / 1000, Least(copy_us) / 1000, publish_us / 1000);
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  std::printf("median of %d lookups of %lld hashes\n", kvsummary::kRounds,
              static_cast<long long>(kvsummary::kBlocks));
  std::vector<std::int64_t> sizes = {100'000, 1'000'000};
  if (argc > 1) sizes.clear();
  for (int i = 1; i < argc; ++i) sizes.push_back(std::strtoll(argv[i], nullptr, 10));
  for (const std::int64_t pages : sizes) {
    for (const std::int64_t part : {kvsummary::kBlocks, std::int64_t{16}})
      kvsummary::BenchLookups(pages, part);
  }
  kvsummary::BenchLoads();
}
