// Copies down: an upper tier's device moves the pages, then the store's thread takes their checksums.
#include <map>
#include <utility>
#include <vector>

#include "server/store/page_store_impl.h"

namespace kvsummary {

void PageStore::Impl::QueueDemotions() {
  std::map<std::uint8_t, std::shared_ptr<Demoting>> by_tier;
  for (Demotion& demotion : catalog.TakeDemotions()) {
    std::shared_ptr<Demoting>& op = by_tier[demotion.from_tier];
    if (op == nullptr) op = std::make_shared<Demoting>();
    op->pages.push_back(std::move(demotion));
  }
  for (const auto& [tier, op] : by_tier) {
    ++operations;
    memory->device(tier).executor().SubmitFree([this, op = op] { RunDemotions(op); });
  }
}

void PageStore::Impl::RunDemotions(const std::shared_ptr<Demoting>& op) {
  const std::uint8_t tier = op->pages.front().from_tier;
  std::map<std::int64_t, Moves> by_bytes;
  for (const Demotion& page : op->pages) {
    Moves& moves = by_bytes[page.bytes];
    moves.from.push_back(page.from);
    moves.to.push_back(page.to);
  }
  for (const auto& [bytes, moves] : by_bytes) {
    if (!op->status.ok()) break;
    op->status.Update(
        memory->Between(memory->device(tier), bytes, tier, moves.from, kHostTier, moves.to).status());
  }
  thread.SubmitFree([this, op] { EndDemotions(*op); });
}

void PageStore::Impl::EndDemotions(Demoting& op) {
  std::vector<Demotion*> pages;
  std::vector<Checksummer::Page> sums;
  for (Demotion& page : op.pages) {
    if (!op.status.ok() || page.has_checksum) continue;
    pages.push_back(&page);
    sums.push_back({memory->HostPage(page.to), static_cast<std::size_t>(page.bytes)});
  }
  checksummer.Sum(sums);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i]->checksum = sums[i].sum;
  Locked([&] {
    for (const Demotion& page : op.pages) catalog.CommitDemotion(page, op.status.ok());
    catalog.DemoteBelowWatermark(op.pages.front().from_tier);
  });
  EndOwnOperation();
}

}  // namespace kvsummary
