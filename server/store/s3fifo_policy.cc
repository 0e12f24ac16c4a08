#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/store/entry_list.h"
#include "server/store/eviction_policy.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kSmallShare = 10;  // the small queue is a tenth of all
constexpr std::uint16_t kMaxUses = 3;
constexpr std::uint16_t kUses = 3;  // bits of policy_bits
constexpr std::uint16_t kInMain = 4;

// Keys of the pages that left through the small queue, as many as there are pages.
class Ghosts {
 public:
  void Add(std::uint64_t key, std::size_t limit) {
    ++counts_[key];
    order_.push_back(key);
    while (order_.size() > limit) {
      const auto oldest = counts_.find(order_.front());
      order_.pop_front();
      if (oldest != counts_.end() && --oldest->second == 0) counts_.erase(oldest);
    }
  }
  // Whether it is there. It is not, afterwards.
  bool Take(std::uint64_t key) { return counts_.erase(key) != 0; }

 private:
  std::deque<std::uint64_t> order_;  // keys that were taken are still in it
  absl::flat_hash_map<std::uint64_t, int> counts_;
};

class S3FifoPolicy final : public EvictionPolicy {
 public:
  explicit S3FifoPolicy(PolicyContext context)
      : context_(std::move(context)), small_(context_), main_(context_) {}

  void Insert(Entry entry, std::uint64_t key) override {
    const bool again = ghosts_.Take(key);
    Bits(entry) = again ? kInMain : 0;
    (again ? main_ : small_).Append(entry);
  }
  void Touch(Entry entry) override {
    std::uint16_t& bits = Bits(entry);
    if ((bits & kUses) < kMaxUses) ++bits;
  }
  void Remove(Entry entry, std::uint64_t key, bool evicted) override {
    const bool in_main = (Bits(entry) & kInMain) != 0;
    (in_main ? main_ : small_).Remove(entry);
    if (evicted && !in_main) ghosts_.Add(key, static_cast<std::size_t>(size()));
  }
  void Reconsider(Entry entry) override { ((Bits(entry) & kInMain) != 0 ? main_ : small_).Reconsider(entry); }

  // What has been used since it came to its queue gets another turn in the main one, eligible or not.
  Entry Victim() override {
    while (true) {
      EntryList& due = small_.size() * kSmallShare >= size() ? small_ : main_;
      EntryList& list = due.next() != kNoEntry ? due : &due == &small_ ? main_ : small_;
      const Entry entry = list.next();
      if (entry == kNoEntry) return kNoEntry;
      if (std::uint16_t& bits = Bits(entry); (bits & kUses) != 0) {
        list.Remove(entry);
        bits = static_cast<std::uint16_t>(&list == &main_ ? bits - 1 : kInMain);
        main_.Append(entry);
      } else if (context_.eligible(entry)) {
        return entry;
      } else {
        list.PassOver();
      }
    }
  }
  std::int64_t size() const override { return small_.size() + main_.size(); }

 private:
  std::uint16_t& Bits(Entry entry) { return context_.pages->extra(entry).policy_bits; }

  const PolicyContext context_;
  EntryList small_;
  EntryList main_;
  Ghosts ghosts_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(PolicyContext context) {
  return std::make_unique<S3FifoPolicy>(std::move(context));
}

}  // namespace kvsummary
