#include "server/rpc/update_step.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

// Rows that are checked in some ten microseconds.
constexpr std::int64_t kQuickRows = 4096;

// Takes a step's arrays one by one, from the message or by copy from a buffer of the session.
class ArrayReader {
 public:
  explicit ArrayReader(const Session* session) : session_(session) {}

  // The array `name`, or nothing and a status of the first that failed. `known`: this kind of step has it.
  template <typename T>
  std::span<const T> Read(const char* name, bool known, const IndexArray<T>& array, std::vector<T>& copy) {
    if (!status_.ok()) return {};
    if (!array.place) return array.values;
    const std::string field = absl::StrCat("shared.arrays.", name);
    if (!known) {
      status_ = Refuse(Reason::SIZE_MISMATCH, field, absl::StrFormat("this kind of step has no %s", name));
      return {};
    }
    if (!array.values.empty()) {
      status_ = Refuse(Reason::SIZE_MISMATCH, name,
                       absl::StrFormat("%s come in the message and by reference", name));
      return {};
    }
    const auto buffer = session_->FindBuffer(array.place->buffer_id);
    if (!buffer.ok()) {
      status_ = AtField(buffer.status(), field);
      return {};
    }
    auto copied = CopyArray<T>(**buffer, array.place->offset, array.place->count, field);
    if (!copied.ok()) {
      status_ = copied.status();
      return {};
    }
    copy = *std::move(copied);
    return copy;
  }

  const absl::Status& status() const { return status_; }

 private:
  const Session* const session_;
  absl::Status status_;
};

absl::StatusOr<StepArrays> ReadArrays(const StepRequest& r, Update& update) {
  const bool verify = r.kind == StepKind::kVerify;
  CopiedArrays& to = update.copied;
  ArrayReader reader(update.shared.session.get());
  StepArrays arrays;
  arrays.slots = reader.Read("slots", true, r.slots, to.slots);
  arrays.positions = reader.Read("positions", !verify, r.positions, to.positions);
  arrays.query_start_loc =
      reader.Read("query_start_loc", r.kind != StepKind::kDecode, r.query_start_loc, to.query_start_loc);
  arrays.seq_lens = reader.Read("seq_lens", verify, r.seq_lens, to.seq_lens);
  arrays.ring_bases = reader.Read("ring_bases", true, r.ring_bases, to.ring_bases);
  if (!reader.status().ok()) return reader.status();
  return arrays;
}

// Rows as the step takes them, and how many bytes of them there are.
struct FoundRows {
  RowsView view;
  std::size_t bytes = 0;
};

absl::StatusOr<FoundRows> ReadRows(const StepRequest& request, std::int64_t count, Update& update) {
  if (!request.rows) return FoundRows{PackedRows(request.row_bytes.data(), count), request.row_bytes.size()};
  const RowsReference& reference = *request.rows;
  if (update.shared.session == nullptr) {
    return Refuse(Reason::SESSION_REQUIRED, "shared.session_id", "rows by reference need a session");
  }
  if (auto s = CheckLayers(update.cache->geometry(), update.layers); !s.ok()) return s;
  auto buffer = update.shared.session->FindBuffer(reference.buffer_id);
  if (!buffer.ok()) return AtField(buffer.status(), "rows.reference.buffer_id");
  const std::string& device = (*buffer)->device();
  if (!device.empty() && device != update.cache->device().name()) {
    return Refuse(Reason::BUFFER_DEVICE, "rows.reference.buffer_id",
                  absl::StrFormat("the buffer is in memory of %s, the cache of %s", device,
                                  update.cache->device().name()));
  }
  const auto view = FindRows(**buffer, reference.place, update.layers.count, count);
  if (!view.ok()) return view.status();
  update.rows_in = device.empty() ? RowsIn::kHost : RowsIn::kDevice;
  update.rows = *std::move(buffer);
  return FoundRows{*view, static_cast<std::size_t>(update.layers.count * count * kRowBytes)};
}

// What tells the kinds of steps apart: their check, counter and arrays.
absl::StatusOr<StepEffect> Check(StepKind kind, const CacheGeometry& geometry, LayerSpan layers,
                                 const StepArrays& arrays, std::size_t row_bytes) {
  switch (kind) {
    case StepKind::kDecode:
      return CheckDecode(geometry, layers, arrays, row_bytes);
    case StepKind::kVerify:
      return CheckVerify(geometry, layers, arrays, row_bytes);
    case StepKind::kPrefill:
      break;
  }
  return CheckPrefill(geometry, layers, arrays, row_bytes);
}

Stats::Counter Stats::*Counted(StepKind kind) {
  switch (kind) {
    case StepKind::kDecode:
      return &Stats::decode_steps;
    case StepKind::kVerify:
      return &Stats::verify_steps;
    case StepKind::kPrefill:
      break;
  }
  return &Stats::prefill_steps;
}

Step Make(StepKind kind, const StepArrays& arrays, const RowsView& in) {
  const auto rows = static_cast<std::int32_t>(arrays.slots.size());
  const std::int64_t* slots = arrays.slots.data();
  const std::int64_t* bases = arrays.ring_bases.data();
  switch (kind) {
    case StepKind::kDecode:
      return DecodeStep{rows, in, slots, arrays.positions.data(), bases};
    case StepKind::kVerify:
      return VerifyStep{rows,
                        static_cast<std::int32_t>(arrays.seq_lens.size()),
                        in,
                        slots,
                        arrays.query_start_loc.data(),
                        arrays.seq_lens.data(),
                        bases};
    case StepKind::kPrefill:
      break;
  }
  return PrefillStep{rows,
                     static_cast<std::int32_t>(arrays.query_start_loc.size()) - 1,
                     in,
                     slots,
                     arrays.positions.data(),
                     arrays.query_start_loc.data(),
                     bases};
}

}  // namespace

absl::StatusOr<Shared> FindShared(std::shared_ptr<Session> session, const std::optional<CounterPlace>& ready,
                                  const std::optional<CounterPlace>& done) {
  Shared shared;
  auto found_ready = FindCounter(*session, ready, "shared.ready");
  if (!found_ready.ok()) return found_ready.status();
  auto found_done = FindCounter(*session, done, "shared.done");
  if (!found_done.ok()) return found_done.status();
  shared.session = std::move(session);
  shared.ready = *std::move(found_ready);
  shared.done = *std::move(found_done);
  return shared;
}

absl::StatusOr<Update> Parse(const CacheManager& caches, const StepRequest& request, Shared shared) {
  auto cache = caches.Find(request.cache, request.generation);
  if (!cache.ok()) return cache.status();
  const std::uint64_t owner = (*cache)->session();
  if (shared.session != nullptr && owner != 0 && owner != shared.session->number()) {
    return Refuse(Reason::CACHE_NOT_YOURS, "cache.name",
                  absl::StrFormat("cache \"%s\" belongs to another session", request.cache));
  }
  Update update;
  update.cache = *std::move(cache);
  update.layers = request.layers;
  update.steps = Counted(request.kind);
  update.shared = std::move(shared);
  const auto arrays = ReadArrays(request, update);
  if (!arrays.ok()) return arrays.status();
  const auto rows = ReadRows(request, static_cast<std::int64_t>(arrays->slots.size()), update);
  if (!rows.ok()) return rows.status();
  auto effect = Check(request.kind, update.cache->geometry(), update.layers, *arrays, rows->bytes);
  if (!effect.ok()) return effect.status();
  update.effect = *effect;
  update.step = Make(request.kind, *arrays, rows->view);
  return update;
}

bool SlowToParse(const StepRequest& r) {
  const auto count = [](const auto& array) {
    return array.place ? array.place->count : std::ssize(array.values);
  };
  return std::max({count(r.slots), count(r.positions), count(r.query_start_loc), count(r.seq_lens),
                   count(r.ring_bases)}) > kQuickRows;
}

absl::Status Apply(Stats& stats, const Update& update) {
  const Session* session = update.shared.session.get();
  if (session != nullptr && session->ended()) {
    return Refuse(Reason::SESSION_ENDED, "shared.session_id", "the session ended before the step's turn");
  }
  if (auto s = update.cache->Apply(update.layers, update.step, update.rows_in); !s.ok()) return s;
  if (update.shared.done) update.shared.done->Set();
  stats.*update.steps += 1;
  stats.token_layers += update.effect.rows * update.layers.count;
  stats.summaries_written += update.effect.regions_closed * update.layers.count;
  return absl::OkStatus();
}

}  // namespace kvsummary
