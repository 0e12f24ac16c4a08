// A load. Pages of the device's own tier are moved at once. Those of the host tier are compared with their
// checksums first, after those that are still on their way there have arrived; then they are moved, into a
// slot of the device's tier as well.
#include <algorithm>
#include <map>
#include <utility>

#include "server/error.h"
#include "server/store/page_store_impl.h"

namespace kvsummary {

void PageStore::Load(LoadArgs args, LoadDone done) {
  auto op = std::make_shared<Impl::Loading>();
  op->plan.args = std::move(args);
  op->done = std::move(done);
  bool nothing_to_copy = false;
  const absl::Status refused = impl_->Locked([&] {
    if (auto s = impl_->BeginOperation(op->plan.args.session); !s.ok()) return s;
    if (auto s = impl_->catalog.PlanLoad(op->plan, impl_->options.now()); !s.ok()) {
      impl_->AbandonOperation(op->plan.args.session);
      return s;
    }
    impl_->QueueDemotions();
    nothing_to_copy = op->plan.pages.empty();
    if (!nothing_to_copy) impl_->QueueLoad(op);
    return absl::OkStatus();
  });
  if (!refused.ok()) {
    std::move(op->done)(refused);
  } else if (nothing_to_copy) {
    impl_->EndLoad(*op);
  }
}

void PageStore::Impl::QueueLoad(const std::shared_ptr<Loading>& op) {
  const LoadPlan& plan = op->plan;
  const bool any_upper =
      !std::all_of(plan.pages.begin(), plan.pages.end(), [](const auto& p) { return p.from_host; });
  // Copies down are queued on the executors already, and what they queue on the store's thread afterwards
  // comes there before what is queued here.
  const std::size_t arrivals = plan.any_arriving ? memory->tier_count() - 1 : 0;
  op->steps = arrivals + (any_upper ? 1 : 0);
  if (op->steps == 0) {
    thread.SubmitFree([this, op] { VerifyLoad(op); });
    return;
  }
  const auto step_done = [this, op] {
    if (--op->steps > 0) return;
    if (op->plan.any_from_host) {
      thread.SubmitFree([this, op] { VerifyLoad(op); });
    } else {
      EndLoad(*op);
    }
  };
  for (std::size_t tier = 1; tier <= arrivals; ++tier) memory->device(tier).executor().SubmitFree(step_done);
  // At once: when another device wants the same pages they are copied down, and their slots given away.
  if (!any_upper) return;
  plan.args.cache->device->executor().SubmitFree([this, op, step_done] {
    MoveUpper(*op);
    step_done();
  });
}

void PageStore::Impl::VerifyLoad(const std::shared_ptr<Loading>& op) {
  LoadPlan& plan = op->plan;
  const PageTable& pages = plan.name_space->pages;
  std::vector<Checksummer::Page> sums;  // of what comes from the host tier
  for (const LoadPlan::Page& page : plan.pages) {
    if (!page.from_host) continue;
    const auto group = static_cast<std::size_t>(plan.args.groups[page.list].group);
    const std::int64_t bytes = plan.name_space->spec.groups[group].bytes_per_block;
    sums.push_back({memory->HostPage(page.unit), static_cast<std::size_t>(bytes)});
  }
  checksummer.Sum(sums);
  Locked([&] {
    for (std::size_t p = plan.pages.size(); p-- > 0;) {
      const LoadPlan::Page& page = plan.pages[p];
      if (!page.from_host) continue;  // it has been read
      const std::uint64_t sum = sums.back().sum;
      sums.pop_back();
      // A copy down that failed has lost its page meanwhile.
      const bool lost = pages.record(page.entry).life == PageLife::kLost;
      if (lost || pages.extra(page.entry).checksum != sum) catalog.DropBad(plan, p);
    }
    catalog.PlanPromotions(plan);
    QueueDemotions();
    plan.args.cache->device->executor().SubmitFree([this, op] {
      MoveHost(*op);
      EndLoad(*op);
    });
  });
}

// Copies pages of one tier into the cache: from the units that unit_of answers, none where it is kNoUnit.
template <typename UnitOf>
void PageStore::Impl::MoveToCache(Loading& op, std::uint8_t tier, UnitOf unit_of) {
  const LoadPlan& plan = op.plan;
  std::vector<Moves> moves(plan.args.groups.size());
  for (const LoadPlan::Page& page : plan.pages) {
    const Unit unit = unit_of(page);
    if (unit == kNoUnit) continue;
    moves[page.list].from.push_back(unit);
    moves[page.list].to.push_back(
        plan.args.groups[page.list].block_ids[static_cast<std::size_t>(page.index)]);
  }
  for (std::size_t l = 0; l < moves.size(); ++l) {
    if (moves[l].from.empty() || !op.status.ok()) continue;
    op.Add(memory->ToCache(tier, moves[l].from, *plan.args.cache, plan.args.groups[l].group, moves[l].to));
  }
}

// What is to be known before blocks of the cache are written.
void PageStore::Impl::CheckStillWanted(Loading& op) {
  Locked([&] {
    if (!op.plan.session_ended) return;
    op.status.Update(Refuse(Reason::SESSION_ENDED, "session_id", "the session ended during the load"));
  });
}

void PageStore::Impl::MoveUpper(Loading& op) {
  CheckStillWanted(op);
  op.status.Update(memory->Prepare(*op.plan.args.cache->device));
  MoveToCache(op, op.plan.device_tier, [](const auto& page) { return page.from_host ? kNoUnit : page.unit; });
}

void PageStore::Impl::MoveHost(Loading& op) {
  const LoadPlan& plan = op.plan;
  Device& device = *plan.args.cache->device;
  CheckStillWanted(op);
  op.status.Update(memory->Prepare(device));
  std::map<std::int64_t, Moves> up;  // by bytes of a page
  for (const LoadPlan::Page& page : plan.pages) {
    if (page.promote_to == kNoUnit) continue;
    const auto group = static_cast<std::size_t>(plan.args.groups[page.list].group);
    Moves& moves = up[plan.name_space->spec.groups[group].bytes_per_block];
    moves.from.push_back(page.unit);
    moves.to.push_back(page.promote_to);
  }
  for (const auto& [bytes, moves] : up) {
    if (op.status.ok()) {
      op.Add(memory->Between(device, bytes, kHostTier, moves.from, plan.device_tier, moves.to));
    }
  }
  MoveToCache(op, plan.device_tier, [](const auto& page) { return page.promote_to; });
  MoveToCache(op, kHostTier, [](const auto& page) {
    return page.from_host && page.promote_to == kNoUnit ? page.unit : kNoUnit;
  });
}

void PageStore::Impl::EndLoad(Loading& op) {
  Locked([&] {
    catalog.CommitLoad(op.plan, op.status.ok());
    catalog.DemoteBelowWatermark(op.plan.device_tier);
  });
  if (op.status.ok()) {
    std::move(op.done)(std::move(op.plan.result));
  } else {
    std::move(op.done)(op.status);
  }
  EndOperation(op.plan.args.session);
}

}  // namespace kvsummary
