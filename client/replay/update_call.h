// A planned update as calls to a target: the layers of each, its rows, and the call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/replay/rows.h"
#include "client/replay/scheduler.h"
#include "client/replay/target.h"
#include "kernels/layout.h"

namespace kvsummary {

enum class UpdateKind { kPrefill, kDecode, kVerify };

// As many layers a call as fit gRPC's 4 MiB with these rows of each, but one at least.
std::vector<LayerSpan> SplitLayers(std::int32_t layers, std::int64_t rows);

// Puts [layers][keys] rows at the front of `rows`, which only grows.
void MakeRows(std::uint64_t seed, std::span<const RowKey> keys, LayerSpan layers,
              std::vector<std::uint16_t>& rows);

// The target's answer; INTERNAL when it counts other rows or regions than were sent.
absl::StatusOr<UpdateResult> CallUpdate(Target& target, UpdateKind kind, LayerSpan layers,
                                        const PlannedUpdate& update, std::span<const std::uint16_t> rows);

}  // namespace kvsummary
