// A request of a disaggregated replay on its way: offered, and accepted now or on a thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/handoff.h"
#include "client/replay/disaggregate.h"
#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

double MicrosecondsSince(std::chrono::steady_clock::time_point start);

// Where a request is in a cache.
struct Lane {
  CacheGeometry geometry;
  std::int64_t ring_block = 0;
  std::vector<std::int64_t> blocks;  // all that the lane has
};

// The i-th of `lanes`; blocks of lanes alternate, so that none are neighbours.
Lane MakeLane(const CacheGeometry& geometry, std::int64_t lanes, std::int64_t i);

// One that is not finished is cancelled.
class PendingHandoff {
 public:
  using Clock = std::chrono::steady_clock;

  // The answer to an Accept, and when it came.
  struct Accepted {
    absl::StatusOr<AcceptResult> result;
    double us = 0;
    Clock::time_point end;
  };

  // Request `index` of the trace, to `lane`. It resumes at its last token, or one or two before, in turn.
  // What is given must outlive it.
  PendingHandoff(HandoffPath& path, std::int64_t index, const TraceRequest& request, const Lane& lane);
  ~PendingHandoff();
  PendingHandoff(const PendingHandoff&) = delete;
  PendingHandoff& operator=(const PendingHandoff&) = delete;

  std::int64_t index() const { return index_; }
  const TraceRequest& request() const { return request_; }
  const Lane& lane() const { return lane_; }
  std::int64_t resume() const { return resume_; }
  const HandoffOffer& offer() const { return offer_; }

  void SetOffer(HandoffOffer offer) { offer_ = std::move(offer); }
  double offer_us = 0;                           // what Offer has taken
  std::optional<Clock::time_point> last_append;  // layer-wise: when the last Append began

  // Accepts on a thread of its own.
  void StartAccept();
  // Waits for that, or accepts now.
  Accepted FinishAccept();

 private:
  Accepted Accept();

  HandoffPath& path_;
  const std::int64_t index_;
  const TraceRequest& request_;
  const Lane& lane_;
  const std::int64_t resume_;
  HandoffOffer offer_;
  bool accepted_ = false;
  std::optional<Accepted> accepted_on_thread_;
  std::thread accepting_;
};

}  // namespace kvsummary
