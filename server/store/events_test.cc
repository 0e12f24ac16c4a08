// Events.
#include <gtest/gtest.h>

#include <algorithm>

#include "server/error.h"
#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::Gate;
using testing::HashesOf;
using testing::HashOf;
using testing::SimpleSpec;

using EventsTest = testing::StoreTest;

TEST_F(EventsTest, EventsTellWhatCanBeFetchedAndWhatIsGone) {
  Make({.host_bytes = 8 * 512, .first_sequence = 1000});
  const NamespaceId ns = Declare(SimpleSpec());
  Engine engine(device(0), SimpleSpec(), 16);
  const auto cache = Bind(ns, engine);
  std::int64_t told_blocks = -1;  // what is visible by the time one hears of it
  const auto listener = store_->Listen(kSession, ns, [&] {
    const auto batch = store_->ReadEvents(kSession, ns, 0, 1);
    if (!batch->events.empty()) told_blocks = Blocks(ns, 1, 4);
  });
  {
    Gate gate(device(0));
    auto published = Start(ArgsOf(cache, engine, 1, 0, 4));
    EXPECT_TRUE(store_->ReadEvents(kSession, ns, 0, 10)->events.empty());
    gate.Open();
    published.wait();
  }
  store_->Quiesce();
  EXPECT_EQ(told_blocks, 4);
  store_->StopListening(*listener);
  Store(ns, SimpleSpec(), device(0), 2, 6);
  const auto batch = store_->ReadEvents(kSession, ns, 1000, 10);
  EXPECT_FALSE(batch->gap.has_value());
  ASSERT_EQ(batch->events.size(), 3u);
  EXPECT_EQ(batch->events[0].sequence, 1000u);
  EXPECT_EQ(batch->events[0].kind, EventKind::kStored);
  EXPECT_EQ(batch->events[0].hashes, HashesOf(1, 0, 4));
  EXPECT_EQ(batch->events[0].parent_hash, "");
  EXPECT_EQ(batch->events[1].kind, EventKind::kRemoved);
  EXPECT_EQ(batch->events[1].hashes, HashOf(1, 3) + HashOf(1, 2));
  EXPECT_EQ(batch->events[2].hashes, HashesOf(2, 0, 6));
  EXPECT_EQ(batch->next, 1003u);
  ASSERT_TRUE(Run(ArgsOf(cache, engine, 2, 6, 1)).ok());
  const auto more = store_->ReadEvents(kSession, ns, batch->next, 10);
  ASSERT_EQ(more->events.size(), 2u);
  EXPECT_EQ(more->events[1].parent_hash, HashOf(2, 5));
  EXPECT_EQ(more->events[1].first_block_index, 6);
}

// Clients take messages of 4 MiB unless they say otherwise; a watcher must not be stopped by one publish.
TEST_F(EventsTest, EventsAreOfABoundedNumberOfPages) {
  constexpr std::int64_t kPages = 2 * kMaxEventPages + 3;
  Make({.host_bytes = kPages * 256, .event_log_bytes = std::size_t{8} << 20});
  const NamespaceSpec spec = SimpleSpec(256, 64);
  const NamespaceId ns = Declare(spec);
  Store(ns, spec, device(0), 1, kPages);
  Store(ns, spec, device(0), 2, kPages);
  const auto batch = store_->ReadEvents(kSession, ns, 0, 100);
  ASSERT_TRUE(batch.ok());
  ASSERT_EQ(batch->events.size(), 9u);  // stored, removed, stored
  for (std::size_t e = 0; e < 9; ++e) {
    const StoreEvent& event = batch->events[e];
    const std::int64_t first = static_cast<std::int64_t>(e % 3) * kMaxEventPages;
    const std::int64_t count = std::min(kPages - first, kMaxEventPages);
    EXPECT_EQ(event.hashes.size(), static_cast<std::size_t>(count) * 64) << e;
    if (event.kind == EventKind::kRemoved) continue;
    const std::uint64_t prefix = e < 3 ? 1 : 2;
    EXPECT_TRUE(event.hashes == HashesOf(prefix, first, count, 64)) << e;
    EXPECT_EQ(event.first_block_index, first);
    const auto before = static_cast<std::uint64_t>(first) - 1;
    EXPECT_TRUE(event.parent_hash == (first == 0 ? "" : HashOf(prefix, before, 64))) << e;
  }
}

TEST_F(EventsTest, EventsThatAreNoLongerKeptAreAGap) {
  Make({.host_bytes = 1 << 20, .first_sequence = 1000, .event_log_bytes = 1000});
  const NamespaceId ns = Declare(SimpleSpec());
  for (std::uint64_t prefix = 1; prefix <= 20; ++prefix) Store(ns, SimpleSpec(), device(0), prefix, 1);
  const auto batch = store_->ReadEvents(kSession, ns, 5, 100);  // of an earlier life
  ASSERT_TRUE(batch->gap.has_value());
  EXPECT_EQ(batch->gap->from, 5u);
  EXPECT_EQ(batch->gap->to, batch->events[0].sequence);
  EXPECT_EQ(batch->next, 1020u);
  EXPECT_TRUE(store_->ReadEvents(kSession, ns, 1020, 100)->events.empty());
  EXPECT_EQ(store_->ReadEvents(kSession, ns, 0, 2)->events.size(), 2u);
}

TEST_F(EventsTest, ASessionListensABoundedNumberOfTimes) {
  Make({.host_bytes = 1 << 20});
  const NamespaceId ns = Declare(SimpleSpec());
  Declare(SimpleSpec(), 8);
  std::vector<std::uint64_t> listeners;
  const auto listen = [&](std::uint64_t session) { return store_->Listen(session, ns, [] {}); };
  for (int i = 0; i < kMaxListenersPerSession; ++i) listeners.push_back(listen(kSession).value());
  const auto refused = listen(kSession).status();
  EXPECT_EQ(RefusalReason(refused), "SESSION_LIMIT");
  EXPECT_EQ(RefusalField(refused), "session_id");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  listeners.push_back(listen(8).value());
  store_->StopListening(listeners[3]);
  store_->StopListening(listeners[3]);
  listeners.push_back(listen(kSession).value());
  EXPECT_FALSE(listen(kSession).ok());
  for (const std::uint64_t listener : listeners) store_->StopListening(listener);
  EXPECT_TRUE(listen(kSession).ok());
}

}  // namespace
}  // namespace kvsummary
