#include "client/update_message.h"

#include <bit>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/status.h"

namespace kvsummary {
namespace {

using Kind = UpdateArrays::Kind;

static_assert(std::endian::native == std::endian::little, "rows travel as they lie in memory");

// Tags, lengths, the layer range and the generation; generous.
constexpr std::int64_t kFixedBytes = 128;

std::int64_t Size(std::size_t size) { return static_cast<std::int64_t>(size); }

absl::Status CheckSize(const char* field, std::size_t size, std::int64_t expected) {
  if (Size(size) == expected) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument,
                   absl::StrCat(field, " has ", size, " elements, expected ", expected), "SIZE_MISMATCH",
                   field);
}

absl::Status CheckSizes(LayerSpan layers, const UpdateArrays& a) {
  if (layers.count < 1) {
    return MakeError(absl::StatusCode::kInvalidArgument,
                     absl::StrCat("layers.count is ", layers.count, ", expected 1 or more"),
                     "LAYERS_OUT_OF_RANGE", "layers");
  }
  const std::int64_t rows = Size(a.slots.size());
  absl::Status status = CheckSize("rows", a.rows.size(), rows * layers.count * kRowElements);
  status.Update(CheckSize("ring_bases", a.ring_bases.size(), rows));
  if (a.kind != Kind::kVerify) status.Update(CheckSize("positions", a.positions.size(), rows));
  if (a.kind == Kind::kVerify) {
    status.Update(CheckSize("seq_lens", a.seq_lens.size(), Size(a.query_start_loc.size()) - 1));
  }
  return status;
}

template <typename T, typename Field>
void Assign(std::span<const T> values, std::int64_t first, std::int64_t count, Field* field) {
  const auto part = values.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  field->Assign(part.begin(), part.end());
}

// What all kinds have.
template <typename Request>
void FillCommon(const Cache& cache, LayerSpan layers, const UpdateArrays& a, const UpdatePiece& piece,
                bool whole, Request* request) {
  request->mutable_cache()->set_name(cache.name);
  request->mutable_cache()->set_generation(cache.generation);
  request->mutable_layers()->set_first(layers.first + piece.first_layer);
  request->mutable_layers()->set_count(piece.layers);
  Assign(a.slots, piece.first_row, piece.rows, request->mutable_slots());
  Assign(a.ring_bases, piece.first_row, whole ? Size(a.ring_bases.size()) : piece.rows,
         request->mutable_ring_bases());
  const std::int64_t first = (piece.first_layer * Size(a.slots.size()) + piece.first_row) * kRowElements;
  const std::int64_t elements =
      whole ? Size(a.rows.size()) : std::int64_t{piece.layers} * piece.rows * kRowElements;
  request->mutable_rows()->mutable_inline_()->assign(
      reinterpret_cast<const char*>(a.rows.data() + first),
      static_cast<std::size_t>(elements) * sizeof(std::uint16_t));
}

template <typename Request>
void FillPositions(const UpdateArrays& a, const UpdatePiece& piece, bool whole, Request* request) {
  Assign(a.positions, piece.first_row, whole ? Size(a.positions.size()) : piece.rows,
         request->mutable_positions());
}

template <typename Request>
void FillStarts(const UpdateArrays& a, const UpdatePiece& piece, bool whole, Request* request) {
  if (whole) {
    Assign(a.query_start_loc, 0, Size(a.query_start_loc.size()), request->mutable_query_start_loc());
  } else {
    const auto starts = PieceStarts(piece, a.query_start_loc);
    Assign(std::span<const std::int32_t>(starts), 0, Size(starts.size()), request->mutable_query_start_loc());
  }
}

}  // namespace

UpdateArrays::UpdateArrays(const DecodeUpdate& u)
    : kind(Kind::kDecode), slots(u.slots), positions(u.positions), ring_bases(u.ring_bases), rows(u.rows) {}

UpdateArrays::UpdateArrays(const VerifyUpdate& u)
    : kind(Kind::kVerify),
      slots(u.slots),
      query_start_loc(u.query_start_loc),
      seq_lens(u.seq_lens),
      ring_bases(u.ring_bases),
      rows(u.rows) {}

UpdateArrays::UpdateArrays(const PrefillUpdate& u)
    : kind(Kind::kPrefill),
      slots(u.slots),
      positions(u.positions),
      query_start_loc(u.query_start_loc),
      ring_bases(u.ring_bases),
      rows(u.rows) {}

absl::StatusOr<std::vector<UpdatePiece>> PlanUpdate(const Cache& cache, LayerSpan layers,
                                                    const UpdateArrays& a, std::int64_t max_message_bytes) {
  const std::int64_t room = max_message_bytes - kFixedBytes - Size(cache.name.size());
  const std::int64_t index_bytes =
      Size(a.slots.size_bytes() + a.positions.size_bytes() + a.query_start_loc.size_bytes() +
           a.seq_lens.size_bytes() + a.ring_bases.size_bytes());
  if (index_bytes + Size(a.rows.size_bytes()) <= room) {
    return std::vector<UpdatePiece>{{.layers = layers.count, .rows = Size(a.slots.size())}};
  }
  if (auto status = CheckSizes(layers, a); !status.ok()) return status;
  UpdateShape shape{
      .layers = layers.count, .rows = Size(a.slots.size()), .query_start_loc = a.query_start_loc};
  switch (a.kind) {
    case Kind::kDecode:
      shape.cut = UpdateShape::Cut::kRows;
      shape.array_bytes_per_row = 3 * sizeof(std::int64_t);
      break;
    case Kind::kVerify:
      shape.cut = UpdateShape::Cut::kRequests;
      shape.array_bytes_per_row = 2 * sizeof(std::int64_t);
      shape.array_bytes_per_request = 2 * sizeof(std::int32_t);
      break;
    case Kind::kPrefill:
      shape.cut = UpdateShape::Cut::kRowsOfRequests;
      shape.array_bytes_per_row = 3 * sizeof(std::int64_t);
      shape.array_bytes_per_request = sizeof(std::int32_t);
      break;
  }
  return SplitUpdate(shape, room);
}

void FillMessage(const Cache& cache, LayerSpan layers, const UpdateArrays& a,
                 std::span<const UpdatePiece> plan, std::size_t index, v1::StreamUpdatesRequest* message) {
  const UpdatePiece& piece = plan[index];
  const bool whole = plan.size() == 1;
  switch (a.kind) {
    case Kind::kDecode:
      FillCommon(cache, layers, a, piece, whole, message->mutable_decode());
      FillPositions(a, piece, whole, message->mutable_decode());
      break;
    case Kind::kVerify:
      FillCommon(cache, layers, a, piece, whole, message->mutable_verify());
      FillStarts(a, piece, whole, message->mutable_verify());
      Assign(a.seq_lens, piece.first_request, whole ? Size(a.seq_lens.size()) : piece.requests,
             message->mutable_verify()->mutable_seq_lens());
      break;
    case Kind::kPrefill:
      FillCommon(cache, layers, a, piece, whole, message->mutable_prefill());
      FillPositions(a, piece, whole, message->mutable_prefill());
      FillStarts(a, piece, whole, message->mutable_prefill());
      break;
  }
}

UpdateResult Contribution(const UpdatePiece& piece, const v1::UpdateResult& result) {
  if (piece.first_layer > 0) return {};
  return {.rows = result.rows(), .regions_closed = result.regions_closed()};
}

}  // namespace kvsummary
