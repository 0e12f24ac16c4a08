// What the store evicts, against independent models of it.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "server/store/store_testing.h"

namespace kvsummary {
namespace {

using testing::Engine;
using testing::SimpleSpec;
using PolicyTest = testing::StoreTest;

// Requests as a chat service sees them: prompts that go on where another one has stopped.
struct Prompt {
  std::vector<std::uint64_t> nodes;  // by block: which prefix tree's node
};

class Prompts {
 public:
  explicit Prompts(std::uint64_t seed) : random_(seed) {}

  Prompt Next() {
    Prompt prompt;
    if (!known_.empty() && random_() % 4 != 0) {
      // A recent conversation, or any, cut somewhere.
      const std::size_t back = random_() % 2 == 0 ? std::min<std::size_t>(known_.size(), 8) : known_.size();
      prompt = known_[known_.size() - 1 - random_() % back];
      if (random_() % 3 == 0) prompt.nodes.resize(1 + random_() % prompt.nodes.size());
    }
    const std::size_t more = random_() % 12 + (prompt.nodes.empty() ? 1 : 0);
    for (std::size_t i = 0; i < more; ++i) prompt.nodes.push_back(++last_node_);
    known_.push_back(prompt);
    return prompt;
  }

 private:
  std::mt19937_64 random_;
  std::uint64_t last_node_ = 0;
  std::vector<Prompt> known_;
};

std::string Hashes(const Prompt& prompt, std::size_t first, std::size_t count) {
  std::string hashes;
  for (std::size_t i = first; i < first + count; ++i) hashes += testing::HashOf(prompt.nodes[i], 0);
  return hashes;
}

// Least recently used, by the book: a page was used when a prompt that has it was; of those of one prompt the
// one that is farthest behind goes first. Nothing of the prompt at hand goes.
class LruModel {
 public:
  explicit LruModel(std::size_t capacity) : capacity_(capacity) {}

  // The leading blocks that are there; afterwards all are, as far as there is room.
  std::size_t Request(const Prompt& prompt) {
    ++now_;
    std::size_t hit = 0;
    while (hit < prompt.nodes.size() && used_.count(prompt.nodes[hit]) != 0) ++hit;
    for (std::size_t i = 0; i < prompt.nodes.size(); ++i) {
      const std::uint64_t node = prompt.nodes[i];
      if (const auto old = used_.find(node); old != used_.end()) {
        order_.erase({old->second, -static_cast<std::int64_t>(i), node});
      } else if (used_.size() == capacity_) {
        const auto oldest = *order_.begin();
        if (std::get<0>(oldest) == now_) return hit;
        used_.erase(std::get<2>(oldest));
        order_.erase(order_.begin());
      }
      used_[node] = now_;
      order_.insert({now_, -static_cast<std::int64_t>(i), node});
    }
    return hit;
  }

 private:
  const std::size_t capacity_;
  std::uint64_t now_ = 0;
  std::map<std::uint64_t, std::uint64_t> used_;                             // when
  std::set<std::tuple<std::uint64_t, std::int64_t, std::uint64_t>> order_;  // when, minus depth, which
};

TEST_F(PolicyTest, LruHitsWhatAModelOfItHits) {
  for (const std::int64_t capacity : {16, 64, 300}) {
    devices_.clear();
    Make({.host_bytes = capacity * 512});
    const NamespaceId ns = Declare(SimpleSpec());
    Engine engine(device(0), SimpleSpec(), 4096);
    const auto cache = Bind(ns, engine);
    LruModel model(static_cast<std::size_t>(capacity));
    Prompts prompts(static_cast<std::uint64_t>(capacity));
    std::size_t hits = 0;
    std::size_t blocks = 0;
    for (int request = 0; request < 1500; ++request) {
      const Prompt prompt = prompts.Next();
      const std::size_t n = prompt.nodes.size();
      const auto hit =
          store_->Lookup({.session = kSession, .name_space = ns, .hashes = Hashes(prompt, 0, n)});
      ASSERT_TRUE(hit.ok());
      // As an engine commits them: in chunks.
      for (std::size_t first = static_cast<std::size_t>(hit->blocks); first < n; first += 5) {
        const std::size_t count = std::min<std::size_t>(5, n - first);
        PublishArgs args;
        args.session = kSession;
        args.name_space = ns;
        args.cache = cache;
        args.first_block_index = static_cast<std::int64_t>(first);
        args.committed_tokens = static_cast<std::int64_t>(first + count) * 64;
        args.parent_hash = first > 0 ? Hashes(prompt, first - 1, 1) : "";
        args.hashes = Hashes(prompt, first, count);
        GroupBlocks& list = args.groups.emplace_back();
        for (std::size_t i = 0; i < count; ++i) list.block_ids.push_back(static_cast<std::int64_t>(i) + 1);
        const auto published = Run(std::move(args));
        ASSERT_TRUE(published.ok() || absl::IsResourceExhausted(published.status())) << published.status();
        if (!published.ok() || published->dropped > 0) break;
      }
      if (hit->blocks > 0) store_->Release(kSession, hit->lease);
      ASSERT_EQ(static_cast<std::size_t>(hit->blocks), model.Request(prompt)) << request;
      hits += static_cast<std::size_t>(hit->blocks);
      blocks += n;
    }
    EXPECT_GT(hits, 0u);
    EXPECT_LT(hits, blocks);
    store_->Quiesce();
    EXPECT_EQ(store_->Check(), std::vector<std::string>());
    store_ = nullptr;
  }
}

// A system prompt and a few conversations are used again and again, between prompts that never come back.
std::int64_t HitsUnderScan(PageStore& store, NamespaceId ns, const std::shared_ptr<const BoundCache>& cache) {
  std::int64_t hits = 0;
  for (std::uint64_t round = 0; round < 60; ++round) {
    const auto use = [&](std::uint64_t prefix, std::int64_t count) {
      const auto hit =
          store.Lookup({.session = 7, .name_space = ns, .hashes = testing::HashesOf(prefix, 0, count)});
      if (hit->blocks > 0) store.Release(7, hit->lease);
      PublishArgs args;
      args.session = 7;
      args.name_space = ns;
      args.cache = cache;
      args.committed_tokens = count * 64;
      args.hashes = testing::HashesOf(prefix, 0, count);
      GroupBlocks& list = args.groups.emplace_back();
      for (std::int64_t i = 0; i < count; ++i) list.block_ids.push_back(i + 1);
      store.Publish(std::move(args), [](auto) {});
      store.Quiesce();
      return hit->blocks;
    };
    for (std::uint64_t warm = 1; warm <= 4; ++warm) hits += use(warm, 8);
    for (std::uint64_t once = 0; once < 12; ++once) use(1000 + round * 12 + once, 8);
  }
  return hits;
}

TEST_F(PolicyTest, S3FifoKeepsWhatIsUsedAgainWhereAScanEmptiesAnLru) {
  std::int64_t hits[2];
  for (const auto policy : {PageStore::Policy::kLru, PageStore::Policy::kS3Fifo}) {
    devices_.clear();
    Make({.host_bytes = 100 * 512, .policy = policy});
    const NamespaceId ns = Declare(SimpleSpec());
    Engine engine(device(0), SimpleSpec(), 16);
    hits[policy == PageStore::Policy::kS3Fifo] = HitsUnderScan(*store_, ns, Bind(ns, engine));
    EXPECT_EQ(store_->Check(), std::vector<std::string>());
    store_ = nullptr;
  }
  EXPECT_EQ(hits[0], 0);
  EXPECT_GT(hits[1], 60 * 4 * 8 * 8 / 10);
}

}  // namespace
}  // namespace kvsummary
