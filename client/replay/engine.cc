#include "client/replay/engine.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "client/replay/channel.h"
#include "client/replay/rows.h"
#include "client/replay/update_call.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// One call, or the end of a step.
struct Call {
  std::optional<UpdateKind> kind;  // none: the end of a step
  std::shared_ptr<const Step> step;
  LayerSpan layers;
  std::vector<std::uint16_t> rows;  // only grows: the call's are the first ones

  const PlannedUpdate& update() const { return kind == UpdateKind::kPrefill ? step->prefill : step->decode; }
};

using Calls = Channel<Call, 4>;

// Plans steps and makes rows, on a thread of its own.
class Producer {
 public:
  Producer(std::span<const TraceRequest> requests, const SchedulerOptions& scheduling,
           const EngineOptions& options, Calls& calls)
      : scheduler_(requests, scheduling), options_(options), calls_(calls) {}

  void Run() {
    for (;;) {
      const auto step = std::make_shared<Step>();
      const auto next = scheduler_.Next(*step);
      if (!next.ok()) status_ = next.status();
      if (!next.ok() || !*next) break;
      const UpdateKind decode = options_.geometry.k > 0 ? UpdateKind::kVerify : UpdateKind::kDecode;
      if (!PutUpdate(UpdateKind::kPrefill, step) || !PutUpdate(decode, step) || !PutStepEnd(step)) return;
    }
    calls_.Close();
  }

  // Why it ended early, once Run has returned.
  const absl::Status& status() const { return status_; }

 private:
  bool PutUpdate(UpdateKind kind, const std::shared_ptr<const Step>& step) {
    const PlannedUpdate& update = kind == UpdateKind::kPrefill ? step->prefill : step->decode;
    if (update.rows() == 0) return true;
    for (const LayerSpan layers : SplitLayers(options_.geometry.layers, update.rows())) {
      Call* call = calls_.BeginPut();
      if (call == nullptr) return false;
      call->kind = kind;
      call->step = step;
      call->layers = layers;
      MakeRows(options_.seed, update.keys, layers, call->rows);
      calls_.EndPut();
    }
    return true;
  }

  bool PutStepEnd(const std::shared_ptr<const Step>& step) {
    Call* call = calls_.BeginPut();
    if (call == nullptr) return false;
    call->kind.reset();
    call->step = step;
    calls_.EndPut();
    return true;
  }

  Scheduler scheduler_;
  const EngineOptions& options_;
  Calls& calls_;
  absl::Status status_;
};

// The prefix store of a producer: looks nothing up, and touches no block, before the steps that have been put
// are applied and published.
class OrderedPrefixes final : public PrefixStore {
 public:
  OrderedPrefixes(PrefixStore* store, Calls& calls) : store_(store), calls_(calls) {}

  absl::StatusOr<FoundPrefix> Find(std::int64_t request) override {
    if (!calls_.AwaitTaken()) return absl::CancelledError("the engine has stopped");
    return store_->Find(request);
  }
  absl::StatusOr<std::int64_t> Load(std::span<const std::int64_t> blocks) override {
    return store_->Load(blocks);
  }
  absl::Status Drop() override { return store_->Drop(); }
  absl::Status Publish(const PublishedBlocks& published) override { return store_->Publish(published); }

 private:
  PrefixStore* const store_;
  Calls& calls_;
};

// Makes the calls and checks, on the caller's thread.
class Consumer {
 public:
  Consumer(std::span<const TraceRequest> requests, const EngineOptions& options, Target& target)
      : requests_(requests), options_(options), target_(target), sampled_(Sample()) {}

  // The target's answer to one update call.
  absl::Status Apply(const Call& call) {
    const PlannedUpdate& u = call.update();
    const std::span<const std::uint16_t> rows(
        call.rows.data(), static_cast<std::size_t>(u.rows() * call.layers.count) * kRowElements);
    const auto start = Clock::now();
    const auto result = CallUpdate(target_, *call.kind, call.layers, u, rows);
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    (call.kind == UpdateKind::kPrefill ? report_.prefill_us : report_.decode_us).push_back(us);
    if (!result.ok()) return result.status();
    if (call.layers.first == 0) report_.regions_closed += result->regions_closed;
    return absl::OkStatus();
  }

  // Publishes the step's blocks and checks the sampled requests that end with it.
  absl::Status EndStep(const Step& step) {
    for (const PublishedBlocks& published : step.published) {
      if (auto status = options_.prefixes->Publish(published); !status.ok()) return status;
    }
    ++report_.steps;
    report_.counts = step.counts;
    for (const FinishedRequest& finished : step.finished) {
      const auto index = static_cast<std::size_t>(finished.request);
      report_.finished.push_back(finished.request);
      if (!sampled_[index]) continue;
      auto result = CheckRequest(finished, requests_[index], options_.geometry, options_.seed, target_);
      if (!result.ok()) return result.status();
      ++report_.sampled_requests;
      report_.checked_regions += result->regions;
      report_.checked_loaded_regions += result->loaded_regions;
      report_.checked_ring_rows += result->ring_rows;
      report_.mismatch_count += std::ssize(result->mismatches);
      for (Mismatch& m : result->mismatches) {
        if (report_.mismatches.size() == ReplayReport::kMaxMismatches) break;
        report_.mismatches.push_back(std::move(m));
      }
    }
    return absl::OkStatus();
  }

  ReplayReport TakeReport(double wall_seconds, bool interrupted) {
    report_.wall_seconds = wall_seconds;
    report_.interrupted = interrupted;
    return std::move(report_);
  }

 private:
  // Which requests are checked: a random choice of the wanted number (selection sampling).
  std::vector<bool> Sample() const {
    std::vector<bool> sampled(requests_.size());
    std::int64_t wanted = options_.sampled_requests;
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      const std::uint64_t left = sampled.size() - i;
      sampled[i] = static_cast<std::int64_t>(MixBits(options_.seed, i, 0, 0) % left) < wanted;
      wanted -= sampled[i] ? 1 : 0;
    }
    return sampled;
  }

  const std::span<const TraceRequest> requests_;
  const EngineOptions& options_;
  Target& target_;
  const std::vector<bool> sampled_;
  ReplayReport report_;
};

std::int64_t DoneRows(const SchedulerCounts& c) {
  return c.prefix_hit_tokens + c.computed_rows - c.rejected_drafts - c.recomputed_rows;
}

SchedulerOptions SchedulingOf(const EngineOptions& options) {
  return {.block_size = options.geometry.block_size,
          .blocks = options.geometry.blocks,
          .concurrency = options.concurrency,
          .chunk_tokens = options.chunk_tokens,
          .k = options.geometry.k,
          .ring_rows_per_block = options.geometry.rows_per_block(),
          .seed = options.seed,
          .order = options.order,
          .prefixes = options.prefixes,
          .publish_output = options.publish_output};
}

}  // namespace

void ReplayReport::Add(const ReplayReport& other) {
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  counts.started += other.counts.started;
  counts.finished += other.counts.finished;
  counts.prompt_tokens += other.counts.prompt_tokens;
  counts.prefix_hit_tokens += other.counts.prefix_hit_tokens;
  counts.output_tokens += other.counts.output_tokens;
  counts.computed_rows += other.counts.computed_rows;
  counts.rejected_drafts += other.counts.rejected_drafts;
  counts.recomputed_rows += other.counts.recomputed_rows;
  counts.preemptions += other.counts.preemptions;
  counts.found_tokens += other.counts.found_tokens;
  counts.ever_found_tokens += other.counts.ever_found_tokens;
  steps += other.steps;
  regions_closed += other.regions_closed;
  append(prefill_us, other.prefill_us);
  append(decode_us, other.decode_us);
  append(finished, other.finished);
  sampled_requests += other.sampled_requests;
  checked_regions += other.checked_regions;
  checked_loaded_regions += other.checked_loaded_regions;
  checked_ring_rows += other.checked_ring_rows;
  mismatch_count += other.mismatch_count;
  append(mismatches, other.mismatches);
  mismatches.resize(std::min(mismatches.size(), kMaxMismatches));
  interrupted = interrupted || other.interrupted;
  if (!other.prefix) return;
  if (!prefix) prefix.emplace();
  prefix->engines += other.prefix->engines;
  prefix->stored_pages += other.prefix->stored_pages;
  prefix->present_pages += other.prefix->present_pages;
  prefix->dropped_pages += other.prefix->dropped_pages;
  prefix->loaded_pages += other.prefix->loaded_pages;
  prefix->loaded_bytes += other.prefix->loaded_bytes;
  prefix->bad_pages += other.prefix->bad_pages;
}

absl::Status CheckReplay(std::span<const TraceRequest> requests, const EngineOptions& options) {
  return Scheduler::Check(requests, SchedulingOf(options));
}

absl::StatusOr<ReplayReport> ReplayTrace(std::span<const TraceRequest> requests, const EngineOptions& options,
                                         Target& target, const ReplayProgress& progress,
                                         const std::atomic<bool>& stop) {
  if (auto status = CheckReplay(requests, options); !status.ok()) return status;
  std::int64_t total = 0;
  for (const std::int64_t i : options.order) total += requests[static_cast<std::size_t>(i)].rows();
  if (options.order.empty()) {
    for (const TraceRequest& r : requests) total += r.rows();
  }

  const auto start = Clock::now();
  const auto calls = std::make_unique<Calls>();
  SchedulerOptions scheduling = SchedulingOf(options);
  OrderedPrefixes prefixes(options.prefixes, *calls);
  if (options.prefixes != nullptr) scheduling.prefixes = &prefixes;
  Producer producer(requests, scheduling, options, *calls);
  std::thread producing([&producer] { producer.Run(); });
  Consumer consumer(requests, options, target);
  absl::Status status;
  bool stopped = false;
  bool interrupted = false;
  while (status.ok()) {
    const Call* call = calls->BeginTake();
    if (call == nullptr) break;
    if (call->kind) {
      status = consumer.Apply(*call);
    } else {
      status = consumer.EndStep(*call->step);
      progress(DoneRows(call->step->counts), total, call->step->counts);
    }
    stopped = !call->kind && options.stop_after > 0 && call->step->counts.finished >= options.stop_after;
    interrupted = stop.load();
    if (stopped || interrupted) break;  // before EndTake: nothing more is looked up
    calls->EndTake();
  }
  calls->Close();
  producing.join();
  if (!status.ok()) return status;
  if (!stopped && !interrupted && !producer.status().ok()) return producer.status();
  return consumer.TakeReport(std::chrono::duration<double>(Clock::now() - start).count(), interrupted);
}

}  // namespace kvsummary
