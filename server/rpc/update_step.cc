#include "server/rpc/update_step.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

// Rows that are checked in some ten microseconds.
constexpr std::int64_t kQuickRows = 4096;

// Calls `f` with the update that a message of a stream holds.
template <typename F>
auto WithUpdate(const v1::StreamUpdatesRequest& request, const F& f) -> decltype(f(request.decode())) {
  switch (request.update_case()) {
    case v1::StreamUpdatesRequest::kDecode:
      return f(request.decode());
    case v1::StreamUpdatesRequest::kVerify:
      return f(request.verify());
    case v1::StreamUpdatesRequest::kPrefill:
      return f(request.prefill());
    case v1::StreamUpdatesRequest::UPDATE_NOT_SET:
      break;
  }
  return Refuse(Reason::FIELD_MISSING, "update", "a message of the stream holds no update");
}

absl::StatusOr<std::optional<Counter>> FindCounter(const Session& session, bool present,
                                                   const v1::CounterValue& counter,
                                                   const std::string& field) {
  if (!present) return std::nullopt;
  auto buffer = session.FindBuffer(counter.buffer_id());
  if (!buffer.ok()) return AtField(buffer.status(), field);
  auto found = Counter::Find(*std::move(buffer), counter.offset_bytes(), counter.value(), field);
  if (!found.ok()) return found.status();
  return *std::move(found);
}

absl::StatusOr<Shared> FindSharedStep(const SessionManager& sessions, bool present,
                                      const v1::SharedStep& step) {
  Shared shared;
  if (!present) return shared;
  auto session = sessions.Find(step.session_id());
  if (!session.ok()) return AtField(session.status(), "shared.session_id");
  auto ready = FindCounter(**session, step.has_ready(), step.ready(), "shared.ready");
  if (!ready.ok()) return ready.status();
  auto done = FindCounter(**session, step.has_done(), step.done(), "shared.done");
  if (!done.ok()) return done.status();
  shared.session = *std::move(session);
  shared.ready = *std::move(ready);
  shared.done = *std::move(done);
  return shared;
}

// Takes a step's arrays one by one, from the message or by copy from a buffer of the session.
class ArrayReader {
 public:
  explicit ArrayReader(const Session* session) : session_(session) {}

  // The array `name`, or nothing and a status of the first that failed.
  template <typename T, typename Field>
  std::span<const T> Read(const char* name, const Field& in_message, bool by_reference,
                          const v1::ArrayReference& reference, std::vector<T>& copy) {
    if (!status_.ok()) return {};
    if (!by_reference) return {in_message.data(), static_cast<std::size_t>(in_message.size())};
    if (!in_message.empty()) {
      status_ = Refuse(Reason::SIZE_MISMATCH, name,
                       absl::StrFormat("%s come in the message and by reference", name));
      return {};
    }
    const std::string field = absl::StrCat("shared.arrays.", name);
    const auto buffer = session_->FindBuffer(reference.buffer_id());
    if (!buffer.ok()) {
      status_ = AtField(buffer.status(), field);
      return {};
    }
    auto copied = CopyArray<T>(**buffer, reference.offset_bytes(), reference.count(), field);
    if (!copied.ok()) {
      status_ = copied.status();
      return {};
    }
    copy = *std::move(copied);
    return copy;
  }

  // An array that this kind of step does not have.
  void RefuseIf(const char* name, bool by_reference) {
    if (!status_.ok() || !by_reference) return;
    status_ = Refuse(Reason::SIZE_MISMATCH, absl::StrCat("shared.arrays.", name),
                     absl::StrFormat("this kind of step has no %s", name));
  }

  const absl::Status& status() const { return status_; }

 private:
  const Session* const session_;
  absl::Status status_;
};

template <typename Request>
absl::StatusOr<StepArrays> ReadArrays(const Request& request, Update& update) {
  const auto& refs = request.shared().arrays();
  CopiedArrays& to = update.copied;
  ArrayReader reader(update.shared.session.get());
  StepArrays arrays;
  arrays.slots = reader.Read("slots", request.slots(), refs.has_slots(), refs.slots(), to.slots);
  if constexpr (requires { request.positions(); }) {
    arrays.positions =
        reader.Read("positions", request.positions(), refs.has_positions(), refs.positions(), to.positions);
  } else {
    reader.RefuseIf("positions", refs.has_positions());
  }
  if constexpr (requires { request.query_start_loc(); }) {
    arrays.query_start_loc =
        reader.Read("query_start_loc", request.query_start_loc(), refs.has_query_start_loc(),
                    refs.query_start_loc(), to.query_start_loc);
  } else {
    reader.RefuseIf("query_start_loc", refs.has_query_start_loc());
  }
  if constexpr (requires { request.seq_lens(); }) {
    arrays.seq_lens =
        reader.Read("seq_lens", request.seq_lens(), refs.has_seq_lens(), refs.seq_lens(), to.seq_lens);
  } else {
    reader.RefuseIf("seq_lens", refs.has_seq_lens());
  }
  arrays.ring_bases = reader.Read("ring_bases", request.ring_bases(), refs.has_ring_bases(),
                                  refs.ring_bases(), to.ring_bases);
  if (!reader.status().ok()) return reader.status();
  return arrays;
}

// Rows as the step takes them, and how many bytes of them there are.
struct FoundRows {
  RowsView view;
  std::size_t bytes = 0;
};

absl::StatusOr<FoundRows> ReadRows(const v1::Rows& rows, std::int64_t count, Update& update) {
  if (!rows.has_reference())
    return FoundRows{PackedRows(rows.inline_().data(), count), rows.inline_().size()};
  const auto& reference = rows.reference();
  if (update.shared.session == nullptr) {
    return Refuse(Reason::SESSION_REQUIRED, "shared.session_id", "rows by reference need a session");
  }
  if (auto s = CheckLayers(update.cache->geometry(), update.layers); !s.ok()) return s;
  auto buffer = update.shared.session->FindBuffer(reference.buffer_id());
  if (!buffer.ok()) return AtField(buffer.status(), "rows.reference.buffer_id");
  const std::string& device = (*buffer)->device();
  if (!device.empty() && device != update.cache->device().name()) {
    return Refuse(Reason::BUFFER_DEVICE, "rows.reference.buffer_id",
                  absl::StrFormat("the buffer is in memory of %s, the cache of %s", device,
                                  update.cache->device().name()));
  }
  const auto view = FindRows(**buffer,
                             {.key_offset = reference.key_offset_bytes(),
                              .z_offset = reference.z_offset_bytes(),
                              .row_stride = reference.row_stride_bytes(),
                              .layer_stride = reference.layer_stride_bytes()},
                             update.layers.count, count);
  if (!view.ok()) return view.status();
  update.rows_in = device.empty() ? RowsIn::kHost : RowsIn::kDevice;
  update.rows = *std::move(buffer);
  return FoundRows{*view, static_cast<std::size_t>(update.layers.count * count * kRowBytes)};
}

// What tells the kinds of steps apart: their check, counter and arrays.
DecodeStep Make(const v1::UpdateDecodeRequest&, const StepArrays& arrays) {
  DecodeStep step;
  step.positions = arrays.positions.data();
  return step;
}
VerifyStep Make(const v1::UpdateVerifyRequest&, const StepArrays& arrays) {
  VerifyStep step;
  step.requests = static_cast<std::int32_t>(arrays.seq_lens.size());
  step.query_start_loc = arrays.query_start_loc.data();
  step.seq_lens = arrays.seq_lens.data();
  return step;
}
PrefillStep Make(const v1::UpdatePrefillRequest&, const StepArrays& arrays) {
  PrefillStep step;
  step.requests = static_cast<std::int32_t>(arrays.query_start_loc.size()) - 1;
  step.positions = arrays.positions.data();
  step.query_start_loc = arrays.query_start_loc.data();
  return step;
}
constexpr auto Check(const v1::UpdateDecodeRequest&) { return CheckDecode; }
constexpr auto Check(const v1::UpdateVerifyRequest&) { return CheckVerify; }
constexpr auto Check(const v1::UpdatePrefillRequest&) { return CheckPrefill; }
constexpr auto Counted(const v1::UpdateDecodeRequest&) { return &Stats::decode_steps; }
constexpr auto Counted(const v1::UpdateVerifyRequest&) { return &Stats::verify_steps; }
constexpr auto Counted(const v1::UpdatePrefillRequest&) { return &Stats::prefill_steps; }

}  // namespace

template <typename Request>
absl::StatusOr<Shared> FindShared(const SessionManager& sessions, const Request& request) {
  return FindSharedStep(sessions, request.has_shared(), request.shared());
}

template <typename Request>
absl::StatusOr<Update> Parse(const CacheManager& caches, const Request& request, Shared shared) {
  auto cache = caches.Find(request.cache().name(), request.cache().generation());
  if (!cache.ok()) return cache.status();
  const std::uint64_t owner = (*cache)->session();
  if (shared.session != nullptr && owner != 0 && owner != shared.session->number()) {
    return Refuse(Reason::CACHE_NOT_YOURS, "cache.name",
                  absl::StrFormat("cache \"%s\" belongs to another session", request.cache().name()));
  }
  Update update;
  update.cache = *std::move(cache);
  update.layers = {request.layers().first(), request.layers().count()};
  update.steps = Counted(request);
  update.shared = std::move(shared);
  const auto arrays = ReadArrays(request, update);
  if (!arrays.ok()) return arrays.status();
  const auto rows = ReadRows(request.rows(), static_cast<std::int64_t>(arrays->slots.size()), update);
  if (!rows.ok()) return rows.status();
  auto effect = Check(request)(update.cache->geometry(), update.layers, *arrays, rows->bytes);
  if (!effect.ok()) return effect.status();
  update.effect = *effect;
  auto step = Make(request, *arrays);
  step.rows = static_cast<std::int32_t>(arrays->slots.size());
  step.in = rows->view;
  step.slots = arrays->slots.data();
  step.ring_bases = arrays->ring_bases.data();
  update.step = step;
  return update;
}

template <typename Request>
bool SlowToParse(const Request& request) {
  const auto& arrays = request.shared().arrays();
  return std::max({std::int64_t{request.slots_size()}, arrays.slots().count(),
                   arrays.query_start_loc().count()}) > kQuickRows;
}

#define KVSUMMARY_INSTANTIATE(Request)                                                    \
  template absl::StatusOr<Shared> FindShared(const SessionManager&, const v1::Request&);  \
  template absl::StatusOr<Update> Parse(const CacheManager&, const v1::Request&, Shared); \
  template bool SlowToParse(const v1::Request&);
KVSUMMARY_INSTANTIATE(UpdateDecodeRequest)
KVSUMMARY_INSTANTIATE(UpdateVerifyRequest)
KVSUMMARY_INSTANTIATE(UpdatePrefillRequest)
#undef KVSUMMARY_INSTANTIATE

template <>
absl::StatusOr<Shared> FindShared(const SessionManager& sessions, const v1::StreamUpdatesRequest& request) {
  return WithUpdate(request, [&](const auto& update) { return FindShared(sessions, update); });
}
template <>
absl::StatusOr<Update> Parse(const CacheManager& caches, const v1::StreamUpdatesRequest& request,
                             Shared shared) {
  return WithUpdate(request, [&](const auto& update) { return Parse(caches, update, std::move(shared)); });
}
template <>
bool SlowToParse(const v1::StreamUpdatesRequest& request) {
  return SlowToParse(request.decode()) || SlowToParse(request.verify()) || SlowToParse(request.prefill());
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

void FillResult(const StepEffect& effect, v1::UpdateResult* result) {
  result->set_rows(effect.rows);
  result->set_regions_closed(effect.regions_closed);
}

void OnGrpcThread(std::function<void()> work) {
  auto* alarm = new grpc::Alarm;
  alarm->Set(std::chrono::system_clock::now(), [alarm, work = std::move(work)](bool /*ok*/) {
    work();
    delete alarm;  // keeps this closure alive until it has returned
  });
}

}  // namespace kvsummary
