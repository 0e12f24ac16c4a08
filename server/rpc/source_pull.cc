#include "server/rpc/source_pull.h"

#include <algorithm>
#include <utility>

#include "server/error.h"
#include "server/handoff/handoff_text.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"

namespace kvsummary {
namespace {

constexpr int kMaxHeldRuns = 65536;    // of a pull
constexpr std::size_t kMaxAgain = 64;  // chunks: a puller gives up at fewer

bool InRange(std::int64_t number) { return number >= 0 && number <= kMaxIndex; }

absl::Status Malformed(std::string_view why) { return Refuse(Reason::MESSAGE_MALFORMED, "", why); }

}  // namespace

absl::Status SourcePull::Check(const v1::PullBegin& begin) {
  if (begin.pull() == 0) return Malformed("the pull has no number");
  if (begin.transfer_id().size() != kTransferBytes || begin.regions() < 0) {
    return Malformed("transfer_id has not 16 bytes, or regions is negative");
  }
  if (begin.held_size() > kMaxHeldRuns) return Malformed("too many runs of chunks are held");
  for (const auto& run : begin.held()) {
    if (run.part() < 0 || !InRange(run.first()) || !InRange(run.count()))
      return Malformed("held chunks are none");
  }
  for (const auto& run : begin.blocks()) {
    if (!InRange(run.first()) || !InRange(run.count())) return Malformed("wanted blocks are none");
  }
  return absl::OkStatus();
}

SourcePull::SourcePull(const v1::PullBegin& begin, std::shared_ptr<Offer> offer,
                       std::unique_ptr<Drain::Call> admission)
    : admission_(std::move(admission)),
      offer_(std::move(offer)),
      secret_(begin.offer_secret()),
      transfer_(begin.transfer_id()) {
  wanted_.regions = begin.regions();
  for (const auto& blocks : begin.blocks()) wanted_.blocks[blocks.group()] = {blocks.first(), blocks.count()};
  for (const auto& held : begin.held()) {
    const HeldRun run{{static_cast<std::size_t>(held.part()), held.first()}, held.first() + held.count()};
    if (held.count() > 0) held_.push_back(run);
  }
  std::sort(held_.begin(), held_.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const HeldRun& run : held_) {
    if (kept > 0 && held_[kept - 1].begin.part == run.begin.part && run.begin.chunk <= held_[kept - 1].end) {
      held_[kept - 1].end = std::max(held_[kept - 1].end, run.end);
    } else {
      held_[kept++] = run;
    }
  }
  held_.resize(kept);
  held_.shrink_to_fit();
}

void SourcePull::NoticeEnd() { TakeEnd(offer_->Look(kMaxOfferParts).ended); }

void SourcePull::TakeEnd(const absl::Status& ended) {
  if (ended.ok() || !failed_.ok()) return;
  told_failed_ = IsThrough();  // who has all need not know
  Fail(ended);
}

void SourcePull::Tell(v1::PullResponse& message) {
  const Offer::View view = offer_->Look(parts_.size());
  TakeEnd(view.ended);
  if (!failed_.ok()) {
    if (!std::exchange(told_failed_, true)) FillFailed(failed_, message.mutable_failed());
    return;
  }
  if (!std::exchange(begun_, true)) {
    if (transport == v1::HANDOFF_TRANSPORT_SAME_HOST) {
      accepted.set_lease_milliseconds(kLease.count());
      lent_until_ = std::chrono::steady_clock::now() + kLease;
    }
    FillAccepted(*offer_, view, &accepted);
    *message.mutable_accepted() = std::move(accepted);
  }
  for (const auto& staged : view.parts) {
    if (loan != nullptr && !loan->Lend(staged)) {
      Fail(Refuse(Reason::PEER_UNREACHABLE, "", "the UCX helper has ended"));
      told_failed_ = true;
      return FillFailed(failed_, message.mutable_failed());
    }
    v1::PullPart* part = message.add_parts();
    part->set_part(staged->number);
    FillPart(staged->part, staged->extent.offset(), part);
    parts_.push_back(staged);
  }
  if (view.complete && !std::exchange(done_, true)) {
    message.mutable_done()->set_committed_tokens(view.committed_tokens);
  }
}

void SourcePull::Fail(const absl::Status& why) {
  failed_.Update(why);
  loan = nullptr;
  LetGo();
  again_.clear();
}

void SourcePull::LetGo() {
  const auto left = lent_until_ - std::chrono::steady_clock::now();
  if (left > std::chrono::nanoseconds(0) && !parts_.empty()) {
    OnGrpcThreadAfter(std::chrono::ceil<std::chrono::milliseconds>(left), [parts = parts_] {});
  }
  parts_.clear();
}

bool SourcePull::Holds(const Place& place) const {
  const auto after = std::upper_bound(held_.begin(), held_.end(), place,
                                      [](const Place& p, const HeldRun& run) { return p < run.begin; });
  if (after == held_.begin()) return false;
  const HeldRun& run = *std::prev(after);
  return run.begin.part == place.part && place.chunk < run.end;
}

std::optional<SourcePull::Place> SourcePull::Take() {
  if (!failed_.ok() || transport == v1::HANDOFF_TRANSPORT_SAME_HOST) return std::nullopt;
  if (!again_.empty()) {
    const Place place = again_.front();
    again_.pop_front();
    return place;
  }
  for (; next_.part < parts_.size(); next_ = {next_.part + 1, 0}) {
    const Part& part = parts_[next_.part]->part;
    for (; next_.chunk < ChunkCount(part); ++next_.chunk) {
      if (!IsWanted(wanted_, part, ChunkAt(part, next_.chunk)) || Holds(next_)) continue;
      const Place place = next_;
      ++next_.chunk;
      return place;
    }
  }
  return std::nullopt;
}

bool SourcePull::IsThrough() const {
  if (!done_ || loads > 0 || !again_.empty()) return false;
  return transport == v1::HANDOFF_TRANSPORT_SAME_HOST || next_.part == parts_.size();
}

absl::Status SourcePull::TakeAgain(const v1::PullAgain& chunk) {
  if (!failed_.ok()) return absl::OkStatus();
  const Place place{static_cast<std::size_t>(chunk.part()), chunk.chunk()};
  if (place.part >= parts_.size() || place.chunk < 0 || place.chunk >= ChunkCount(parts_[place.part]->part) ||
      again_.size() >= kMaxAgain) {
    return Malformed("a chunk that was never sent is asked for again");
  }
  again_.push_back(place);
  return absl::OkStatus();
}

}  // namespace kvsummary
