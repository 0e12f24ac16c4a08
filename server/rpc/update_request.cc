#include "server/rpc/update_request.h"

#include <utility>

#include "server/error.h"

namespace kvsummary {
namespace {

constexpr StepKind Kind(const v1::UpdateDecodeRequest&) { return StepKind::kDecode; }
constexpr StepKind Kind(const v1::UpdateVerifyRequest&) { return StepKind::kVerify; }
constexpr StepKind Kind(const v1::UpdatePrefillRequest&) { return StepKind::kPrefill; }

ArrayPlace Place(const v1::ArrayReference& reference) {
  return {reference.buffer_id(), reference.offset_bytes(), reference.count()};
}

CounterPlace Place(const v1::CounterValue& counter) {
  return {counter.buffer_id(), counter.offset_bytes(), counter.value()};
}

RowsReference Place(const v1::RowsReference& reference) {
  return {reference.buffer_id(),
          {.key_offset = reference.key_offset_bytes(),
           .z_offset = reference.z_offset_bytes(),
           .row_stride = reference.row_stride_bytes(),
           .layer_stride = reference.layer_stride_bytes()}};
}

template <typename T, typename Field>
void SetValues(const Field& field, IndexArray<T>& array) {
  array.values = {field.data(), static_cast<std::size_t>(field.size())};
}

template <typename Request>
StepRequest ToStep(const Request& request) {
  StepRequest step;
  step.kind = Kind(request);
  step.cache = request.cache().name();
  step.generation = request.cache().generation();
  step.layers = {request.layers().first(), request.layers().count()};
  SetValues(request.slots(), step.slots);
  SetValues(request.ring_bases(), step.ring_bases);
  if constexpr (requires { request.positions(); }) SetValues(request.positions(), step.positions);
  if constexpr (requires { request.query_start_loc(); })
    SetValues(request.query_start_loc(), step.query_start_loc);
  if constexpr (requires { request.seq_lens(); }) SetValues(request.seq_lens(), step.seq_lens);
  const v1::ArrayReferences& places = request.shared().arrays();
  if (places.has_slots()) step.slots.place = Place(places.slots());
  if (places.has_positions()) step.positions.place = Place(places.positions());
  if (places.has_query_start_loc()) step.query_start_loc.place = Place(places.query_start_loc());
  if (places.has_seq_lens()) step.seq_lens.place = Place(places.seq_lens());
  if (places.has_ring_bases()) step.ring_bases.place = Place(places.ring_bases());
  if (request.rows().has_reference()) {
    step.rows = Place(request.rows().reference());
  } else {
    step.row_bytes = request.rows().inline_();
  }
  return step;
}

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

}  // namespace

template <typename Request>
absl::StatusOr<Shared> FindShared(const SessionManager& sessions, const Request& request) {
  if (!request.has_shared()) return Shared();
  const v1::SharedStep& step = request.shared();
  auto session = sessions.Find(step.session_id());
  if (!session.ok()) return AtField(session.status(), "shared.session_id");
  std::optional<CounterPlace> ready;
  std::optional<CounterPlace> done;
  if (step.has_ready()) ready = Place(step.ready());
  if (step.has_done()) done = Place(step.done());
  return FindShared(*std::move(session), ready, done);
}

template <typename Request>
absl::StatusOr<Update> Parse(const CacheManager& caches, const Request& request, Shared shared) {
  return Parse(caches, ToStep(request), std::move(shared));
}

template <typename Request>
bool SlowToParse(const Request& request) {
  return SlowToParse(ToStep(request));
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

void FillResult(const StepEffect& effect, v1::UpdateResult* result) {
  result->set_rows(effect.rows);
  result->set_regions_closed(effect.regions_closed);
}

}  // namespace kvsummary
