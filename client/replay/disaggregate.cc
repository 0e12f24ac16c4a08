#include "client/replay/disaggregate.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/replay/pending_handoff.h"
#include "client/replay/rows.h"
#include "client/replay/update_call.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// A cache and its updates, which take turns.
struct Side {
  Target& target;
  std::mutex mutex = {};
};

// What the workers share.
struct Common {
  const std::span<const TraceRequest> requests;
  const DisaggregateOptions& options;
  Side prefill;
  Side decode;
  HandoffPath& path;
  const DisaggregateProgress& progress;
  const std::atomic<bool>& stop;
  std::int64_t total = 0;              // tokens of all requests
  std::atomic<std::int64_t> next = 0;  // request
  std::atomic<bool> failed = false;

  bool stopped() const { return stop || failed; }

  std::mutex mutex = {};
  DisaggregateReport report = {};  // guarded by mutex, as the next three
  std::int64_t finished = 0;       // requests
  std::int64_t done = 0;           // their tokens
  absl::Status status = {};
};

void AppendRow(const Lane& lane, std::int64_t position, RowKey key, PlannedUpdate& update) {
  const std::int64_t block_size = lane.geometry.block_size;
  update.slots.push_back(lane.blocks[static_cast<std::size_t>(position / block_size)] * block_size +
                         position % block_size);
  update.positions.push_back(position);
  update.ring_bases.push_back(lane.ring_block * lane.geometry.rows_per_block());
  update.keys.push_back(key);
  update.closing_rows += position % kRegionTokens == kRegionTokens - 1;
}

// Runs one request after the other: it has one place on the prefill side, and two on the decode side, for the
// request that has been offered and the one that is being.
class Worker {
 public:
  Worker(Common& common, std::int64_t number)
      : common_(common),
        options_(common.options),
        prefill_lane_(MakeLane(options_.prefill, options_.concurrency, number)),
        decode_lanes_{MakeLane(options_.decode, 2 * options_.concurrency, 2 * number),
                      MakeLane(options_.decode, 2 * options_.concurrency, 2 * number + 1)} {}

  void Run() {
    const absl::Status status = RunAll();
    const std::lock_guard lock(common_.mutex);
    if (!status.ok()) common_.failed = true;
    common_.status.Update(status);
    common_.report.Add(report_);
  }

 private:
  absl::Status RunAll() {
    std::unique_ptr<PendingHandoff> offered;
    for (std::int64_t turn = 0;; ++turn) {
      if (common_.stopped()) return absl::OkStatus();
      std::unique_ptr<PendingHandoff> next;
      if (const std::int64_t index = common_.next++; index < std::ssize(common_.requests)) {
        auto made = Prefill(index, decode_lanes_[static_cast<std::size_t>(turn % 2)]);
        if (!made.ok()) return made.status();
        next = *std::move(made);
      }
      if (offered != nullptr) {
        if (auto status = Finish(*offered); !status.ok()) return status;
      }
      if (next == nullptr) return absl::OkStatus();
      offered = std::move(next);
    }
  }

  // Prefills a request and offers it.
  absl::StatusOr<std::unique_ptr<PendingHandoff>> Prefill(std::int64_t index, const Lane& target) {
    const TraceRequest& request = common_.requests[static_cast<std::size_t>(index)];
    auto pending = std::make_unique<PendingHandoff>(common_.path, index, request, target);
    const std::int64_t prompt = request.input_length;
    for (std::int64_t first = 0; first < prompt; first += options_.chunk_tokens) {
      const std::int64_t end = std::min(prompt, first + options_.chunk_tokens);
      PlannedUpdate update;
      for (std::int64_t p = first; p < end; ++p) {
        AppendRow(prefill_lane_, p, TokenRow(request, index, p), update);
      }
      update.query_start_loc.push_back(static_cast<std::int32_t>(update.rows()));
      auto status = Apply(common_.prefill, UpdateKind::kPrefill, options_.prefill.layers, update);
      if (status.ok() && options_.layer_wise) {
        status = first == 0 ? OfferFirst(end, *pending) : AppendChunk(first, end, *pending);
      }
      if (!status.ok()) return status;
    }
    const auto status = options_.layer_wise ? AppendLast(prompt, *pending) : OfferAll(prompt, *pending);
    if (!status.ok()) return status;
    return pending;
  }

  absl::Status OfferAll(std::int64_t tokens, PendingHandoff& pending) {
    return Offer(
        {.committed_tokens = tokens, .blocks = prefill_lane_.blocks, .ring_block = prefill_lane_.ring_block},
        pending);
  }

  // Offers what the first `tokens` have closed, and starts to accept it.
  absl::Status OfferFirst(std::int64_t tokens, PendingHandoff& pending) {
    auto status = Offer({.committed_tokens = tokens, .blocks = prefill_lane_.blocks, .more = true}, pending);
    if (status.ok()) pending.StartAccept();
    return status;
  }

  // Appends what tokens [first, end) have closed, half of the layers after the other.
  absl::Status AppendChunk(std::int64_t first, std::int64_t end, const PendingHandoff& pending) {
    const std::int32_t layers = options_.prefill.layers;
    for (const LayerSpan half : {LayerSpan{0, layers / 2}, LayerSpan{layers / 2, layers - layers / 2}}) {
      if (half.count == 0) continue;  // of one layer
      auto status = Append(
          {.layers = half, .committed_tokens = end, .offered_tokens = first, .blocks = prefill_lane_.blocks},
          pending);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status AppendLast(std::int64_t tokens, PendingHandoff& pending) {
    pending.last_append = Clock::now();
    return Append({.committed_tokens = tokens,
                   .offered_tokens = tokens,
                   .last = true,
                   .ring_block = prefill_lane_.ring_block},
                  pending);
  }

  absl::Status Offer(const OfferedRequest& offered, PendingHandoff& pending) {
    const auto start = Clock::now();
    auto offer = common_.path.Offer(offered);
    if (!offer.ok()) return offer.status();
    pending.offer_us = MicrosecondsSince(start);
    report_.offer_us.push_back(pending.offer_us);
    pending.SetOffer(*std::move(offer));
    return absl::OkStatus();
  }

  absl::Status Append(const AppendedPart& part, const PendingHandoff& pending) {
    const auto start = Clock::now();
    const auto staged = common_.path.Append(pending.offer().offer_id, part);
    if (!staged.ok()) return staged.status();
    report_.append_us.push_back(MicrosecondsSince(start));
    return absl::OkStatus();
  }

  // Accepts a request, and decodes it to its end.
  absl::Status Finish(PendingHandoff& pending) {
    const PendingHandoff::Accepted accepted = pending.FinishAccept();
    if (!accepted.result.ok()) return accepted.result.status();
    if (auto status = Count(pending, accepted); !status.ok()) return status;
    if (auto status = Check(pending, pending.resume()); !status.ok()) return status;
    if (auto status = Decode(pending); !status.ok()) return status;
    if (common_.stopped()) return absl::OkStatus();  // perhaps before the request's end
    if (auto status = Check(pending, pending.request().rows()); !status.ok()) return status;
    ++report_.requests;
    report_.prompt_tokens += pending.request().input_length;
    report_.output_tokens += pending.request().output_length;
    const std::lock_guard lock(common_.mutex);
    common_.done += pending.request().rows();
    common_.progress(common_.done, common_.total, ++common_.finished);
    return absl::OkStatus();
  }

  absl::Status Count(const PendingHandoff& pending, const PendingHandoff::Accepted& accepted) {
    const AcceptResult& result = *accepted.result;
    const std::int64_t regions = pending.resume() / kRegionTokens;
    const std::int64_t bytes =
        options_.decode.layers *
        (regions * kSummaryBytes + pending.resume() % kRegionTokens * std::int64_t{kRowBytes});
    const std::int64_t committed = pending.request().input_length;
    if (result.bytes != bytes || result.committed_tokens != committed) {
      return absl::InternalError(absl::StrFormat(
          "Accept of request %d at position %d answered %d bytes and %d committed tokens instead of %d and "
          "%d",
          pending.index(), pending.resume(), result.bytes, result.committed_tokens, bytes, committed));
    }
    ++report_.handoffs;
    report_.bytes += result.bytes;
    const auto transport = static_cast<std::size_t>(result.transport);
    ++report_.transports[transport < report_.transports.size() ? transport : 0];
    report_.reconnects += result.reconnects;
    report_.damaged_chunks += result.damaged_chunks;
    report_.device_nanoseconds += result.device_time.count();
    report_.accept_us.push_back(accepted.us);
    report_.handoff_us.push_back(
        pending.last_append
            ? std::chrono::duration<double, std::micro>(accepted.end - *pending.last_append).count()
            : pending.offer_us + accepted.us);
    return absl::OkStatus();
  }

  absl::Status Decode(const PendingHandoff& pending) {
    const TraceRequest& request = pending.request();
    const std::int32_t k = options_.decode.k;
    std::int64_t attempt = 0;
    for (std::int64_t computed = pending.resume(); computed < request.rows() && !common_.stopped();
         ++attempt) {
      const std::int64_t rows = std::min<std::int64_t>(k + 1, request.rows() - computed);
      const auto accepted =
          1 + static_cast<std::int64_t>(MixBits(options_.seed, static_cast<std::uint64_t>(pending.index()),
                                                static_cast<std::uint64_t>(computed),
                                                static_cast<std::uint64_t>(attempt)) %
                                        static_cast<std::uint64_t>(rows));
      PlannedUpdate update;
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t p = computed + i;
        AppendRow(
            pending.lane(), p,
            i < accepted ? TokenRow(request, pending.index(), p) : WrongDraftRow(pending.index(), p, attempt),
            update);
      }
      update.query_start_loc.push_back(static_cast<std::int32_t>(rows));
      update.seq_lens.push_back(static_cast<std::int32_t>(computed + rows));
      const UpdateKind kind = k > 0 ? UpdateKind::kVerify : UpdateKind::kDecode;
      if (auto s = Apply(common_.decode, kind, options_.decode.layers, update); !s.ok()) return s;
      computed += accepted;
      report_.rejected_drafts += rows - accepted;
    }
    return absl::OkStatus();
  }

  // Compares what the decode side has of the request's first `rows` positions.
  absl::Status Check(const PendingHandoff& pending, std::int64_t rows) {
    const std::int64_t block_size = options_.decode.block_size;
    const std::vector<std::int64_t>& blocks = pending.lane().blocks;
    const FinishedRequest state{
        .request = pending.index(),
        .rows = rows,
        .ring_block = pending.lane().ring_block,
        .loaded_blocks = 0,
        .blocks = {blocks.begin(), blocks.begin() + (rows + block_size - 1) / block_size}};
    auto result =
        CheckRequest(state, pending.request(), options_.decode, options_.seed, common_.decode.target);
    if (!result.ok()) return result.status();
    report_.checked_regions += result->regions;
    report_.checked_ring_rows += result->ring_rows;
    report_.mismatch_count += std::ssize(result->mismatches);
    for (Mismatch& m : result->mismatches) {
      if (report_.mismatches.size() == DisaggregateReport::kMaxMismatches) break;
      report_.mismatches.push_back(std::move(m));
    }
    return absl::OkStatus();
  }

  absl::Status Apply(Side& side, UpdateKind kind, std::int32_t layers, const PlannedUpdate& update) {
    for (const LayerSpan span : SplitLayers(layers, update.rows())) {
      MakeRows(options_.seed, update.keys, span, rows_);
      const std::span<const std::uint16_t> rows(
          rows_.data(), static_cast<std::size_t>(update.rows() * span.count) * kRowElements);
      const std::lock_guard lock(side.mutex);
      if (auto result = CallUpdate(side.target, kind, span, update, rows); !result.ok()) {
        return result.status();
      }
    }
    return absl::OkStatus();
  }

  Common& common_;
  const DisaggregateOptions& options_;
  const Lane prefill_lane_;
  const std::array<Lane, 2> decode_lanes_;
  std::vector<std::uint16_t> rows_;  // only grows
  DisaggregateReport report_;
};

// Whether `wanted` requests of `tokens` tokens find their places.
absl::Status CheckRoom(const char* side, const CacheGeometry& g, std::int64_t wanted, std::int64_t tokens) {
  const std::int64_t lanes = LanesOf(g, tokens);
  if (lanes >= wanted && g.ring_blocks > wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "the %s cache holds %d requests of %d tokens (%d blocks of %d tokens, %d ring blocks), but %d are "
      "needed",
      side, std::min(lanes, g.ring_blocks - 1), tokens, g.blocks, g.block_size, g.ring_blocks, wanted));
}

}  // namespace

std::int64_t LanesOf(const CacheGeometry& geometry, std::int64_t tokens) {
  const std::int64_t blocks = (tokens + geometry.block_size - 1) / geometry.block_size;
  return (geometry.blocks - 1) / std::max<std::int64_t>(blocks, 1);
}

absl::Status CheckDisaggregate(std::span<const TraceRequest> requests, const DisaggregateOptions& options) {
  if (options.prefill.layers != options.decode.layers) {
    return absl::InvalidArgumentError(absl::StrFormat("the prefill cache has %d layers, the decode cache %d",
                                                      options.prefill.layers, options.decode.layers));
  }
  if (options.concurrency < 1 || options.chunk_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("concurrency is %d and chunk tokens are %d, not positive", options.concurrency,
                        options.chunk_tokens));
  }
  std::int64_t prompt = 0;
  std::int64_t all = 0;
  for (const TraceRequest& r : requests) {
    prompt = std::max<std::int64_t>(prompt, r.input_length);
    all = std::max(all, r.rows());
  }
  if (auto s = CheckRoom("prefill", options.prefill, options.concurrency, prompt); !s.ok()) return s;
  return CheckRoom("decode", options.decode, 2 * std::int64_t{options.concurrency}, all);
}

absl::StatusOr<DisaggregateReport> ReplayDisaggregated(std::span<const TraceRequest> requests,
                                                       const DisaggregateOptions& options, Target& prefill,
                                                       Target& decode, HandoffPath& path,
                                                       const DisaggregateProgress& progress,
                                                       const std::atomic<bool>& stop) {
  if (auto status = CheckDisaggregate(requests, options); !status.ok()) return status;
  const auto start = Clock::now();
  Common common{.requests = requests,
                .options = options,
                .prefill = {prefill},
                .decode = {decode},
                .path = path,
                .progress = progress,
                .stop = stop};
  for (const TraceRequest& r : requests) common.total += r.rows();
  std::vector<std::thread> threads;
  for (std::int64_t number = 0; number < options.concurrency; ++number) {
    threads.emplace_back([&common, number] { Worker(common, number).Run(); });
  }
  for (std::thread& thread : threads) thread.join();
  if (!common.status.ok()) return common.status;
  common.report.wall_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  common.report.interrupted = common.report.requests < std::ssize(requests);
  return std::move(common.report);
}

}  // namespace kvsummary
