// Two caches on host memory whose bytes tell what they are of, and a hand-off from one to the other.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/update.h"
#include "server/cache/cache.h"
#include "server/error.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/local_pull.h"
#include "server/handoff/offers.h"

namespace kvsummary {

// Bytes that name what they are of: no two of them agree in more than a few places.
inline std::uint8_t PatternByte(std::uint64_t what, std::int64_t layer, std::int64_t index,
                                std::int64_t byte) {
  std::uint64_t x = what * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(layer) * 0xbf58476d1ce4e5b9u +
                    static_cast<std::uint64_t>(index) * 0x94d049bb133111ebu +
                    static_cast<std::uint64_t>(byte) * 0x2545f4914f6cdd1du;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return static_cast<std::uint8_t>(x >> 56);
}

inline constexpr std::uint64_t kSummaryPattern = 1;
inline constexpr std::uint64_t kRowPattern = 2;
inline constexpr std::uint8_t kUntouched = 0xee;

class HandoffTest : public ::testing::Test {
 protected:
  using Clock = Offers::Clock;

  // A request of a cache: ids of its blocks in their order, and its ring block.
  struct Request {
    std::vector<std::int64_t> blocks;
    std::int64_t ring_block = 0;
  };

  explicit HandoffTest(std::int64_t arena_bytes = 1 << 20) {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(ScalarKernels(), 1 << 26));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    MakeOffers(arena_bytes);
    bounces_ = std::make_unique<Bounces>(caches_->devices());
  }

  void MakeOffers(std::int64_t arena_bytes) {
    offers_ = std::make_unique<Offers>(
        caches_->devices(),
        Offers::Options{.bytes_per_device = arena_bytes, .now = [this] { return Clock::time_point(now_); }});
  }

  // block_stride of 0: dense; else so many bytes more. Untouched.
  std::shared_ptr<Cache> MakeCache(const std::string& name, CacheGeometry geometry) {
    geometry.block_stride += geometry.dense_block_stride();
    std::promise<CacheManager::CacheOr> made;
    caches_->Create(
        {.name = name, .device = "", .geometry = geometry}, [] { return false; },
        [&](CacheManager::CacheOr cache) { made.set_value(std::move(cache)); });
    auto cache = made.get_future().get();
    EXPECT_TRUE(cache.ok()) << cache.status();
    std::memset((*cache)->memory().data(), kUntouched, static_cast<std::size_t>((*cache)->memory().bytes()));
    return *cache;
  }

  // Fills in what a request of n tokens leaves in a cache when positions up to `highest` have been stored.
  static void Fill(Cache& cache, const Request& request, std::int64_t regions, std::int64_t highest) {
    auto* memory = static_cast<std::uint8_t*>(cache.memory().data());
    Put(cache.geometry(), request, 0, regions, memory);
    PutRows(cache.geometry(), request, 0, highest + 1, memory);
  }
  static void Put(const CacheGeometry& g, const Request& request, std::int64_t from, std::int64_t to,
                  std::uint8_t* memory) {
    for (std::int64_t layer = 0; layer < g.layers; ++layer) {
      for (std::int64_t region = from; region < to; ++region) {
        const std::int64_t per_block = g.block_size / kRegionTokens;
        const std::int64_t block = request.blocks[static_cast<std::size_t>(region / per_block)];
        for (std::int64_t b = 0; b < kSummaryBytes; ++b) {
          memory[g.page_offset(block, layer) + region % per_block * kSummaryBytes + b] =
              PatternByte(kSummaryPattern, layer, region, b);
        }
      }
    }
  }
  static void PutRows(const CacheGeometry& g, const Request& request, std::int64_t from, std::int64_t to,
                      std::uint8_t* memory) {
    for (std::int64_t layer = 0; layer < g.layers; ++layer) {
      for (std::int64_t p = from; p < to; ++p) {
        for (std::int64_t b = 0; b < kRowBytes; ++b) {
          memory[g.ring_row_offset(request.ring_block, layer, p % g.capacity) + b] =
              PatternByte(kRowPattern, layer, p, b);
        }
      }
    }
  }
  // What a cache that was untouched has once a request has been handed over to it.
  static std::string Expected(const Cache& cache, const Request& request, std::int64_t resume) {
    std::string bytes(static_cast<std::size_t>(cache.memory().bytes()), static_cast<char>(kUntouched));
    auto* memory = reinterpret_cast<std::uint8_t*>(bytes.data());
    const std::int64_t regions = resume / kRegionTokens;
    Put(cache.geometry(), request, 0, regions, memory);
    PutRows(cache.geometry(), request, regions * kRegionTokens, resume, memory);
    return bytes;
  }
  static std::string BytesOf(const Cache& cache) {
    return {static_cast<const char*>(cache.memory().data()),
            static_cast<std::size_t>(cache.memory().bytes())};
  }

  absl::StatusOr<Offers::Opened> Open(Offers::OpenArgs args) {
    std::promise<absl::StatusOr<Offers::Opened>> opened;
    offers_->Open(std::move(args), [&](auto result) { opened.set_value(std::move(result)); });
    return opened.get_future().get();
  }
  absl::StatusOr<std::int64_t> Append(std::uint64_t session, std::uint64_t number, Offers::PartArgs part) {
    std::promise<absl::StatusOr<std::int64_t>> appended;
    offers_->Append(session, number, std::move(part),
                    [&](auto result) { appended.set_value(std::move(result)); });
    return appended.get_future().get();
  }
  // Of a whole request of n tokens.
  static Offers::OpenArgs Whole(std::shared_ptr<Cache> cache, const Request& request, std::int64_t n) {
    Offers::OpenArgs args;
    args.session = 7;
    args.part = {.layers = {0, cache->geometry().layers},
                 .committed_tokens = n,
                 .blocks = request.blocks,
                 .tail = Offers::Tail{.ring_block = request.ring_block}};
    args.cache = std::move(cache);
    return args;
  }

  // Under way; ready when it is over.
  struct Accepting {
    std::shared_ptr<Acceptance> acceptance;
    std::shared_ptr<LocalPull> pull;
    std::future<absl::StatusOr<Accepted>> result;
  };
  Accepting Begin(const std::string& secret, AcceptTarget target, const std::string& transfer) {
    Accepting accepting;
    auto promise = std::make_shared<std::promise<absl::StatusOr<Accepted>>>();
    accepting.result = promise->get_future();
    auto offer = offers_->Bind(secret, transfer);
    if (auto s = offer.ok() ? Acceptance::Check(target) : offer.status(); !s.ok()) {
      promise->set_value(s);
      return accepting;
    }
    accepting.acceptance = std::make_shared<Acceptance>(
        std::move(target), *bounces_, [promise](auto result) { promise->set_value(std::move(result)); });
    accepting.pull = LocalPull::Start(*std::move(offer), accepting.acceptance);
    return accepting;
  }
  absl::StatusOr<Accepted> Accept(const std::string& secret, std::shared_ptr<Cache> cache,
                                  const Request& request, std::int64_t resume,
                                  const std::string& transfer = std::string(kTransfer)) {
    return Begin(secret,
                 {.cache = std::move(cache),
                  .blocks = request.blocks,
                  .ring_block = request.ring_block,
                  .resume = resume},
                 transfer)
        .result.get();
  }

  static constexpr char kTransfer[] = "0123456789abcdef";
  std::chrono::nanoseconds now_{0};
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Bounces> bounces_;
  std::unique_ptr<Offers> offers_;
};

// The name of a refusal and its field, or "OK".
template <typename T>
std::string ReasonOf(const absl::StatusOr<T>& result) {
  if (result.ok()) return "OK";
  const std::string field = RefusalField(result.status());
  return RefusalReason(result.status()) + (field.empty() ? "" : " " + field);
}

}  // namespace kvsummary
