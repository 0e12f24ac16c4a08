#include "server/handoff/acceptance.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

absl::Status CheckDistinct(std::span<const std::int64_t> ids, const std::string& field) {
  std::unordered_set<std::int64_t> seen;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (seen.insert(ids[i]).second) continue;
    return Refuse(Reason::DUPLICATE_BLOCK, absl::StrFormat("%s[%d]", field, i),
                  absl::StrFormat("block %d is named twice", ids[i]));
  }
  return absl::OkStatus();
}

constexpr std::int64_t kMaxChunks = std::int64_t{1} << 22;  // of an offer: what is kept of them is bounded
constexpr std::size_t kMaxQueued = 16;                      // works on the executor, which others need too

absl::Status OutOfRange(std::int64_t resume, std::int64_t committed_tokens) {
  return Refuse(Reason::RESUME_OUT_OF_RANGE, "resume_position",
                absl::StrFormat("the request has %d committed tokens: it cannot resume at %d",
                                committed_tokens, resume));
}

// Whether one of the runs, which rise, has the block.
bool IsIn(const std::vector<Wanted::Run>& runs, std::int64_t block) {
  const auto behind = std::upper_bound(runs.begin(), runs.end(), block,
                                       [](std::int64_t b, const Wanted::Run& run) { return b < run.first; });
  return behind != runs.begin() && block - std::prev(behind)->first < std::prev(behind)->count;
}

}  // namespace

absl::Status Acceptance::Check(const AcceptTarget& target) {
  const CacheGeometry& g = target.cache->geometry();
  if (target.resume < 0 || target.resume > kMaxIndex) {
    return Refuse(Reason::RESUME_OUT_OF_RANGE, "resume_position",
                  absl::StrFormat("resume_position is %d, not between 0 and 2^31 - 1", target.resume));
  }
  if (auto s = CheckBlocks(g, {0, target.blocks}, 0, target.resume / kRegionTokens, "block_ids"); !s.ok()) {
    return s;
  }
  if (auto s = CheckDistinct(target.blocks, "block_ids"); !s.ok()) return s;
  if (auto s = CheckRingBlock(g, target.ring_block, "ring"); !s.ok()) return s;
  std::unordered_set<std::int32_t> named;
  for (std::size_t i = 0; i < target.groups.size(); ++i) {
    const AcceptTarget::Group& group = target.groups[i];
    const std::string field = absl::StrFormat("groups[%d]", i);
    if (auto s = CheckGroup(target.bound.get(), target.group_specs, group.group, field); !s.ok()) return s;
    if (!named.insert(group.group).second) {
      return Refuse(Reason::GROUP_OUT_OF_RANGE, field + ".group", "the group is named twice");
    }
    if (group.first < 0 || group.first > kMaxIndex) {
      return Refuse(Reason::COUNT_OUT_OF_RANGE, field + ".first_block_index",
                    absl::StrFormat("first_block_index is %d", group.first));
    }
    if (auto s = CheckIds(group.blocks, target.bound->blocks, field + ".block_ids"); !s.ok()) return s;
    if (auto s = CheckDistinct(group.blocks, field + ".block_ids"); !s.ok()) return s;
  }
  return absl::OkStatus();
}

Acceptance::Acceptance(AcceptTarget target, Bounces& bounces, Done done)
    : target_(std::move(target)), bounces_(bounces), done_(std::move(done)) {
  wanted_.regions = target_.resume / kRegionTokens;
  place_ = {.cache = target_.cache.get(),
            .bound = target_.bound.get(),
            .blocks = {0, target_.blocks},
            .ring_block = target_.ring_block,
            .regions = wanted_.regions,
            .rows_from = wanted_.regions * kRegionTokens,
            .rows_to = target_.resume};
  for (const AcceptTarget::Group& group : target_.groups) {
    if (group.blocks.empty()) continue;
    wanted_.blocks[group.group] = {group.first, std::ssize(group.blocks)};
    place_.groups[group.group] = {group.first, group.blocks};
  }
  regions_.resize(static_cast<std::size_t>(target_.cache->geometry().layers));
}

absl::Status Acceptance::CheckResume(std::int64_t committed_tokens,
                                     const std::vector<std::int64_t>& positions) const {
  if (target_.resume > committed_tokens) return OutOfRange(target_.resume, committed_tokens);
  if (CanResume(target_.resume, committed_tokens, positions)) return absl::OkStatus();
  return Refuse(
      Reason::RESUME_NOT_SERVABLE, "resume_position",
      absl::StrFormat("rows that a request of %d tokens needs to resume at %d are gone; the nearest "
                      "position that can be served is %d",
                      committed_tokens, target_.resume,
                      NearestResume(target_.resume, committed_tokens, positions)));
}

absl::Status Acceptance::Begin(const OfferFacts& facts) {
  const CacheGeometry& g = target_.cache->geometry();
  auto checked = [&]() -> absl::Status {
    if (facts.layers != g.layers) {
      return Refuse(Reason::GEOMETRY_DIFFERS, "cache",
                    absl::StrFormat("the offer is of %d layers, the cache has %d", facts.layers, g.layers));
    }
    if (!wanted_.blocks.empty() && facts.block_size != g.block_size) {
      return Refuse(Reason::GEOMETRY_DIFFERS, "cache",
                    absl::StrFormat("groups of other views have blocks of %d tokens, the cache's have %d",
                                    facts.block_size, g.block_size));
    }
    if (!facts.complete) return absl::OkStatus();
    if (facts.committed_tokens < 0 || facts.committed_tokens > kMaxIndex ||
        !std::is_sorted(facts.positions.begin(), facts.positions.end())) {
      return Refuse(Reason::MESSAGE_MALFORMED, "", "the source's offer has impossible positions");
    }
    return CheckResume(facts.committed_tokens, facts.positions);
  }();
  if (!checked.ok()) Fail(checked);
  return checked;
}

absl::Status Acceptance::AddPart(std::int32_t number, Part part) {
  auto added = [&]() -> absl::Status {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    const auto malformed = [](std::string_view why) {
      return Refuse(Reason::MESSAGE_MALFORMED, "part", absl::StrFormat("the source's part %s", why));
    };
    if (number >= 0 && number < std::ssize(parts_)) return absl::OkStatus();
    if (number != std::ssize(parts_) || number >= kMaxOfferParts) return malformed("comes out of its order");
    if (auto s = CheckPart(part, target_.cache->geometry().layers); !s.ok()) return s;
    switch (part.kind) {
      case PartKind::kSummaries:
        for (int l = part.layers.first; l < part.layers.first + part.layers.count; ++l) {
          std::int64_t& has = regions_[static_cast<std::size_t>(l)];
          if (has != part.first) return malformed("does not follow what its layers have");
          has += part.count;
        }
        break;
      case PartKind::kRows:
        if (!positions_.empty() || part.layers.first != 0 ||
            part.layers.count != target_.cache->geometry().layers) {
          return malformed("has rows of some layers, or a second time");
        }
        positions_ = part.positions;
        break;
      case PartKind::kBlocks: {
        if (part.group < 0 || part.group >= std::ssize(target_.group_specs)) break;  // not one of ours
        if (!wanted_.blocks.contains(part.group)) break;
        const GroupSpec& spec = target_.group_specs[static_cast<std::size_t>(part.group)];
        if (spec.bytes_per_block != part.unit_bytes) {
          return Refuse(Reason::GEOMETRY_DIFFERS, "groups",
                        absl::StrFormat("blocks of group %d have %d bytes, here %d", part.group,
                                        part.unit_bytes, spec.bytes_per_block));
        }
        auto& runs = group_runs_[part.group];
        if (!runs.empty() && part.first < runs.back().first + runs.back().count) {
          return malformed("has blocks a second time");
        }
        runs.push_back({part.first, part.count});
        break;
      }
    }
    auto known = std::make_unique<Known>();
    const bool ours = part.kind != PartKind::kBlocks || wanted_.blocks.contains(part.group);
    const std::int64_t chunks = ours ? ChunkCount(part) : 0;
    if (chunks > kMaxChunks - chunks_) return malformed("is one of too many chunks");
    chunks_ += chunks;
    known->wanted.resize(static_cast<std::size_t>(chunks));
    for (std::int64_t c = 0; c < chunks; ++c) {
      const bool wanted = IsWanted(wanted_, part, ChunkAt(part, c));
      known->wanted[static_cast<std::size_t>(c)] = wanted;
      known->left += wanted ? 1 : 0;
    }
    known->part = std::move(part);
    parts_.push_back(std::move(known));
    return absl::OkStatus();
  }();
  if (!added.ok()) Fail(added);
  return added;
}

// Parts that have come do not change.
const Part* Acceptance::FindPart(std::int32_t number) const {
  const std::lock_guard lock(mutex_);
  if (number < 0 || number >= std::ssize(parts_)) return nullptr;
  return &parts_[static_cast<std::size_t>(number)]->part;
}

bool Acceptance::Wants(std::int32_t number, std::int64_t chunk) const {
  const std::lock_guard lock(mutex_);
  if (!status_.ok() || number < 0 || number >= std::ssize(parts_) || chunk < 0) return false;
  const std::vector<bool>& wanted = parts_[static_cast<std::size_t>(number)]->wanted;
  return chunk < std::ssize(wanted) && wanted[static_cast<std::size_t>(chunk)];
}

std::int64_t Acceptance::BytesOfChunk(std::int32_t number, std::int64_t chunk) const {
  const Part* part = FindPart(number);
  return part != nullptr && chunk >= 0 && chunk < ChunkCount(*part) ? ChunkAt(*part, chunk).bytes() : 0;
}

std::vector<Acceptance::HeldRun> Acceptance::Held() const {
  std::vector<HeldRun> runs;
  const std::lock_guard lock(mutex_);
  for (std::int32_t number = 0; number < std::ssize(parts_); ++number) {
    const std::vector<bool>& wanted = parts_[static_cast<std::size_t>(number)]->wanted;
    for (std::int64_t c = 0; c < std::ssize(wanted); ++c) {
      if (wanted[static_cast<std::size_t>(c)]) continue;
      if (!runs.empty() && runs.back().part == number && runs.back().first + runs.back().count == c) {
        ++runs.back().count;
      } else {
        runs.push_back({number, c, 1});
      }
    }
  }
  return runs;
}

void Acceptance::Write(std::int32_t number, std::int64_t chunk, const char* data,
                       std::shared_ptr<const void> hold) {
  if (BytesOfChunk(number, chunk) == 0) return;
  Run(number, chunk, 1, ChunkAt(*FindPart(number), chunk), data, false, std::move(hold));
}

void Acceptance::WriteFromHost(std::int32_t number, std::int64_t chunk, const char* data,
                               std::shared_ptr<const void> hold) {
  if (BytesOfChunk(number, chunk) == 0) return;
  Run(number, chunk, 1, ChunkAt(*FindPart(number), chunk), data, true, std::move(hold));
}

void Acceptance::WritePart(std::int32_t number, const char* data, std::shared_ptr<const void> hold) {
  const Part* part = FindPart(number);
  if (part == nullptr || ChunkCount(*part) == 0) return;
  Run(number, 0, ChunkCount(*part), WholePart(*part), data, false, std::move(hold));
}

void Acceptance::Run(std::int32_t number, std::int64_t first, std::int64_t count, const Chunk& chunk,
                     const char* data, bool from_host, std::shared_ptr<const void> hold) {
  std::int64_t taken = 0;
  const Part* part = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!status_.ok() || told_) return;
    Known& known = *parts_[static_cast<std::size_t>(number)];
    part = &known.part;
    // Of a group that is not wanted there are none.
    const std::int64_t end = std::min(first + count, std::ssize(known.wanted));
    for (std::int64_t c = first; c < end; ++c) {
      auto wanted = known.wanted[static_cast<std::size_t>(c)];
      if (wanted) ++taken;
      wanted = false;
    }
    if (taken == 0) return;  // it was not wanted, or has come before
    ++under_way_;
  }
  auto work = [self = shared_from_this(), number, taken, chunk, data, from_host, hold = std::move(hold),
               part]() mutable {
    auto moved = self->MoveNow(*part, chunk, data, from_host);
    hold.reset();
    self->Written(number, taken, moved);
  };
  Queue(std::move(work));
}

// Gives the executor a few works at a time.
void Acceptance::Queue(Executor::Work work) {
  {
    const std::lock_guard lock(mutex_);
    if (queued_ >= kMaxQueued) {
      waiting_.push_back(std::move(work));
      return;
    }
    ++queued_;
  }
  device().executor().SubmitFree(std::move(work));
}

// (executor)
absl::StatusOr<MovedPart> Acceptance::MoveNow(const Part& part, const Chunk& chunk, const char* data,
                                              bool from_host) {
  if (auto s = status(); !s.ok()) return s;
  absl::StatusOr<const char*> here = data;
  if (from_host) here = bounces_.Land(device(), data, chunk.bytes());
  if (!here.ok()) return here.status();
  return MovePart(device(), place_, part, chunk, const_cast<char*>(*here), Toward::kCache);
}

void Acceptance::Written(std::int32_t number, std::int64_t chunks, const absl::StatusOr<MovedPart>& moved) {
  std::unique_lock lock(mutex_);
  --under_way_;
  --queued_;
  status_.Update(moved.status());
  if (moved.ok()) {
    accepted_.device_time += moved->time;
    accepted_.bytes += moved->bytes;
    parts_[static_cast<std::size_t>(number)]->left -= chunks;
  }
  if (status_.ok() && !waiting_.empty()) {
    Executor::Work next = std::move(waiting_.front());
    waiting_.pop_front();
    ++queued_;
    lock.unlock();
    device().executor().SubmitFree(std::move(next));
    lock.lock();
  }
  EndIfOver(std::move(lock));
}

// With mutex_ held.
absl::Status Acceptance::CheckCoverage() const {
  if (auto s = CheckResume(accepted_.committed_tokens, positions_); !s.ok()) return s;
  for (std::size_t l = 0; l < regions_.size(); ++l) {
    if (regions_[l] >= wanted_.regions) continue;
    return Refuse(Reason::HANDOFF_INCOMPLETE, "handoff",
                  absl::StrFormat("the offer has %d regions of layer %d, %d are needed", regions_[l], l,
                                  wanted_.regions));
  }
  for (std::size_t i = 0; i < target_.groups.size(); ++i) {
    const AcceptTarget::Group& group = target_.groups[i];
    const auto runs = group_runs_.find(group.group);
    for (std::size_t b = 0; b < group.blocks.size(); ++b) {
      const std::int64_t block = group.first + static_cast<std::int64_t>(b);
      if (runs != group_runs_.end() && IsIn(runs->second, block)) continue;
      return Refuse(Reason::HANDOFF_BLOCK_NOT_OFFERED, absl::StrFormat("groups[%d].block_ids[%d]", i, b),
                    absl::StrFormat("block %d of group %d was not offered", block, group.group));
    }
  }
  return absl::OkStatus();
}

void Acceptance::SourceDone(std::int64_t committed_tokens) {
  std::unique_lock lock(mutex_);
  if (!source_done_) {
    source_done_ = true;
    accepted_.committed_tokens = committed_tokens;
    status_.Update(CheckCoverage());
  }
  EndIfOver(std::move(lock));
}

void Acceptance::Fail(const absl::Status& why) {
  std::unique_lock lock(mutex_);
  if (!told_) status_.Update(why);
  EndIfOver(std::move(lock));
}

absl::Status Acceptance::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void Acceptance::EndIfOver(std::unique_lock<std::mutex> lock) {
  if (!status_.ok() && !waiting_.empty()) {
    // What is dropped lets go of what it holds without the lock.
    std::deque<Executor::Work> dropped;
    dropped.swap(waiting_);
    under_way_ -= std::ssize(dropped);
    lock.unlock();
    dropped.clear();
    lock.lock();
  }
  if (told_ || under_way_ > 0) return;
  const bool complete = source_done_ && std::all_of(parts_.begin(), parts_.end(),
                                                    [](const auto& known) { return known->left == 0; });
  if (status_.ok() && !complete) return;
  told_ = true;
  Done done = std::move(done_);
  absl::StatusOr<Accepted> answer = accepted_;
  if (!status_.ok()) answer = status_;
  lock.unlock();
  std::move(done)(std::move(answer));
}

}  // namespace kvsummary
