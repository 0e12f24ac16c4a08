// An update on its way from a request to the device: what it asks for, in whatever form it came (a message,
// an entry of a submission queue), what it shares with its client, its checks, its effect. The one place
// where updates are checked: so every form gets the same errors, in the terms of kvsummary/v1/update.proto.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/cache/validate.h"
#include "server/ops/stats.h"
#include "server/rpc/counters.h"
#include "server/session/references.h"
#include "server/session/session.h"

namespace kvsummary {

enum class StepKind { kDecode, kVerify, kPrefill };

// Places in buffers of the session; offsets in bytes, counts in elements.
struct ArrayPlace {
  std::uint64_t buffer_id = 0;
  std::int64_t offset = 0;
  std::int64_t count = 0;
};
struct RowsReference {
  std::uint64_t buffer_id = 0;
  RowsPlace place;
};

// An index array that came with the request, or the place where it lies.
template <typename T>
struct IndexArray {
  std::span<const T> values = {};
  std::optional<ArrayPlace> place = std::nullopt;
};

// What an update asks for. Points into what it was made of.
struct StepRequest {
  StepKind kind = StepKind::kDecode;
  std::string cache;
  std::uint64_t generation = 0;
  LayerSpan layers;
  IndexArray<std::int64_t> slots;
  IndexArray<std::int64_t> positions;
  IndexArray<std::int32_t> query_start_loc;
  IndexArray<std::int32_t> seq_lens;
  IndexArray<std::int64_t> ring_bases;
  std::string_view row_bytes;  // that came with the request
  std::optional<RowsReference> rows;
};

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

// A validated update. `step` points into what its request was made of, which must stay, and into what the
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

// To be called before the wait for `ready`: it reads no memory of the client's.
absl::StatusOr<Shared> FindShared(std::shared_ptr<Session> session, const std::optional<CounterPlace>& ready,
                                  const std::optional<CounterPlace>& done);

// To be called after it.
absl::StatusOr<Update> Parse(const CacheManager& caches, const StepRequest& request, Shared shared);

// Whether Parse may take milliseconds for arrays by reference.
bool SlowToParse(const StepRequest& request);

// (executor) Applies, counts and sets the `done` counter.
absl::Status Apply(Stats& stats, const Update& update);

}  // namespace kvsummary
