#include "server/store/page_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::BytesOf;
using testing::Engine;
using testing::FakeDevice;
using testing::Gate;
using testing::HashesOf;
using testing::HashOf;
using ::testing::IsEmpty;
using testing::SimpleSpec;
using Publish = absl::StatusOr<PublishResult>;
using Loaded = absl::StatusOr<LoadResult>;

constexpr std::uint64_t kSession = 7;

class PageStoreTest : public ::testing::Test {
 protected:
  // A store over a host and `gpus` other devices.
  void Make(PageStore::Options options, int gpus = 0) {
    devices_.push_back(std::make_unique<FakeDevice>("host"));
    for (int i = 0; i < gpus; ++i)
      devices_.push_back(std::make_unique<FakeDevice>("cuda:" + std::to_string(i)));
    options.now = [this] { return now_; };
    auto store = PageStore::Create(devices_, options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  FakeDevice& device(std::size_t i) { return static_cast<FakeDevice&>(*devices_[i]); }

  void TearDown() override {
    if (store_ == nullptr) return;
    store_->Quiesce();
    EXPECT_THAT(store_->Check(), IsEmpty());
    for (const TierUsage& tier : store_->stats().tiers) {
      EXPECT_EQ(tier.pinned_bytes + tier.unpinned_bytes + tier.free_bytes, tier.capacity_bytes) << tier.name;
    }
  }

  NamespaceId Declare(const NamespaceSpec& spec, std::uint64_t session = kSession) {
    auto id = store_->Declare(session, spec);
    EXPECT_TRUE(id.ok()) << id.status();
    return id.value_or(NamespaceId{});
  }
  std::shared_ptr<const BoundCache> Bind(NamespaceId ns, const Engine& engine,
                                         std::uint64_t session = kSession) {
    auto bound = store_->Bind(session, ns, engine.bound());
    EXPECT_TRUE(bound.ok()) << bound.status();
    return bound.value_or(nullptr);
  }

  // Writes the pages of a prefix's blocks into the engine's blocks 1, 2, ... and publishes them.
  PublishArgs Args(NamespaceId ns, Engine& engine, const std::shared_ptr<const BoundCache>& cache,
                   std::uint64_t prefix, std::int64_t first, std::int64_t count,
                   std::uint64_t session = kSession) {
    PublishArgs args;
    args.session = session;
    args.name_space = ns;
    args.cache = cache;
    args.first_block_index = first;
    args.committed_tokens = (first + count) * cache->block_size;
    args.parent_hash = first > 0 ? HashOf(prefix, static_cast<std::uint64_t>(first) - 1) : "";
    args.hashes = HashesOf(prefix, first, count);
    GroupBlocks& list = args.groups.emplace_back();
    for (std::int64_t i = 0; i < count; ++i) {
      engine.Write(0, i + 1, BytesOf(HashOf(prefix, static_cast<std::uint64_t>(first + i)), 0, 512));
      list.block_ids.push_back(i + 1);
    }
    return args;
  }
  std::future<Publish> Start(PublishArgs args) {
    auto result = std::make_shared<std::promise<Publish>>();
    store_->Publish(std::move(args), [result](Publish r) { result->set_value(std::move(r)); });
    return result->get_future();
  }
  std::future<Loaded> Start(LoadArgs args) {
    auto result = std::make_shared<std::promise<Loaded>>();
    store_->Load(std::move(args), [result](Loaded r) { result->set_value(std::move(r)); });
    return result->get_future();
  }
  absl::StatusOr<Hit> Find(NamespaceId ns, std::uint64_t prefix, std::int64_t count,
                           std::uint64_t session = kSession) {
    return store_->Lookup({.session = session, .name_space = ns, .hashes = HashesOf(prefix, 0, count)});
  }
  // Loads blocks [0, blocks) of a hit into the engine's blocks 1, 2, ...
  static LoadArgs LoadOf(const Hit& hit, const std::shared_ptr<const BoundCache>& cache,
                         std::uint64_t session = kSession) {
    LoadArgs args;
    args.session = session;
    args.lease = hit.lease;
    args.cache = cache;
    LoadGroup& list = args.groups.emplace_back();
    for (std::int64_t i = 0; i < hit.blocks; ++i) list.block_ids.push_back(i + 1);
    return args;
  }
  // Looks a prefix up, loads what is there, compares the bytes and releases it; answers the blocks.
  std::int64_t FindAndLoad(NamespaceId ns, std::uint64_t prefix, std::int64_t count, Device& on) {
    auto hit = Find(ns, prefix, count);
    EXPECT_TRUE(hit.ok()) << hit.status();
    if (!hit.ok() || hit->blocks == 0) return 0;
    Engine engine(on, SimpleSpec(), count + 1);
    auto loaded = Start(LoadOf(*hit, Bind(ns, engine))).get();
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (loaded.ok()) {
      EXPECT_EQ(loaded->pages, hit->blocks);
      EXPECT_THAT(loaded->bad, ::testing::ElementsAre(IsEmpty()));
    }
    for (std::int64_t i = 0; i < hit->blocks; ++i) {
      EXPECT_EQ(engine.Read(0, i + 1), BytesOf(HashOf(prefix, static_cast<std::uint64_t>(i)), 0, 512));
    }
    store_->Release(kSession, hit->lease);
    return hit->blocks;
  }

  PageStore::Clock::time_point now_{};
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<PageStore> store_;
};

TEST_F(PageStoreTest, BytesInAreBytesOut) {
  Make({.host_bytes = 64 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 32, 3);
  const auto cache = Bind(ns, engine);
  const auto published = Start(Args(ns, engine, cache, 1, 0, 20)).get();
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->stored, 20);
  EXPECT_EQ(FindAndLoad(ns, 1, 24, device(0)), 20);
}

}  // namespace
}  // namespace kvsummary
