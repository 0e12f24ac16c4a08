// Updates of any kind as messages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/split.h"
#include "kvsummary/v1/update.pb.h"

namespace kvsummary {

// The caller's arrays; those that the kind does not have are empty. Borrowed.
struct UpdateArrays {
  enum class Kind { kDecode, kVerify, kPrefill };

  explicit UpdateArrays(const DecodeUpdate& update);
  explicit UpdateArrays(const VerifyUpdate& update);
  explicit UpdateArrays(const PrefillUpdate& update);

  Kind kind;
  std::span<const std::int64_t> slots, positions;
  std::span<const std::int32_t> query_start_loc, seq_lens;
  std::span<const std::int64_t> ring_bases;
  std::span<const std::uint16_t> rows;
};

// The messages that an update takes. One that fits a message is a single piece whatever its arrays say: it
// travels as it is and the daemon judges it. A larger one must have sizes that agree (SIZE_MISMATCH).
absl::StatusOr<std::vector<UpdatePiece>> PlanUpdate(const Cache& cache, LayerSpan layers,
                                                    const UpdateArrays& arrays,
                                                    std::int64_t max_message_bytes);

// Fills `message` with a piece of a plan of these arguments. All its fields are set: a message of an earlier
// piece may be filled again, which keeps its memory. A plan's only piece is filled with the whole update.
void FillMessage(const Cache& cache, LayerSpan layers, const UpdateArrays& arrays,
                 std::span<const UpdatePiece> plan, std::size_t piece, v1::StreamUpdatesRequest* message);

// The piece's part in what the whole update did: its layers share rows and regions, which count once.
UpdateResult Contribution(const UpdatePiece& piece, const v1::UpdateResult& result);

}  // namespace kvsummary
