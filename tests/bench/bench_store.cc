// Lookups of the page store, as PageStore::Lookup does them inside the daemon: 2,048 hashes of 32 bytes that
// are all there, of random prefixes, beside the same lookups in a plain absl::flat_hash_map.
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

void Bench(std::int64_t pages) {
  const std::int64_t prefixes = (pages + kBlocks - 1) / kBlocks;
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeHostDevice(HostKernels(), std::int64_t{1} << 40));
  auto store = PageStore::Create(devices, {.host_bytes = prefixes * kBlocks * kPageUnit});
  if (!store.ok()) Die(store.status());
  NamespaceSpec spec;
  spec.key.model = "bench";
  spec.key.layers = 1;
  spec.key.block_size = 8;
  spec.hash_width = kWidth;
  spec.groups = {{.bytes_per_block = kPageUnit}};
  const auto ns = (*store)->Declare(kSession, spec);
  if (!ns.ok()) Die(ns.status());
  std::vector<std::uint8_t> memory(static_cast<std::size_t>((kBlocks + 1) * kPageUnit));
  BoundCache bound;
  bound.device = devices[0].get();
  bound.blocks = kBlocks + 1;
  bound.block_size = 8;
  bound.groups = {{memory.data(), {{0, kPageUnit, kPageUnit}}}};
  const auto cache = (*store)->Bind(kSession, *ns, bound);
  if (!cache.ok()) Die(cache.status());

  std::mt19937_64 random(1);
  std::vector<std::string> hashes(static_cast<std::size_t>(prefixes));
  absl::flat_hash_map<absl::string_view, std::uint32_t> map;
  map.reserve(static_cast<std::size_t>(prefixes * kBlocks));
  std::vector<double> publish_us;
  for (std::string& prefix : hashes) {
    prefix.resize(kBlocks * kWidth);
    for (std::size_t i = 0; i < prefix.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(&prefix[i], &word, 8);
    }
    for (std::size_t i = 0; i < kBlocks; ++i) {
      map.emplace(absl::string_view(prefix.data() + i * kWidth, kWidth),
                  static_cast<std::uint32_t>(map.size()));
    }
    PublishArgs args;
    args.session = kSession;
    args.name_space = *ns;
    args.cache = *cache;
    args.committed_tokens = kBlocks * 8;
    args.hashes = prefix;
    args.groups.resize(1);
    for (std::int64_t i = 0; i < kBlocks; ++i) args.groups[0].block_ids.push_back(i + 1);
    std::promise<absl::StatusOr<PublishResult>> done;
    const auto start = Clock::now();
    (*store)->Publish(std::move(args), [&](auto result) { done.set_value(std::move(result)); });
    const auto published = done.get_future().get();
    publish_us.push_back(Microseconds(Clock::now() - start));
    if (!published.ok() || published->stored != kBlocks) Die(published.status());
  }

  std::vector<double> lookup_us;
  std::vector<double> release_us;
  std::vector<double> map_us;
  std::uint64_t found = 0;
  for (int round = 0; round < kRounds; ++round) {
    LookupArgs args{.session = kSession, .name_space = *ns, .hashes = hashes[random() % hashes.size()]};
    auto start = Clock::now();
    const auto hit = (*store)->Lookup(args);
    lookup_us.push_back(Microseconds(Clock::now() - start));
    if (!hit.ok() || hit->blocks != kBlocks) Die(hit.status());
    start = Clock::now();
    (*store)->Release(kSession, hit->lease);
    release_us.push_back(Microseconds(Clock::now() - start));
    const std::string& other = hashes[random() % hashes.size()];
    start = Clock::now();
    for (std::size_t i = 0; i < kBlocks; ++i) {
      found += map.find(absl::string_view(other.data() + i * kWidth, kWidth))->second;
    }
    map_us.push_back(Microseconds(Clock::now() - start));
  }
  const auto start = Clock::now();
  const std::vector<std::string> problems = (*store)->Check();
  const double check_us = Microseconds(Clock::now() - start);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  const double lookup = Median(lookup_us);
  const double plain = Median(map_us);
  std::printf(
      "%9lld pages: lookup %6.1f us (least %.1f), release %.1f us, plain map %.1f us (least %.1f), "
      "ratio %.2f; publish %.0f us; check %.0f ms (%llu)\n",
      static_cast<long long>(prefixes * kBlocks), lookup, Least(lookup_us), Median(release_us), plain,
      Least(map_us), lookup / plain, Median(publish_us), check_us / 1000,
      static_cast<unsigned long long>(found % 10));
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  std::printf("median of %d lookups of %lld hashes\n", kvsummary::kRounds,
              static_cast<long long>(kvsummary::kBlocks));
  if (argc < 2) {
    kvsummary::Bench(100'000);
    kvsummary::Bench(1'000'000);
  }
  for (int i = 1; i < argc; ++i) kvsummary::Bench(std::strtoll(argv[i], nullptr, 10));
}
