#include <utility>

#include "server/store/entry_list.h"
#include "server/store/eviction_policy.h"

namespace kvsummary {
namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(PolicyContext context) : context_(std::move(context)), list_(context_) {}

  void Insert(Entry entry, std::uint64_t /*key*/) override { list_.Append(entry); }
  void Touch(Entry entry) override {
    list_.Remove(entry);
    list_.Append(entry);
  }
  void Remove(Entry entry, std::uint64_t /*key*/, bool /*evicted*/) override { list_.Remove(entry); }
  void Reconsider(Entry entry) override { list_.Reconsider(entry); }
  Entry Victim() override {
    while (list_.next() != kNoEntry && !context_.eligible(list_.next())) list_.PassOver();
    return list_.next();
  }
  std::int64_t size() const override { return list_.size(); }

 private:
  const PolicyContext context_;
  EntryList list_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruPolicy(PolicyContext context) {
  return std::make_unique<LruPolicy>(std::move(context));
}

}  // namespace kvsummary
