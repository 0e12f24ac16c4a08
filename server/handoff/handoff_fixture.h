// Two caches on host memory whose bytes tell what they are of, and a hand-off from one to the other.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/update.h"
#include "server/cache/cache.h"
#include "server/error.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/handoff_patterns.h"
#include "server/handoff/local_pull.h"
#include "server/handoff/offers.h"

namespace kvsummary {

class HandoffTest : public ::testing::Test {
 protected:
  using Clock = Offers::Clock;

  using Request = PlacedRequest;

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

  absl::StatusOr<Offers::Opened> Open(Offers::OpenArgs args) {
    std::promise<absl::StatusOr<Offers::Opened>> opened;
    offers_->Open(std::move(args), [&](auto result) { opened.set_value(std::move(result)); });
    return opened.get_future().get();
  }
  absl::StatusOr<std::int64_t> Append(std::uint64_t session, std::uint64_t number, Addition part) {
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
                 .tail = Addition::Tail{.ring_block = request.ring_block}};
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
