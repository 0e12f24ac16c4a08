#include "server/store/eviction_order.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvsummary {
namespace {

// Counts how often a queue is asked.
class CountingPolicy final : public EvictionPolicy {
 public:
  CountingPolicy(std::unique_ptr<EvictionPolicy> policy, int* asked)
      : policy_(std::move(policy)), asked_(asked) {}

  void Insert(Entry entry, std::uint64_t key) override { policy_->Insert(entry, key); }
  void Touch(Entry entry) override { policy_->Touch(entry); }
  void Remove(Entry entry, std::uint64_t key, bool evicted) override { policy_->Remove(entry, key, evicted); }
  void Reconsider(Entry entry) override { policy_->Reconsider(entry); }
  Entry Victim() override {
    ++*asked_;
    return policy_->Victim();
  }
  std::int64_t size() const override { return policy_->size(); }

 private:
  const std::unique_ptr<EvictionPolicy> policy_;
  int* const asked_;
};

constexpr std::int64_t kSizes = 5;

class EvictionOrderTest : public ::testing::TestWithParam<bool> {
 protected:
  struct Group {
    PageTable pages{8};
    std::set<Entry> entries;  // of the queue
    std::set<Entry> pinned;
    EvictionQueue queue;
  };

  void Make(int queues) {
    for (int i = 0; i < queues; ++i) {
      Group& group = *groups_.emplace_back(std::make_unique<Group>());
      const PolicyContext context{&group.pages, &clock_,
                                  [&group](Entry e) { return group.pinned.count(e) == 0; }};
      group.queue.pages = &group.pages;
      group.queue.slot_bytes = 256 * (1 + i % kSizes);
      group.queue.policy = std::make_unique<CountingPolicy>(
          GetParam() ? MakeS3FifoPolicy(context) : MakeLruPolicy(context), &asked_);
    }
  }
  // What the store would say to a policy.
  EvictionPolicy& Tell(Group& group) {
    order_.NoteChange(group.queue);
    return *group.queue.policy;
  }
  Entry Add(Group& group) {
    const Entry e = group.pages.Add("12345678");
    Tell(group).Insert(e, e + 1);
    group.entries.insert(e);
    return e;
  }
  void Remove(Group& group, Entry e, bool evicted) {
    Tell(group).Remove(e, e + 1, evicted);
    group.entries.erase(e);
    group.pages.Remove(e);
  }
  // By asking every queue.
  const EvictionQueue* Slow(std::int64_t slot_bytes) {
    const EvictionQueue* best = nullptr;
    std::uint64_t least = 0;
    for (const auto& group : groups_) {
      if (slot_bytes != 0 && group->queue.slot_bytes != slot_bytes) continue;
      const Entry victim = group->queue.policy->Victim();
      if (victim == kNoEntry) continue;
      const std::uint64_t stamp = group->pages.extra(victim).stamp;
      if (best == nullptr || stamp < least) best = &group->queue, least = stamp;
    }
    return best;
  }

  std::uint64_t clock_ = 0;
  int asked_ = 0;
  std::vector<std::unique_ptr<Group>> groups_;
  EvictionOrder order_;
};

TEST_P(EvictionOrderTest, AnswersWhatAskingAllQueuesAnswers) {
  Make(30);
  std::mt19937_64 random(1);
  for (int turn = 0; turn < 20'000; ++turn) {
    Group& group = *groups_[random() % groups_.size()];
    const auto any = [&](const std::set<Entry>& entries) {
      return *std::next(entries.begin(), static_cast<std::ptrdiff_t>(random() % entries.size()));
    };
    switch (random() % 6) {
      case 0:
        Add(group);
        break;
      case 1:
        if (!group.entries.empty()) Tell(group).Touch(any(group.entries));
        break;
      case 2:
        if (group.entries.empty()) break;
        group.pinned.insert(any(group.entries));
        if (GetParam()) order_.NoteChange(group.queue);
        break;
      case 3:
        if (!group.pinned.empty()) {
          const Entry e = any(group.pinned);
          group.pinned.erase(e);
          if (group.entries.count(e) != 0) Tell(group).Reconsider(e);
        }
        break;
      case 4:
        if (!group.entries.empty()) {
          const Entry e = any(group.entries);
          group.pinned.erase(e);
          Remove(group, e, false);
        }
        break;
      default: {
        const std::int64_t bytes = 256 * static_cast<std::int64_t>(random() % (kSizes + 1));
        EvictionQueue* found = bytes == 0 ? order_.Oldest() : order_.OldestOf(bytes);
        ASSERT_EQ(found, Slow(bytes)) << turn;
        if (found == nullptr) break;
        ASSERT_EQ(found->victim, found->policy->Victim());
        for (auto& owner : groups_) {
          if (&owner->queue == found) Remove(*owner, found->victim, true);
        }
      }
    }
  }
}

TEST_P(EvictionOrderTest, AsksOnlyQueuesThatHaveChanged) {
  constexpr int kQueues = 4000;
  Make(kQueues);
  for (auto& group : groups_) {
    for (int i = 0; i < 3; ++i) Add(*group);
  }
  ASSERT_NE(order_.Oldest(), nullptr);
  asked_ = 0;
  for (int i = 0; i < kQueues; ++i) {
    Add(*groups_[static_cast<std::size_t>(i * 7 % kQueues)]);
    EvictionQueue* oldest = order_.Oldest();
    EvictionQueue* of_size = order_.OldestOf(256);
    ASSERT_TRUE(oldest != nullptr && of_size != nullptr);
    for (auto& group : groups_) {
      if (&group->queue == oldest) Remove(*group, oldest->victim, true);
    }
  }
  EXPECT_LE(asked_, 4 * kQueues);
}

TEST_P(EvictionOrderTest, AForgottenQueueIsNotAnswered) {
  Make(3);
  for (auto& group : groups_) Add(*group);
  EXPECT_EQ(order_.Oldest(), &groups_[0]->queue);
  order_.Forget(groups_[0]->queue);
  groups_.erase(groups_.begin());
  EXPECT_EQ(order_.Oldest(), &groups_[0]->queue);
  Tell(*groups_[0]).Touch(*groups_[0]->entries.begin());
  order_.Forget(groups_[0]->queue);
  groups_.erase(groups_.begin());
  EXPECT_EQ(order_.Oldest(), &groups_[0]->queue);
  EXPECT_EQ(order_.OldestOf(256), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Policies, EvictionOrderTest, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "S3Fifo" : "Lru"); });

}  // namespace
}  // namespace kvsummary
