// A replay on two daemons: one prefills, the other decodes, and each request is handed over in between.
//
// For every request of the trace: its prompt is prefilled in chunks, offered, and accepted on the other side
// into other blocks, in another layout; there it resumes at its last token, or one or two before (as engines
// do that rewind), and is decoded to its end, which closes the region that was handed over open. The decode
// side's bytes are compared with the independent computation (client/replay/check.h) after every hand-off and
// at each request's end. The blocks of an offer hold the next request before the offer is accepted: what
// arrives is what was frozen.
//
// Layer-wise, the offer is made with the first chunk and accepted at once; each later chunk is appended, in
// two runs of layers, and at last the ring. Then the blocks are used again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/handoff.h"
#include "client/replay/check.h"
#include "client/replay/target.h"
#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

// The way from one cache to the other. Thread-safe. Errors are the daemons'.
class HandoffPath {
 public:
  virtual ~HandoffPath() = default;
  virtual absl::StatusOr<HandoffOffer> Offer(const OfferedRequest& offered) = 0;
  virtual absl::StatusOr<std::int64_t> Append(std::uint64_t offer_id, const AppendedPart& part) = 0;
  virtual absl::StatusOr<AcceptResult> Accept(const std::string& handoff,
                                              const AcceptedRequest& accepted) = 0;
  virtual absl::Status Cancel(std::uint64_t offer_id) = 0;
};

struct DisaggregateOptions {
  CacheGeometry prefill;             // of the source's cache
  CacheGeometry decode;              // of the target's; k > 0: verify steps instead of decode
  std::int32_t concurrency = 1;      // requests at a time on either side, see LanesOf
  std::int32_t chunk_tokens = 8192;  // prefill rows of a call at most
  std::uint64_t seed = 0;
  bool layer_wise = false;
};

// Requests of `tokens` tokens that a cache holds at a time: each has ring block 1 + i and its own blocks.
std::int64_t LanesOf(const CacheGeometry& geometry, std::int64_t tokens);

// What has been done, by one worker or by Add several.
struct DisaggregateReport {
  void Add(const DisaggregateReport& other);

  std::int64_t requests = 0;  // finished
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t rejected_drafts = 0;

  std::int64_t handoffs = 0;
  std::int64_t bytes = 0;                    // accepted
  std::array<std::int64_t, 5> transports{};  // hand-offs, by HandoffTransport
  std::int64_t reconnects = 0;
  std::int64_t damaged_chunks = 0;
  std::int64_t device_nanoseconds = 0;
  // Latencies of calls, in microseconds.
  std::vector<double> offer_us, append_us, accept_us;
  // Of hand-offs: Offer and Accept, without what is done in between; layer-wise from the last Append to
  // Accept's answer.
  std::vector<double> handoff_us;

  std::int64_t checked_regions = 0;    // over all layers
  std::int64_t checked_ring_rows = 0;  // over all layers
  std::int64_t mismatch_count = 0;
  std::vector<Mismatch> mismatches;  // the first kMaxMismatches
  double wall_seconds = 0;           // not added
  bool interrupted = false;

  static constexpr std::size_t kMaxMismatches = 20;
};

// Called after each request, on any thread, one at a time; `done` and `total` count tokens with rows.
using DisaggregateProgress =
    std::function<void(std::int64_t done, std::int64_t total, std::int64_t finished)>;

// INVALID_ARGUMENT for options that no engine could run these requests with.
absl::Status CheckDisaggregate(std::span<const TraceRequest> requests, const DisaggregateOptions& options);

// Runs until all requests have finished or `stop` is set; offers that are not accepted by then are cancelled.
// An error is the first of a target or the path, or INTERNAL where an answer does not agree with
// what was asked.
absl::StatusOr<DisaggregateReport> ReplayDisaggregated(std::span<const TraceRequest> requests,
                                                       const DisaggregateOptions& options, Target& prefill,
                                                       Target& decode, HandoffPath& path,
                                                       const DisaggregateProgress& progress,
                                                       const std::atomic<bool>& stop);

}  // namespace kvsummary
