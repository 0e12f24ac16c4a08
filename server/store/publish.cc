// A publish: one movement for each group and tier, then checksums of what went to the host tier.
#include <utility>
#include <vector>

#include "server/error.h"
#include "server/store/page_store_impl.h"

namespace kvsummary {

void PageStore::Publish(PublishArgs args, PublishDone done) {
  auto op = std::make_shared<Impl::Publishing>();
  op->plan.args = std::move(args);
  op->done = std::move(done);
  bool nothing_to_copy = true;
  const absl::Status refused = impl_->Locked([&] {
    if (auto s = impl_->BeginOperation(op->plan.args.session); !s.ok()) return s;
    impl_->catalog.ExpireLeases(impl_->options.now());  // they may hold the room that it needs
    if (auto s = impl_->catalog.PlanPublish(op->plan); !s.ok()) {
      impl_->AbandonOperation(op->plan.args.session);
      return s;
    }
    for (const PublishPlan::List& list : op->plan.lists) nothing_to_copy &= list.pages.empty();
    if (nothing_to_copy) return absl::OkStatus();
    impl_->QueueDemotions();  // the copies down make room for this one
    Device& device = *op->plan.args.cache->device;
    device.executor().SubmitFree([impl = impl_.get(), op] { impl->RunPublish(op); });
    return absl::OkStatus();
  });
  if (!refused.ok()) {
    std::move(op->done)(refused);
  } else if (nothing_to_copy) {
    impl_->EndPublish(*op);
  }
}

void PageStore::Impl::RunPublish(const std::shared_ptr<Publishing>& op) {
  const PublishPlan& plan = op->plan;
  const BoundCache& cache = *plan.args.cache;
  op->status = memory->Prepare(*cache.device);
  bool to_host = false;
  for (std::size_t l = 0; l < plan.lists.size(); ++l) {
    std::vector<std::int64_t> blocks[2];  // to the host tier, and to the device's
    std::vector<std::int64_t> units[2];
    for (const PublishPlan::Page& page : plan.lists[l].pages) {
      const int upper = page.tier == kHostTier ? 0 : 1;
      blocks[upper].push_back(page.block_id);
      units[upper].push_back(page.unit);
    }
    to_host |= !blocks[0].empty();
    for (const int upper : {0, 1}) {
      if (!op->status.ok() || blocks[upper].empty()) continue;
      const auto moved = memory->FromCache(cache, plan.args.groups[l].group, blocks[upper],
                                           upper == 0 ? kHostTier : plan.tier, units[upper]);
      op->status.Update(moved.status());
      if (moved.ok()) op->plan.result.device_time += *moved;
    }
  }
  if (to_host && op->status.ok()) {
    thread.SubmitFree([this, op] { SumPublished(op); });
  } else {
    EndPublish(*op);
  }
}

void PageStore::Impl::SumPublished(const std::shared_ptr<Publishing>& op) {
  PublishPlan& plan = op->plan;
  std::vector<PublishPlan::Page*> pages;
  std::vector<Checksummer::Page> sums;
  for (std::size_t l = 0; l < plan.lists.size(); ++l) {
    const auto group = static_cast<std::size_t>(plan.args.groups[l].group);
    const std::int64_t bytes = plan.name_space->spec.groups[group].bytes_per_block;
    for (PublishPlan::Page& page : plan.lists[l].pages) {
      if (page.tier != kHostTier) continue;
      pages.push_back(&page);
      sums.push_back({memory->HostPage(page.unit), static_cast<std::size_t>(bytes)});
    }
  }
  checksummer.Sum(sums);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i]->checksum = sums[i].sum;
  EndPublish(*op);
}

void PageStore::Impl::EndPublish(Publishing& op) {
  bool ended = false;
  Locked([&] {
    catalog.CommitPublish(op.plan, op.status.ok());
    ended = op.plan.session_ended;
    catalog.DemoteBelowWatermark(op.plan.tier);
  });
  if (!op.status.ok()) {
    std::move(op.done)(op.status);
  } else if (ended) {
    std::move(op.done)(Refuse(Reason::SESSION_ENDED, "session_id", "the session ended during the publish"));
  } else {
    std::move(op.done)(op.plan.result);
  }
  EndOperation(op.plan.args.session);
}

}  // namespace kvsummary
