// What is published is what is there.
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::Gate;
using testing::SimpleSpec;

using PageStoreTest = testing::StoreTest;

TEST_F(PageStoreTest, BytesInAreBytesOutForAllBlockSizes) {
  Make({.host_bytes = 8 << 20});
  for (const std::int32_t block_size : {8, 16, 32, 64, 128, 256, 384, 512}) {
    NamespaceSpec spec = SimpleSpec(block_size / 8 * 256 * 3);
    spec.key.block_size = block_size;
    const NamespaceId ns = Declare(spec);
    Engine engine(device(0), spec, 8, 3);
    const auto published = Run(ArgsOf(Bind(ns, engine), engine, 1, 0, 6));
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->stored, 6);
    EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 9), 6) << block_size;
  }
}

TEST_F(PageStoreTest, BytesInAreBytesOutForOddPageSizesAndHashWidths) {
  Make({.host_bytes = 8 << 20});
  for (const int width : {8, 9, 16, 20, 32, 33, 64}) {
    NamespaceSpec spec = SimpleSpec(1000 + width, width);
    spec.key.salt = std::to_string(width);
    const NamespaceId ns = Declare(spec);
    Store(ns, spec, device(0), 1, 70);
    EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 80), 70) << width;
  }
}

TEST_F(PageStoreTest, APageIsImmutableOnceVisible) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 1, 0, 4)).ok());
  // The blocks are recycled, and even published again under the same hashes.
  auto again = ArgsOf(cache, engine, 1, 0, 4);
  for (int b = 1; b <= 4; ++b) engine.Write(0, b, std::string(512, 'x'));
  const auto published = Run(std::move(again));
  ASSERT_TRUE(published.ok());
  EXPECT_EQ(published->present, 4);
  EXPECT_EQ(published->stored, 0);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, APageIsVisibleOnlyWhenItsBytesAreThere) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, engine), engine, 1, 0, 4));
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  EXPECT_EQ(store_->stats().pages, 0);
  EXPECT_EQ(store_->stats().tiers[0].pinned_bytes, 4 * 512);
  gate.Open();
  ASSERT_TRUE(published.get().ok());
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
}

TEST_F(PageStoreTest, APublishThatDiesHalfWayLeavesNothing) {
  Make({.host_bytes = 1 << 20});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.bytes_per_block = 1024});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 8);
  const auto cache = Bind(ns, engine);
  int left = 1;  // the second movement fails
  device(0).set_hook(
      [&](std::size_t) { return left-- > 0 ? absl::OkStatus() : absl::InternalError("lost"); });
  EXPECT_EQ(Run(ArgsOf(cache, engine, 1, 0, 4)).status().message(), "lost");
  device(0).Run([&] { device(0).set_hook(nullptr); });
  EXPECT_EQ(store_->stats().pages, 0);
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 1, 0, 4)).ok());
  EXPECT_EQ(FindAndLoad(ns, spec, device(0), 1, 4), 4);
}

// An engine's blocks are another engine's as soon as its session has ended, and its cache's generation with
// it.
TEST_F(PageStoreTest, AReaderNeverSeesAPageOfAnotherGeneration) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Declare(SimpleSpec(), 8);
  Engine engine(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, engine, 8), engine, 1, 0, 4, 8));
  store_->EndSession(8);
  for (int b = 1; b <= 4; ++b) engine.Write(0, b, std::string(512, 'x'));
  gate.Open();
  EXPECT_EQ(RefusalReason(published.get().status()), "SESSION_ENDED");
  EXPECT_EQ(Blocks(ns, 1, 4), 0);
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
}

TEST_F(PageStoreTest, WorkKeepsTheMemoryOfItsCache) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  auto engine = std::make_unique<Engine>(device(0), SimpleSpec(), 8);
  Gate gate(device(0));
  auto published = Start(ArgsOf(Bind(ns, *engine), *engine, 1, 0, 4));
  engine = nullptr;
  gate.Open();
  ASSERT_TRUE(published.get().ok());
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, OfTwoPublishesOfAPageOneIsKept) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  Gate gate(device(0));
  auto first = Start(ArgsOf(cache, engine, 1, 0, 4));
  auto second = Start(ArgsOf(cache, engine, 1, 0, 6));
  gate.Open();
  EXPECT_EQ(first.get()->stored, 4);
  const auto result = second.get();
  EXPECT_EQ(result->present, 4);
  EXPECT_EQ(result->stored, 2);
  EXPECT_EQ(store_->stats().pages, 6);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 8), 6);
}

TEST_F(PageStoreTest, APublishIsNotLostWithAnotherOfTheSamePagesThatFails) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  int calls = 0;
  device(0).set_hook(
      [&](std::size_t) { return calls++ > 0 ? absl::OkStatus() : absl::InternalError("lost"); });
  Gate gate(device(0));
  auto first = Start(ArgsOf(cache, engine, 1, 0, 4));
  auto second = Start(ArgsOf(cache, engine, 1, 0, 4));
  gate.Open();
  EXPECT_FALSE(first.get().ok());
  EXPECT_EQ(second.get()->stored, 4);
  EXPECT_EQ(FindAndLoad(ns, SimpleSpec(), device(0), 1, 4), 4);
}

TEST_F(PageStoreTest, RefusesPublishesThatCannotBe) {
  Make({.host_bytes = 1 << 20});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.push_back({.kind = GroupKind::kRing});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 16);
  const auto cache = Bind(ns, engine);
  const auto refusal = [&](auto change) {
    PublishArgs args = ArgsOf(cache, engine, 1, 2, 4);
    change(args);
    const auto s = Run(args).status();
    return RefusalReason(s) + " " + RefusalField(s);
  };
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 0; }),
            "NULL_BLOCK groups[0].block_ids[1]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 16; }),
            "BLOCK_OUT_OF_RANGE groups[0].block_ids[1]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids[1] = 4; }),
            "DUPLICATE_BLOCK groups[0].block_ids[3]");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].block_ids.pop_back(); }),
            "SIZE_MISMATCH groups[0].block_ids");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].group = 1; }), "RING_GROUP groups[0].group");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.groups[0].group = 2; }), "GROUP_OUT_OF_RANGE groups[0].group");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.committed_tokens = 6 * 64 - 1; }),
            "BLOCK_NOT_COMMITTED committed_tokens");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.hashes.pop_back(); }), "HASH_WIDTH_INVALID hashes");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.hashes.clear(); }), "COUNT_OUT_OF_RANGE hashes");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.parent_hash.clear(); }), "PARENT_HASH_INVALID parent_hash");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.first_block_index = 0; }), "PARENT_HASH_INVALID parent_hash");
  EXPECT_EQ(refusal([](PublishArgs& a) { a.first_block_index = -1; }),
            "COUNT_OUT_OF_RANGE first_block_index");
  EXPECT_EQ(store_->stats().tiers[0].free_bytes, 1 << 20);
}

TEST_F(PageStoreTest, RefusesMoreOperationsThanItsBounds) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 4);
  constexpr int kSessions = kMaxStoreOperations / kMaxStoreOperationsPerSession;
  const auto refusal = [&](std::uint64_t session) {
    const auto s = Run(ArgsOf(Bind(ns, engine, session), engine, 9999, 0, 1, session)).status();
    return RefusalReason(s) + " " + RefusalField(s);
  };
  std::vector<std::future<Published>> started;
  for (std::uint64_t session = 1; session <= kSessions + 1; ++session) {
    ASSERT_EQ(Declare(SimpleSpec(), session), ns);
  }
  {
    Gate gate(device(0));
    for (std::uint64_t session = 1; session <= kSessions; ++session) {
      const auto cache = Bind(ns, engine, session);
      for (int i = 0; i < kMaxStoreOperationsPerSession; ++i) {
        started.push_back(Start(ArgsOf(cache, engine, started.size() + 1, 0, 1, session)));
      }
      // The last one finds that the store has none left for anybody.
      EXPECT_EQ(refusal(session), session < kSessions ? "QUEUE_FULL session_id" : "QUEUE_FULL ");
    }
    EXPECT_EQ(refusal(kSessions + 1), "QUEUE_FULL ");
  }
  for (auto& publish : started) EXPECT_TRUE(publish.get().ok());
  store_->Quiesce();
  EXPECT_EQ(refusal(1), " ");
}

TEST_F(PageStoreTest, RefusesViewsThatDoNotMakeThePages) {
  Make({.host_bytes = 8 * 512, .device_bytes = 4 * 512}, 1);
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(1), SimpleSpec(), 8, 2);
  const auto refusal = [&](auto change) {
    BoundCache cache = engine.bound();
    change(cache);
    const auto s = store_->Bind(kSession, ns, std::move(cache)).status();
    return RefusalReason(s) + " " + RefusalField(s);
  };
  const auto first = [](BoundCache& c) -> PageView& { return c.groups[0].views[0]; };
  EXPECT_EQ(refusal([&](BoundCache& c) { first(c).bytes -= 16; }), "VIEW_MISMATCH groups[0].views");
  EXPECT_EQ(refusal([&](BoundCache& c) { first(c).bytes = -1; }), "VIEW_MISMATCH groups[0].views[0]");
  EXPECT_EQ(refusal([&](BoundCache& c) { first(c).bytes = kMaxIndex; }), "VIEW_MISMATCH groups[0].views[0]");
  EXPECT_EQ(refusal([&](BoundCache& c) { first(c).block_stride = 16; }), "VIEW_MISMATCH groups[0].views[0]");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.groups[0].views[1].offset = 64; }),
            "VIEW_MISMATCH groups[0].views[1]");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.groups[0].views.clear(); }), "VIEW_MISMATCH groups[0].views");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.groups[0].views.resize(600); }), "VIEW_MISMATCH groups[0].views");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.groups.clear(); }), "GROUP_OUT_OF_RANGE groups");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.block_size = 32; }), "BLOCK_SIZE_INVALID cache");
  testing::FakeDevice stranger("cuda:9");
  EXPECT_EQ(refusal([&](BoundCache& c) { c.device = &stranger; }), "DEVICE_NOT_FOUND cache");
}

}  // namespace
}  // namespace kvsummary
