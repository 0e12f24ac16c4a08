// An update on its way from a request to the device: what it shares with its client, its checks, its effect.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvsummary/v1/update.pb.h"
#include "server/cache/cache.h"
#include "server/cache/validate.h"
#include "server/ops/stats.h"
#include "server/session/references.h"
#include "server/session/session.h"

namespace kvsummary {

// What an update's SharedStep names; of an update without one, nothing.
struct Shared {
  std::shared_ptr<Session> session;
  std::optional<Counter> ready;
  std::optional<Counter> done;

  bool MustWait() const { return ready && !ready->Reached(); }
};

// Index arrays copied from a client's memory.
struct CopiedArrays {
  std::vector<std::int64_t> slots;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int64_t> ring_bases;

  std::size_t bytes() const {
    return (slots.size() + positions.size() + ring_bases.size()) * sizeof(std::int64_t) +
           (query_start_loc.size() + seq_lens.size()) * sizeof(std::int32_t);
  }
};

// A validated update. `step` points into the request it was parsed from, which must stay, and into what the
// update itself keeps. Movable.
struct Update {
  std::shared_ptr<Cache> cache;
  LayerSpan layers;
  Step step;
  RowsIn rows_in = RowsIn::kHost;
  StepEffect effect;
  Stats::Counter Stats::*steps = nullptr;
  Shared shared;
  CopiedArrays copied;
  std::shared_ptr<Buffer> rows;
};

// Each takes any kind of update: UpdateDecodeRequest, UpdateVerifyRequest, UpdatePrefillRequest or
// StreamUpdatesRequest.

// To be called before the wait for `ready`: it reads no memory of the client's.
template <typename Request>
absl::StatusOr<Shared> FindShared(const SessionManager& sessions, const Request& request);

// To be called after it.
template <typename Request>
absl::StatusOr<Update> Parse(const CacheManager& caches, const Request& request, Shared shared);

// Whether Parse may take milliseconds for arrays by reference.
template <typename Request>
bool SlowToParse(const Request& request);

// (executor) Applies, counts and sets the `done` counter.
absl::Status Apply(Stats& stats, const Update& update);

void FillResult(const StepEffect& effect, v1::UpdateResult* result);

// Runs `work` on a thread of gRPC's.
void OnGrpcThread(std::function<void()> work);

}  // namespace kvsummary
