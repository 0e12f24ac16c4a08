// In which order the pages of one group in one tier are evicted.
//
// A policy keeps its lists in the PageTable's records (PageExtra: stamp, older, newer, policy_bits) and knows
// only pages that it has been given and that have not been removed. Which of them may go is not its business:
// it is asked for a victim among those that its Eligible function admits. A page that was not eligible when
// the policy passed it over must be announced by Reconsider once it is: then it is found again, and finding a
// victim takes amortised constant time.
//
// Stamps come from one clock of the store and tell the age of a group's candidates from that of another's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "server/store/page_table.h"

namespace kvsummary {

class EvictionPolicy {
 public:
  using Eligible = std::function<bool(Entry)>;

  virtual ~EvictionPolicy() = default;

  // A page that has come to the tier. `key` stands for its hash, for policies that remember what they
  // evicted.
  virtual void Insert(Entry entry, std::uint64_t key) = 0;
  // A page that was used.
  virtual void Touch(Entry entry) = 0;
  // A page that leaves the tier, or the store. `evicted`: because it was the victim.
  virtual void Remove(Entry entry, std::uint64_t key, bool evicted) = 0;
  // The page is eligible now, and may not have been before.
  virtual void Reconsider(Entry entry) = 0;
  // The page that should go next, or kNoEntry when none is eligible. It stays until Remove.
  virtual Entry Victim() = 0;
  virtual std::int64_t size() const = 0;
};

// What a policy needs to know of its store; both must outlive it.
struct PolicyContext {
  PageTable* pages = nullptr;
  std::uint64_t* clock = nullptr;  // the last stamp given
  EvictionPolicy::Eligible eligible;
};

// Least recently used first.
std::unique_ptr<EvictionPolicy> MakeLruPolicy(PolicyContext context);
// S3-FIFO (Yang et al., SOSP '23): pages that are used once leave through a small queue, without displacing
// those that are used again; what returns soon after that goes to the large one at once.
std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(PolicyContext context);

}  // namespace kvsummary
