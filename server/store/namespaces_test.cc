// Who may see what, and how much of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::Gate;
using testing::HashOf;
using testing::SimpleSpec;

using NamespacesTest = testing::StoreTest;

TEST_F(NamespacesTest, PagesOfAnotherNamespaceNeverMatch) {
  Make({.host_bytes = 1 << 20});
  Store(Declare(SimpleSpec()), SimpleSpec(), device(0), 1, 4);
  std::vector<NamespaceSpec> others(5, SimpleSpec());
  others[0].key.salt = "tenant";
  others[1].key.model = "step-6";
  others[2].key.layers = 2;
  others[3].key.layout_version = 1;
  others[4].key.shards = 2;
  for (const NamespaceSpec& spec : others) EXPECT_EQ(Blocks(Declare(spec), 1, 4), 0);
  EXPECT_EQ(store_->ListNamespaces().size(), 6u);
}

TEST_F(NamespacesTest, ANamespaceIsForThoseWhoHaveDeclaredIt) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 8);
  const auto cache = Bind(ns, engine);
  Store(ns, SimpleSpec(), device(0), 1, 4);
  constexpr std::uint64_t kOther = 8;
  EXPECT_EQ(RefusalReason(Find(ns, 1, 4, 32, kOther).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(store_->Bind(kOther, ns, engine.bound()).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(Run(ArgsOf(cache, engine, 1, 0, 4, kOther)).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(RefusalReason(store_->ReadEvents(kOther, ns, 0, 1).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(Declare(SimpleSpec(), kOther), ns);
  EXPECT_EQ(Blocks(ns, 1, 4, 32, kOther), 4);
  store_->EndSession(kOther);
  EXPECT_EQ(RefusalReason(Find(ns, 1, 4, 32, kOther).status()), "NAMESPACE_NOT_FOUND");
  EXPECT_EQ(Blocks(ns, 1, 4), 4);
}

TEST_F(NamespacesTest, ANamespaceHasOneSetOfGroups) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  EXPECT_EQ(Declare(SimpleSpec()), ns);
  EXPECT_EQ(RefusalReason(store_->Declare(kSession, SimpleSpec(768)).status()), "NAMESPACE_DIFFERS");
  const auto other_width = store_->Declare(kSession, SimpleSpec(512, 16));
  EXPECT_EQ(RefusalReason(other_width.status()), "NAMESPACE_DIFFERS");
  EXPECT_EQ(RefusalField(other_width.status()), "hash_width");
}

TEST_F(NamespacesTest, ANamespaceWithoutPagesAndSessionsIsForgotten) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec(), 8);
  NamespaceSpec full = SimpleSpec();
  full.key.salt = "full";
  Store(Declare(full, 8), full, device(0), 1, 4, 8);
  store_->EndSession(8);
  ASSERT_EQ(store_->ListNamespaces().size(), 1u);
  EXPECT_EQ(store_->ListNamespaces()[0].spec.key.salt, "full");
  EXPECT_NE(Declare(SimpleSpec()), ns);
}

// Who resumes the stream of its earlier life must not wait for sequences that it has seen.
TEST_F(NamespacesTest, ANamespaceThatComesBackGoesOnCountingItsEvents) {
  Make({.host_bytes = 8 * 512, .first_sequence = 1000});
  NamespaceSpec other = SimpleSpec();
  other.key.salt = "other";
  const NamespaceId ns = Declare(SimpleSpec(), 8);
  for (std::uint64_t prefix = 1; prefix <= 3; ++prefix) Store(ns, SimpleSpec(), device(0), prefix, 1, 8);
  Store(Declare(other), other, device(0), 1, 8);  // takes all of the tier
  const std::uint64_t next = store_->ReadEvents(8, ns, 0, 100)->next;
  store_->EndSession(8);
  const NamespaceId again = Declare(SimpleSpec(), 9);
  ASSERT_NE(again, ns);
  Store(again, SimpleSpec(), device(0), 4, 1, 9);
  const auto resumed = store_->ReadEvents(9, again, next, 100);
  EXPECT_FALSE(resumed->gap.has_value());
  ASSERT_EQ(resumed->events.size(), 1u);
  EXPECT_EQ(resumed->events[0].hashes, HashOf(4, 0));
  EXPECT_EQ(store_->ReadEvents(9, again, next - 1, 100)->gap->to, next);
}

TEST_F(NamespacesTest, ANamespaceAtItsQuotaEvictsItsOwnPages) {
  Make({.host_bytes = 64 * 512, .namespace_quota_bytes = 8 * 512});
  const NamespaceId ns = Declare(SimpleSpec());
  NamespaceSpec other = SimpleSpec();
  other.key.salt = "other";
  const NamespaceId quiet = Declare(other);
  Store(quiet, other, device(0), 1, 8);
  Store(ns, SimpleSpec(), device(0), 1, 8);
  Store(ns, SimpleSpec(), device(0), 2, 6);
  EXPECT_EQ(Blocks(ns, 1, 8), 2);
  EXPECT_EQ(Blocks(quiet, 1, 8), 8);
  EXPECT_EQ(store_->ListNamespaces()[0].used_bytes, 8 * 512);
  // All that is left is leased.
  ASSERT_EQ(Find(ns, 1, 8)->blocks, 2);
  ASSERT_EQ(Find(ns, 2, 8)->blocks, 6);
  Engine engine(device(0), SimpleSpec(), 16);
  const auto refused = Run(ArgsOf(Bind(ns, engine), engine, 3, 0, 4)).status();
  EXPECT_EQ(RefusalReason(refused), "QUOTA_EXCEEDED");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(NamespacesTest, APageLargerThanTheQuotaDisplacesNothing) {
  Make({.host_bytes = 64 * 512, .namespace_quota_bytes = 8 * 512});
  NamespaceSpec spec = SimpleSpec();
  spec.groups.insert(spec.groups.begin(), GroupSpec{.bytes_per_block = 9 * 512});
  const NamespaceId ns = Declare(spec);
  Engine engine(device(0), spec, 16);
  const auto cache = Bind(ns, engine);
  // Pages of the group that fits are stored, and stay.
  const auto published = Run(ArgsOf(cache, engine, 1, 0, 4));
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->stored, 4);
  EXPECT_EQ(published->dropped, 4);
  auto large = ArgsOf(cache, engine, 2, 0, 1);
  large.groups.pop_back();
  EXPECT_EQ(RefusalReason(Run(large).status()), "QUOTA_EXCEEDED");
  EXPECT_EQ(store_->stats().pages, 4);
}

TEST_F(NamespacesTest, ASessionDeclaresAShareOfAllNamespaces) {
  Make({.host_bytes = 1 << 20});
  static_assert(kMaxNamespaces % kMaxNamespacesPerSession == 0);
  const auto declare = [&](std::uint64_t session, int i) {
    NamespaceSpec spec = SimpleSpec();
    spec.key.salt = std::to_string(i);
    return store_->Declare(session, spec).status();
  };
  int made = 0;
  std::uint64_t session = 100;
  for (; made < kMaxNamespaces; ++session) {
    for (int i = 0; i < kMaxNamespacesPerSession; ++i) ASSERT_TRUE(declare(session, made++).ok());
    EXPECT_TRUE(declare(session, made - 1).ok());  // again
    for (const int i : {made, 0}) {                // a new one, and one that exists
      if (i == kMaxNamespaces || (session == 100 && i == 0)) continue;
      const auto refused = declare(session, i);
      EXPECT_EQ(RefusalReason(refused), "SESSION_LIMIT");
      EXPECT_EQ(RefusalField(refused), "session_id");
      EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    }
  }
  EXPECT_EQ(RefusalReason(declare(session, made)), "NAMESPACE_LIMIT");
  EXPECT_TRUE(declare(session, 0).ok());
  // What nobody uses makes room.
  store_->EndSession(101);
  for (int i = 0; i < kMaxNamespacesPerSession - 1; ++i) EXPECT_TRUE(declare(session, made++).ok());
  EXPECT_EQ(RefusalReason(declare(session, made)), "SESSION_LIMIT");
  EXPECT_EQ(store_->ListNamespaces().size(), static_cast<std::size_t>(kMaxNamespaces) - 1);
}

// Tenants come and go, and their pages stay: not those of who has been away for the longest time.
TEST_F(NamespacesTest, PagesThatNobodyUsesKeepNoNewNamespaceOut) {
  Make({.host_bytes = 1 << 20});
  const auto salted = [](int i) {
    NamespaceSpec spec = SimpleSpec();
    spec.key.salt = std::to_string(i);
    return spec;
  };
  const auto fill = [&](std::uint64_t session, int i) {
    const NamespaceSpec spec = salted(i);
    Store(Declare(spec, session), spec, device(0), 1, 4, session);
  };
  fill(10, 0);
  fill(11, 1);
  fill(11, 2);
  fill(12, 3);
  store_->EndSession(11);
  store_->EndSession(10);
  int made = 4;
  for (std::uint64_t session = 100; made < kMaxNamespaces; ++session) {
    for (int i = 0; i < kMaxNamespacesPerSession && made < kMaxNamespaces; ++i)
      Declare(salted(made++), session);
  }
  ASSERT_EQ(store_->stats().pages, 16);
  const auto declare = [&] { return store_->Declare(50, salted(made++)).status(); };
  const auto there = [&](int i) {
    const auto list = store_->ListNamespaces();
    return std::any_of(list.begin(), list.end(),
                       [&](const auto& n) { return n.spec.key.salt == std::to_string(i); });
  };
  // Those of session 11 went first, then that of 10; 12 is still there.
  EXPECT_TRUE(declare().ok());
  EXPECT_TRUE(declare().ok());
  EXPECT_TRUE(there(0) && !there(1) && !there(2) && there(3));
  EXPECT_TRUE(declare().ok());
  EXPECT_FALSE(there(0));
  EXPECT_EQ(store_->stats().pages, 4);
  EXPECT_EQ(store_->stats().tiers[0].evicted_pages, 12);
  EXPECT_EQ(RefusalReason(declare()), "NAMESPACE_LIMIT");
  EXPECT_EQ(store_->Check(), std::vector<std::string>{});
}

TEST_F(NamespacesTest, ANamespaceThatCannotBeForgottenYetLosesNothing) {
  const auto salted = [](int i) {
    NamespaceSpec spec = SimpleSpec();
    spec.key.salt = std::to_string(i);
    return spec;
  };
  // What is under way when the session ends: one page is read, or one more is written.
  for (const bool load : {true, false}) {
    SCOPED_TRACE(load);
    Make({.host_bytes = 1 << 20, .device_bytes = 64 * 512}, 1);
    const NamespaceId ns = Declare(salted(0), 10);
    Engine engine(device(1), salted(0), 8);
    const auto cache = Bind(ns, engine, 10);
    Store(ns, salted(0), device(0), 1, 4, 10);
    int made = 1;
    for (std::uint64_t session = 100; made < kMaxNamespaces; ++session) {
      for (int i = 0; i < kMaxNamespacesPerSession && made < kMaxNamespaces; ++i)
        Declare(salted(made++), session);
    }
    std::future<Loaded> loaded;
    std::future<Published> published;
    Gate gate(device(1));
    if (load) {
      const auto hit = Find(ns, 1, 1, 32, 10);
      ASSERT_EQ(hit->blocks, 1);
      loaded = Start(LoadOf(*hit, cache, 10));
    } else {
      published = Start(ArgsOf(cache, engine, 2, 0, 1, 10));
    }
    store_->EndSession(10);
    EXPECT_EQ(RefusalReason(store_->Declare(50, salted(made)).status()), "NAMESPACE_LIMIT");
    EXPECT_EQ(store_->stats().tiers[0].pages, 4);
    EXPECT_EQ(store_->stats().tiers[0].evicted_pages, 0);
    EXPECT_EQ(store_->Check(), std::vector<std::string>{});
    gate.Open();
    load ? loaded.wait() : published.wait();
    store_->Quiesce();
    EXPECT_TRUE(store_->Declare(50, salted(made)).ok());
    EXPECT_EQ(store_->stats().pages, 0);
    EXPECT_EQ(store_->Check(), std::vector<std::string>{});
  }
}

}  // namespace
}  // namespace kvsummary
