// Many engines at once, with tiers far too small for them: all that is loaded is right, and nothing is left
// over.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::HashesOf;
using testing::SimpleSpec;

constexpr int kPrefixes = 12;
constexpr std::int64_t kBlocks = 24;  // of a prefix
constexpr int kTurns = 400;           // of an engine

NamespaceSpec Spec() {
  NamespaceSpec spec = SimpleSpec(768);
  spec.groups.push_back({.kind = GroupKind::kWindow, .window_tokens = 200, .bytes_per_block = 1536});
  return spec;
}

class ChurnTest : public testing::StoreTest {
 protected:
  // One engine's life: sessions that end in the middle of things.
  void Live(std::size_t on, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::uint64_t session = 0;
    NamespaceId ns{};
    Cache cache;
    Engine engine(device(on), Spec(), kBlocks + 1, 2);
    const auto begin = [&] {
      session = ++sessions_;
      ns = Declare(Spec(), session);
      cache = Bind(ns, engine, session);
    };
    begin();
    for (int turn = 0; turn < kTurns; ++turn) {
      const std::uint64_t prefix = 1 + random() % kPrefixes;
      switch (random() % 8) {
        case 0:
        case 1:
        case 2: {
          const auto first = static_cast<std::int64_t>(random() % kBlocks);
          const auto count =
              1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(kBlocks - first));
          auto published =
              Start(ArgsOf(cache, engine, prefix, random() % 2 == 0 ? 0 : first, count, session));
          const bool dies = random() % 8 == 0;
          if (dies) store_->EndSession(session);
          const auto s = published.get().status();
          EXPECT_TRUE(s.ok() || absl::IsResourceExhausted(s) || (dies && RefusalReason(s) == "SESSION_ENDED"))
              << s;
          if (dies) begin();
          break;
        }
        case 7:
          store_->EndSession(session);
          begin();
          break;
        default: {
          const auto hit = store_->Lookup({.session = session,
                                           .name_space = ns,
                                           .hashes = HashesOf(prefix, 0, kBlocks),
                                           .device = cache->device,
                                           .lease = std::chrono::milliseconds(random() % 3 == 0 ? 1 : 5000)});
          ASSERT_TRUE(hit.ok()) << hit.status();
          if (hit->blocks == 0) break;
          hit_blocks_ += hit->blocks;
          auto load = Start(LoadOf(*hit, cache, session));
          if (random() % 3 == 0) store_->Release(session, hit->lease);
          const auto loaded = load.get();
          if (loaded.ok()) {
            ExpectGoodBlocks(*loaded, *hit, engine, prefix);
          } else {
            EXPECT_EQ(RefusalReason(loaded.status()), "LEASE_NOT_FOUND");  // it was short
          }
          if (random() % 3 == 0) {
            const auto renewed = store_->Renew(session, hit->lease, std::chrono::milliseconds(50));
            EXPECT_TRUE(renewed.ok() || absl::IsNotFound(renewed.status()));
          }
          if (random() % 4 != 0) store_->Release(session, hit->lease);
        }
      }
    }
    store_->EndSession(session);
  }

  void Churn(PageStore::Options options) {
    real_clock_ = true;
    Make(std::move(options), 2);
    std::vector<std::thread> engines;
    for (std::size_t i = 0; i < 4; ++i) {
      engines.emplace_back([this, i] { Live(i < 2 ? i + 1 : i - 2, i); });
    }
    for (std::thread& engine : engines) engine.join();
    store_->Quiesce();
    EXPECT_GT(hit_blocks_, 0);
    EXPECT_EQ(store_->stats().bad_pages, 0);
    EXPECT_EQ(store_->stats().leases, 0);
    for (const TierUsage& tier : store_->stats().tiers) EXPECT_EQ(tier.pinned_bytes, 0) << tier.name;
  }

  // A page on another device is bad when the host tier is full of pages that must stay; all others are there.
  static void ExpectGoodBlocks(const LoadResult& loaded, const Hit& hit, const Engine& engine,
                               std::uint64_t prefix) {
    for (std::size_t g = 0; g < hit.groups.size(); ++g) {
      const GroupHit& group = hit.groups[g];
      for (std::int64_t i = group.first_block_index; i < hit.blocks; ++i) {
        if (std::ranges::binary_search(loaded.bad[g], i - group.first_block_index)) continue;
        EXPECT_TRUE(engine.Read(group.group, i + 1) == PageOf(engine.spec(), prefix, i, group.group))
            << "block " << i << " of group " << group.group;
      }
    }
  }

  std::atomic<std::uint64_t> sessions_ = 100;
  std::atomic<std::int64_t> hit_blocks_ = 0;
};

TEST_F(ChurnTest, AllTiersWithLru) {
  Churn({.host_bytes = 90 * 1536, .device_bytes = 40 * 1536, .high_watermark = 0.9, .low_watermark = 0.8});
}
TEST_F(ChurnTest, AllTiersWithS3Fifo) {
  Churn({.host_bytes = 90 * 1536, .device_bytes = 40 * 1536, .policy = PageStore::Policy::kS3Fifo});
}
TEST_F(ChurnTest, AQuota) {
  Churn({.host_bytes = 200 * 1536, .device_bytes = 40 * 1536, .namespace_quota_bytes = 60 * 1536});
}
TEST_F(ChurnTest, TheHostTierAlone) { Churn({.host_bytes = 90 * 1536}); }

}  // namespace
}  // namespace kvsummary
