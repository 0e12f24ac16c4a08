#include "client/replay/update_call.h"

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kCallRowBytes = (4 << 20) - (256 << 10);

absl::StatusOr<UpdateResult> Call(Target& target, UpdateKind kind, LayerSpan layers, const PlannedUpdate& u,
                                  std::span<const std::uint16_t> rows) {
  switch (kind) {
    case UpdateKind::kPrefill:
      return target.Prefill(layers, {u.slots, u.positions, u.query_start_loc, u.ring_bases, rows});
    case UpdateKind::kVerify:
      return target.Verify(layers, {u.slots, u.query_start_loc, u.seq_lens, u.ring_bases, rows});
    case UpdateKind::kDecode:
      break;
  }
  return target.Decode(layers, {u.slots, u.positions, u.ring_bases, rows});
}

}  // namespace

std::vector<LayerSpan> SplitLayers(std::int32_t layers, std::int64_t rows) {
  const auto per_call = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(kCallRowBytes / std::max<std::int64_t>(rows * kRowBytes, 1), 1, layers));
  std::vector<LayerSpan> calls;
  for (std::int32_t first = 0; first < layers; first += per_call) {
    calls.push_back({first, std::min(per_call, layers - first)});
  }
  return calls;
}

void MakeRows(std::uint64_t seed, std::span<const RowKey> keys, LayerSpan layers,
              std::vector<std::uint16_t>& rows) {
  const std::size_t size = static_cast<std::size_t>(layers.count) * keys.size() * kRowElements;
  if (rows.size() < size) rows.resize(size);
  std::uint16_t* out = rows.data();
  for (std::int32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    for (const RowKey& key : keys) {
      FillRow(seed, key, layer, out);
      out += kRowElements;
    }
  }
}

absl::StatusOr<UpdateResult> CallUpdate(Target& target, UpdateKind kind, LayerSpan layers,
                                        const PlannedUpdate& update, std::span<const std::uint16_t> rows) {
  auto result = Call(target, kind, layers, update, rows);
  if (result.ok() && (result->rows != update.rows() || result->regions_closed != update.closing_rows)) {
    return absl::InternalError(absl::StrFormat(
        "an update of %d rows that closes %d regions was answered with %d rows and %d regions", update.rows(),
        update.closing_rows, result->rows, result->regions_closed));
  }
  return result;
}

}  // namespace kvsummary
