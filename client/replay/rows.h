// Rows for requests that have no tensors: a function of (seed, source, index, layer).
//
// Equal prompts give equal rows, whichever request brings them, so a page shared by a prefix can be
// checked byte for byte. Values are finite; their sizes vary from row to row so that a region's maximum
// of z rises at any of its rows, some rows dominate theirs, and a few weights underflow.
#pragma once

#include <cstdint>

#include "client/replay/trace.h"
#include "kernels/layout.h"

namespace kvsummary {

// A mixing function: equal arguments give equal values, others look random.
std::uint64_t MixBits(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d);

// What a row's values are derived from.
struct RowKey {
  std::uint64_t source = 0;
  std::uint64_t index = 0;

  friend bool operator==(const RowKey&, const RowKey&) = default;
};

// The row of a request's token: that of its prompt's chunk, or past the prompt one of its own.
// `request_index` is the request's place in the trace.
RowKey TokenRow(const TraceRequest& request, std::int64_t request_index, std::int64_t position);

// The row of a draft that is not the request's token at this position. `attempt` tells tries apart.
RowKey WrongDraftRow(std::int64_t request_index, std::int64_t position, std::int64_t attempt);

// What a whole block of a prompt is known by. Equal keys, equal prefixes up to and including the block: equal
// hash ids mean that, so no chain is needed.
std::uint64_t PromptBlockKey(const TraceRequest& request, std::int64_t block, std::int64_t block_size);

// Writes the row's kRowElements bf16 values, key then z.
void FillRow(std::uint64_t seed, RowKey key, std::int32_t layer, std::uint16_t* out);

}  // namespace kvsummary
