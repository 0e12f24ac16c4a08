#include "client/replay/pending_handoff.h"

#include <algorithm>

namespace kvsummary {
namespace {

constexpr int kResumePositions = 3;  // n, n - 1 and n - 2 in turn

}  // namespace

double MicrosecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

Lane MakeLane(const CacheGeometry& geometry, std::int64_t lanes, std::int64_t i) {
  Lane lane{.geometry = geometry, .ring_block = 1 + i, .blocks = {}};
  for (std::int64_t block = 1 + i; block <= (geometry.blocks - 1) / lanes * lanes; block += lanes) {
    lane.blocks.push_back(block);
  }
  return lane;
}

PendingHandoff::PendingHandoff(HandoffPath& path, std::int64_t index, const TraceRequest& request,
                               const Lane& lane)
    : path_(path),
      index_(index),
      request_(request),
      lane_(lane),
      resume_(std::max<std::int64_t>(request.input_length - index % kResumePositions, 0)) {}

PendingHandoff::~PendingHandoff() {
  // An error is of no use here: the offer ends with its time, too.
  if (!accepted_ && offer_.offer_id != 0) path_.Cancel(offer_.offer_id).IgnoreError();
  if (accepting_.joinable()) accepting_.join();
}

void PendingHandoff::StartAccept() {
  accepting_ = std::thread([this] { accepted_on_thread_ = Accept(); });
}

PendingHandoff::Accepted PendingHandoff::FinishAccept() {
  Accepted accepted = [this] {
    if (!accepting_.joinable()) return Accept();
    accepting_.join();
    return *std::move(accepted_on_thread_);
  }();
  accepted_ = accepted.result.ok();
  return accepted;
}

PendingHandoff::Accepted PendingHandoff::Accept() {
  const auto start = Clock::now();
  auto result = path_.Accept(
      offer_.handoff, {.resume_position = resume_, .blocks = lane_.blocks, .ring_block = lane_.ring_block});
  return {std::move(result), MicrosecondsSince(start), Clock::now()};
}

}  // namespace kvsummary
