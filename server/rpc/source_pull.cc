#include "server/rpc/source_pull.h"

#include <algorithm>
#include <utility>

#include "server/error.h"
#include "server/handoff/handoff_text.h"

namespace kvsummary {
namespace {

constexpr int kMaxHeldRuns = 65536;      // of a pull
constexpr std::size_t kMaxAgain = 4096;  // chunks

bool InRange(std::int64_t number) { return number >= 0 && number <= kMaxIndex; }

absl::Status Malformed(std::string_view why) { return Refuse(Reason::MESSAGE_MALFORMED, "", why); }

}  // namespace

absl::Status SourcePull::Check(const v1::PullBegin& begin) {
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

SourcePull::SourcePull(const v1::PullBegin& begin, std::shared_ptr<Offer> pulled,
                       std::unique_ptr<Drain::Call> admitted)
    : admission(std::move(admitted)), offer(std::move(pulled)) {
  wanted_.regions = begin.regions();
  for (const auto& blocks : begin.blocks()) wanted_.blocks[blocks.group()] = {blocks.first(), blocks.count()};
  for (const auto& held : begin.held()) {
    held_[static_cast<std::size_t>(held.part())].push_back({held.first(), held.count()});
  }
}

bool SourcePull::Holds(const Place& place) const {
  const auto runs = held_.find(place.part);
  return runs != held_.end() &&
         std::any_of(runs->second.begin(), runs->second.end(), [&](const Wanted::Run& run) {
           return place.chunk >= run.first && place.chunk - run.first < run.count;
         });
}

std::optional<SourcePull::Place> SourcePull::Take() {
  if (ended || transport == v1::HANDOFF_TRANSPORT_SAME_HOST) return std::nullopt;
  if (!again_.empty()) {
    const Place place = again_.front();
    again_.pop_front();
    return place;
  }
  for (; next_.part < parts.size(); next_ = {next_.part + 1, 0}) {
    const Part& part = parts[next_.part]->part;
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
  if (done || ended || !complete || loads > 0 || !again_.empty()) return false;
  return transport == v1::HANDOFF_TRANSPORT_SAME_HOST || next_.part == parts.size();
}

absl::Status SourcePull::TakeAgain(const v1::PullAgain& chunk) {
  if (ended) return absl::OkStatus();
  const Place place{static_cast<std::size_t>(chunk.part()), chunk.chunk()};
  if (place.part >= parts.size() || place.chunk < 0 || place.chunk >= ChunkCount(parts[place.part]->part) ||
      again_.size() >= kMaxAgain) {
    return Malformed("a chunk that was never sent is asked for again");
  }
  again_.push_back(place);
  done = false;
  return absl::OkStatus();
}

void SourcePull::End() {
  ended = true;
  loan = nullptr;
  parts.clear();
  again_.clear();
}

}  // namespace kvsummary
