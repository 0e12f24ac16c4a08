#include "client/replay/scheduler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/layout.h"

namespace kvsummary {
struct Scheduler::Request {
  const TraceRequest* trace = nullptr;
  std::int64_t index = 0;
  std::int64_t rows = 0;            // of the whole request
  std::int64_t prefill_target = 0;  // rows that come through prefill: the prompt, or all before a preemption
  std::int64_t computed = 0;        // rows applied
  std::int64_t lost = 0;            // rows applied before a preemption
  std::int64_t attempt = 0;         // verify steps so far
  std::int64_t published = 0;       // blocks found or published
  std::int64_t loaded = 0;          // blocks that came from the prefix store
  bool looked_up = false;           // counted as found
  std::int64_t ring_block = 0;
  std::vector<std::int64_t> blocks;

  bool prefilling() const { return computed < prefill_target; }
};

absl::Status Scheduler::Check(std::span<const TraceRequest> requests, const SchedulerOptions& options) {
  const auto positive = [](const char* field, std::int64_t value) {
    return value > 0 ? absl::OkStatus()
                     : absl::InvalidArgumentError(absl::StrFormat("%s is %d, not positive", field, value));
  };
  for (const auto& status :
       {positive("block size", options.block_size), positive("concurrency", options.concurrency),
        positive("chunk tokens", options.chunk_tokens), positive("blocks", options.blocks)}) {
    if (!status.ok()) return status;
  }
  if (options.block_size % kRegionTokens != 0 || kTraceChunkTokens % options.block_size != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("block size is %d; traces need a multiple of %d that divides %d", options.block_size,
                        kRegionTokens, kTraceChunkTokens));
  }
  if (options.k < 0) return absl::InvalidArgumentError(absl::StrFormat("k is %d, negative", options.k));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::int64_t needed = (requests[i].rows() + options.block_size - 1) / options.block_size;
    if (needed > options.blocks - 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("request %d needs %d blocks, but the cache has %d besides the null block", i,
                          needed, options.blocks - 1));
    }
  }
  return absl::OkStatus();
}

Scheduler::Scheduler(std::span<const TraceRequest> requests, const SchedulerOptions& options)
    : requests_(requests), options_(options), pool_(options.blocks) {
  if (options_.order.empty()) {
    options_.order.resize(requests.size());
    std::iota(options_.order.begin(), options_.order.end(), 0);
  }
  for (std::int64_t ring = options.concurrency; ring > 0; --ring) free_rings_.push_back(ring);
}

Scheduler::~Scheduler() = default;

absl::StatusOr<bool> Scheduler::Next(Step& step) {
  step = Step();
  if (running_.empty() && requeued_.empty() && next_request_ == std::ssize(options_.order)) return false;

  const std::int64_t preemptions = counts_.preemptions;
  std::int64_t budget = options_.chunk_tokens;
  // Preemption shortens running_ from its end, which has not been reached yet.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& r = *running_[i];
    const bool prefilling = r.prefilling();
    const std::int64_t wanted = prefilling ? std::min(budget, r.prefill_target - r.computed)
                                           : std::min<std::int64_t>(options_.k + 1, r.rows - r.computed);
    if (wanted == 0) continue;
    bool reserved = Reserve(r, r.computed + wanted);
    while (!reserved && i < running_.size()) {
      PreemptYoungest();
      reserved = i < running_.size() && Reserve(r, r.computed + wanted);
    }
    if (!reserved) break;
    if (prefilling) {
      PlanPrefill(r, wanted, step.prefill);
      budget -= wanted;
    } else {
      PlanDecode(r, step.decode);
    }
    PublishBlocks(r, step);
  }
  if (counts_.preemptions == preemptions) {
    if (auto status = Admit(budget, step); !status.ok()) return status;
  }
  Finish(step);
  return true;
}

bool Scheduler::Reserve(Request& r, std::int64_t tokens) {
  const std::int64_t missing =
      (tokens + options_.block_size - 1) / options_.block_size - std::ssize(r.blocks);
  if (missing > pool_.free_blocks()) return false;
  for (std::int64_t i = 0; i < missing; ++i) r.blocks.push_back(*pool_.Allocate());
  return true;
}

absl::Status Scheduler::Admit(std::int64_t budget, Step& step) {
  while (budget > 0 && std::ssize(running_) < options_.concurrency) {
    std::unique_ptr<Request> r = NextWaiting();
    if (!r) break;
    const auto room = StartWithPrefix(*r, budget);
    if (!room.ok()) return room.status();
    if (!*room) {
      ReleaseAll(*r);
      requeued_.push_front(std::move(r));
      break;
    }
    r->ring_block = free_rings_.back();
    free_rings_.pop_back();
    counts_.prefix_hit_tokens += std::max<std::int64_t>(0, r->computed - r->lost);
    counts_.recomputed_rows += std::max<std::int64_t>(0, r->lost - r->computed);
    const std::int64_t chunk = std::min(budget, r->prefill_target - r->computed);
    PlanPrefill(*r, chunk, step.prefill);
    PublishBlocks(*r, step);
    budget -= chunk;
    running_.push_back(std::move(r));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Scheduler::StartWithPrefix(Request& r, std::int64_t budget) {
  // The last token is always computed: its output is the next token.
  const std::int64_t usable =
      std::min<std::int64_t>(r.trace->input_length, r.prefill_target - 1) / options_.block_size;
  const auto reserve = [&](std::int64_t found) {
    r.computed = found * options_.block_size;
    return Reserve(r, r.computed + std::min(budget, r.prefill_target - r.computed));
  };
  if (options_.prefixes == nullptr) {
    AcquirePrefix(r, usable);
    return reserve(r.published);
  }
  if (!reserve(0)) return false;  // there is room for no prefix
  const auto found = options_.prefixes->Find(r.index);
  if (!found.ok()) return found.status();
  const std::int64_t wanted = std::min(found->blocks, usable);
  if (!reserve(wanted)) {
    if (auto status = options_.prefixes->Drop(); !status.ok()) return status;
    return false;
  }
  const auto loaded = options_.prefixes->Load(std::span(r.blocks).first(static_cast<std::size_t>(wanted)));
  if (!loaded.ok()) return loaded.status();
  r.published = r.loaded = *loaded;
  r.computed = r.loaded * options_.block_size;
  if (!r.looked_up) {
    counts_.found_tokens += found->blocks * options_.block_size;
    counts_.ever_found_tokens += found->ever * options_.block_size;
    r.looked_up = true;
  }
  return true;
}

std::unique_ptr<Scheduler::Request> Scheduler::NextWaiting() {
  if (!requeued_.empty()) {
    auto r = std::move(requeued_.front());
    requeued_.pop_front();
    return r;
  }
  if (next_request_ == std::ssize(options_.order)) return nullptr;
  auto r = std::make_unique<Request>();
  r->index = options_.order[static_cast<std::size_t>(next_request_++)];
  r->trace = &requests_[static_cast<std::size_t>(r->index)];
  r->rows = r->trace->rows();
  r->prefill_target = r->trace->input_length;
  counts_.started += 1;
  counts_.prompt_tokens += r->trace->input_length;
  return r;
}

void Scheduler::AcquirePrefix(Request& r, std::int64_t usable) {
  for (r.published = 0; r.published < usable; ++r.published) {
    const auto block = pool_.Acquire(PromptBlockKey(*r.trace, r.published, options_.block_size));
    if (!block) return;
    r.blocks.push_back(*block);
  }
}

void Scheduler::PreemptYoungest() {
  std::unique_ptr<Request> r = std::move(running_.back());
  running_.pop_back();
  // A decoding request also has a sampled token whose row is not computed yet.
  if (!r->prefilling()) r->prefill_target = r->computed + 1;
  r->lost = std::exchange(r->computed, 0);
  ReleaseAll(*r);
  free_rings_.push_back(r->ring_block);
  requeued_.push_front(std::move(r));
  ++counts_.preemptions;
}

// From the end: of a prefix the last blocks are forgotten first.
void Scheduler::ReleaseAll(Request& r) {
  for (auto block = r.blocks.rbegin(); block != r.blocks.rend(); ++block) pool_.Release(*block);
  r.blocks.clear();
}

void Scheduler::PlanPrefill(Request& r, std::int64_t rows, PlannedUpdate& update) {
  const std::int64_t end = r.computed + rows;
  for (std::int64_t p = r.computed; p < end; ++p) AppendRow(r, p, TokenRow(*r.trace, r.index, p), update);
  update.query_start_loc.push_back(static_cast<std::int32_t>(update.rows()));
  r.computed = end;
  counts_.computed_rows += rows;
}

void Scheduler::PublishBlocks(Request& r, Step& step) {
  const std::int64_t tokens =
      options_.publish_output ? r.computed : std::min<std::int64_t>(r.computed, r.trace->input_length);
  const std::int64_t full = tokens / options_.block_size;
  if (options_.prefixes == nullptr) {
    for (; r.published < full; ++r.published) {
      pool_.Publish(r.blocks[static_cast<std::size_t>(r.published)],
                    PromptBlockKey(*r.trace, r.published, options_.block_size));
    }
  } else if (r.published < full) {
    step.published.push_back(
        {r.index, r.published, {r.blocks.begin() + r.published, r.blocks.begin() + full}, r.computed});
    r.published = full;
  }
}

void Scheduler::PlanDecode(Request& r, PlannedUpdate& update) {
  const std::int64_t rows = std::min<std::int64_t>(options_.k + 1, r.rows - r.computed);
  const std::int64_t accepted =
      1 + static_cast<std::int64_t>(MixBits(options_.seed, static_cast<std::uint64_t>(r.index),
                                            static_cast<std::uint64_t>(r.computed),
                                            static_cast<std::uint64_t>(r.attempt)) %
                                    static_cast<std::uint64_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t p = r.computed + i;
    AppendRow(r, p, i < accepted ? TokenRow(*r.trace, r.index, p) : WrongDraftRow(r.index, p, r.attempt),
              update);
  }
  update.query_start_loc.push_back(static_cast<std::int32_t>(update.rows()));
  update.seq_lens.push_back(static_cast<std::int32_t>(r.computed + rows));
  ++r.attempt;
  r.computed += accepted;
  counts_.computed_rows += rows;
  counts_.rejected_drafts += rows - accepted;
}

void Scheduler::AppendRow(const Request& r, std::int64_t position, RowKey key, PlannedUpdate& update) const {
  const std::int64_t block = r.blocks[static_cast<std::size_t>(position / options_.block_size)];
  update.slots.push_back(block * options_.block_size + position % options_.block_size);
  update.positions.push_back(position);
  update.ring_bases.push_back(r.ring_block * options_.ring_rows_per_block);
  update.keys.push_back(key);
  update.closing_rows += position % kRegionTokens == kRegionTokens - 1;
}

void Scheduler::Finish(Step& step) {
  const auto finished = std::stable_partition(running_.begin(), running_.end(),
                                              [](const auto& r) { return r->computed < r->rows; });
  for (auto it = finished; it != running_.end(); ++it) {
    Request& r = **it;
    step.finished.push_back({r.index, r.rows, r.ring_block, r.loaded, r.blocks});
    ReleaseAll(r);
    free_rings_.push_back(r.ring_block);
    counts_.finished += 1;
    counts_.output_tokens += r.trace->output_length;
  }
  running_.erase(finished, running_.end());
  step.counts = counts_;
}

}  // namespace kvsummary
