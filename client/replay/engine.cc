#include "client/replay/engine.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/replay/channel.h"
#include "client/replay/rows.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// A call carries as many layers as stay below this, one at least: it fits gRPC's 4 MiB if a layer does.
constexpr std::int64_t kCallRowBytes = (4 << 20) - (256 << 10);

enum class CallKind { kPrefill, kDecode, kVerify, kStepEnd };

// One call, or the end of a step.
struct Call {
  CallKind kind = CallKind::kStepEnd;
  std::shared_ptr<const Step> step;
  LayerSpan layers;
  std::vector<std::uint16_t> rows;  // only grows: the call's are the first ones

  const PlannedUpdate& update() const { return kind == CallKind::kPrefill ? step->prefill : step->decode; }
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
      if (!scheduler_.Next(*step)) break;
      const CallKind decode = options_.geometry.k > 0 ? CallKind::kVerify : CallKind::kDecode;
      if (!PutUpdate(CallKind::kPrefill, step) || !PutUpdate(decode, step) || !PutStepEnd(step)) return;
    }
    calls_.Close();
  }

 private:
  bool PutUpdate(CallKind kind, const std::shared_ptr<const Step>& step) {
    const PlannedUpdate& update = kind == CallKind::kPrefill ? step->prefill : step->decode;
    if (update.rows() == 0) return true;
    const std::int32_t layers = options_.geometry.layers;
    const auto layers_per_call = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(kCallRowBytes / (update.rows() * kRowBytes), 1, layers));
    for (std::int32_t first = 0; first < layers; first += layers_per_call) {
      Call* call = calls_.BeginPut();
      if (call == nullptr) return false;
      call->kind = kind;
      call->step = step;
      call->layers = {first, std::min(layers_per_call, layers - first)};
      MakeRows(update.keys, *call);
      calls_.EndPut();
    }
    return true;
  }

  bool PutStepEnd(const std::shared_ptr<const Step>& step) {
    Call* call = calls_.BeginPut();
    if (call == nullptr) return false;
    call->kind = CallKind::kStepEnd;
    call->step = step;
    calls_.EndPut();
    return true;
  }

  void MakeRows(std::span<const RowKey> keys, Call& call) const {
    const std::size_t size = static_cast<std::size_t>(call.layers.count) * keys.size() * kRowElements;
    if (call.rows.size() < size) call.rows.resize(size);
    std::uint16_t* out = call.rows.data();
    for (std::int32_t layer = call.layers.first; layer < call.layers.first + call.layers.count; ++layer) {
      for (const RowKey& key : keys) {
        FillRow(options_.seed, key, layer, out);
        out += kRowElements;
      }
    }
  }

  Scheduler scheduler_;
  const EngineOptions& options_;
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
    absl::StatusOr<UpdateResult> result;
    switch (call.kind) {
      case CallKind::kPrefill:
        result = target_.Prefill(call.layers, {u.slots, u.positions, u.query_start_loc, u.ring_bases, rows});
        break;
      case CallKind::kVerify:
        result = target_.Verify(call.layers, {u.slots, u.query_start_loc, u.seq_lens, u.ring_bases, rows});
        break;
      default:
        result = target_.Decode(call.layers, {u.slots, u.positions, u.ring_bases, rows});
    }
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    (call.kind == CallKind::kPrefill ? prefill_us_ : decode_us_).push_back(us);
    if (!result.ok()) return result.status();
    if (result->rows != u.rows() || result->regions_closed != u.closing_rows) {
      return absl::InternalError(absl::StrFormat(
          "an update of %d rows that closes %d regions was answered with %d rows and %d regions", u.rows(),
          u.closing_rows, result->rows, result->regions_closed));
    }
    if (call.layers.first == 0) report_.regions_closed += result->regions_closed;
    return absl::OkStatus();
  }

  // Checks the sampled requests that end with the step.
  absl::Status EndStep(const Step& step) {
    ++report_.steps;
    report_.counts = step.counts;
    for (const FinishedRequest& finished : step.finished) {
      const auto index = static_cast<std::size_t>(finished.request);
      if (!sampled_[index]) continue;
      auto result = CheckRequest(finished, requests_[index], options_.geometry, options_.seed, target_);
      if (!result.ok()) return result.status();
      ++report_.sampled_requests;
      report_.checked_regions += result->regions;
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
    report_.prefill = Summarize(prefill_us_);
    report_.decode = Summarize(decode_us_);
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

  static LatencySummary Summarize(std::vector<double>& us) {
    if (us.empty()) return {};
    const auto at = [&us](double part) {
      const auto nth = us.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(us.size() - 1));
      std::nth_element(us.begin(), nth, us.end());
      return *nth;
    };
    return {std::ssize(us), at(0.5), at(0.99)};
  }

  const std::span<const TraceRequest> requests_;
  const EngineOptions& options_;
  Target& target_;
  const std::vector<bool> sampled_;
  std::vector<double> prefill_us_, decode_us_;
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
          .seed = options.seed};
}

}  // namespace

absl::Status CheckReplay(std::span<const TraceRequest> requests, const EngineOptions& options) {
  return Scheduler::Check(requests, SchedulingOf(options));
}

absl::StatusOr<ReplayReport> ReplayTrace(std::span<const TraceRequest> requests, const EngineOptions& options,
                                         Target& target, const ReplayProgress& progress,
                                         const std::atomic<bool>& stop) {
  if (auto status = CheckReplay(requests, options); !status.ok()) return status;
  std::int64_t total = 0;
  for (const TraceRequest& r : requests) total += r.rows();

  const auto start = Clock::now();
  const auto calls = std::make_unique<Calls>();
  Producer producer(requests, SchedulingOf(options), options, *calls);
  std::thread producing([&producer] { producer.Run(); });
  Consumer consumer(requests, options, target);
  absl::Status status;
  bool interrupted = false;
  while (status.ok()) {
    const Call* call = calls->BeginTake();
    if (call == nullptr) break;
    if (call->kind != CallKind::kStepEnd) {
      status = consumer.Apply(*call);
    } else {
      status = consumer.EndStep(*call->step);
      progress(DoneRows(call->step->counts), total, call->step->counts);
    }
    calls->EndTake();
    interrupted = stop.load();
    if (interrupted) break;
  }
  calls->Close();
  producing.join();
  if (!status.ok()) return status;
  return consumer.TakeReport(std::chrono::duration<double>(Clock::now() - start).count(), interrupted);
}

}  // namespace kvsummary
