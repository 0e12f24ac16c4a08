// The three updates of summaries and tail rings, one interface for host and CUDA memory.
//
// An update takes rows (key and z of `rows` tokens, for every layer of the view) and index arrays that
// all layers share. It closes regions (writes their summaries) and keeps the rows of open regions in
// the rings. Decode, verify and prefill give the same bytes for the same rows, whatever the split into
// steps and whatever the implementation; the arithmetic is in kernels/summary_math.h.
//
// The kernels allocate nothing, start no threads and never read or write outside the view and the inputs,
// whatever the index arrays hold: a row whose indices are out of bounds (kernels/layout.h, ClassifyRow) is
// treated as padding for every purpose and counted, once a layer. A request whose range is not
// 0 <= query_start_loc[i] <= query_start_loc[i + 1] <= rows, or whose seq_len is below its number of rows,
// is skipped whole and counts as one, once a layer. Duplicate slots, one ring block for two requests and
// rows that are not consecutive are the caller's to refuse.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace kvsummary {

// bf16 values of `rows` tokens in `layers` layers. Strides count elements; key and z may be column
// slices of one wide matrix. CUDA requires 16-byte alignment of pointers and strides.
struct RowsView {
  const std::uint16_t* key = nullptr;  // [layers][rows][256]
  const std::uint16_t* z = nullptr;    // [layers][rows][256]
  std::int64_t key_stride = 0;         // from token to token
  std::int64_t z_stride = 0;
  std::int64_t key_layer_stride = 0;  // from layer to layer
  std::int64_t z_layer_stride = 0;
};

// Rows as they travel in messages and lie in rings: dense [layers][rows][512], key then z.
inline RowsView PackedRows(const void* data, std::int64_t rows) {
  const auto* p = static_cast<const std::uint16_t*>(data);
  return {p, p + kChannels, kRowElements, kRowElements, rows * kRowElements, rows * kRowElements};
}

// One row a request. A row with a negative slot or ring base has no effect.
struct DecodeStep {
  std::int32_t rows = 0;
  RowsView in;
  const std::int64_t* slots = nullptr;       // [rows]
  const std::int64_t* positions = nullptr;   // [rows]
  const std::int64_t* ring_bases = nullptr;  // [rows]
};

// Each request brings a token and its drafts: row r of request i has position
// seq_lens[i] - (query_start_loc[i + 1] - r). The ring base of a request is that of its first row; the
// others are not looked at, so a row is padding when its slot or its request's base is negative.
struct VerifyStep {
  std::int32_t rows = 0;
  std::int32_t requests = 0;
  RowsView in;
  const std::int64_t* slots = nullptr;            // [rows]
  const std::int32_t* query_start_loc = nullptr;  // [requests + 1], rising from 0 to rows
  const std::int32_t* seq_lens = nullptr;         // [requests], drafts included
  const std::int64_t* ring_bases = nullptr;       // [rows]
};

// Chunks of any length. Positions of a request are consecutive, and its live rows (slot and base not
// negative) too. Ring reads of the step precede its ring writes. Of a request's live rows the last `capacity`
// are stored, so trailing padding rows change nothing.
struct PrefillStep {
  std::int32_t rows = 0;
  std::int32_t requests = 0;
  RowsView in;
  const std::int64_t* slots = nullptr;            // [rows]
  const std::int64_t* positions = nullptr;        // [rows]
  const std::int32_t* query_start_loc = nullptr;  // [requests + 1], rising from 0 to rows
  const std::int64_t* ring_bases = nullptr;       // [rows]
};

// Where and how a step runs.
struct Launch {
  void* stream = nullptr;                 // cudaStream_t; ignored on the host
  unsigned long long* skipped = nullptr;  // counter in the kernel's memory; bad rows are added, once a layer
};

// One implementation. Stateless; every function may be called from any thread. The return value is 0 or
// a cudaError_t of the launch (the host cannot fail). A host call is complete on return; a CUDA call is
// queued on the stream and needs every pointer valid until the stream has passed it.
class UpdateKernels {
 public:
  virtual ~UpdateKernels() = default;
  virtual const char* name() const = 0;  // "scalar", "avx2" or "cuda"
  virtual int Decode(const CacheView& view, const DecodeStep& step, const Launch& launch) const = 0;
  virtual int Verify(const CacheView& view, const VerifyStep& step, const Launch& launch) const = 0;
  virtual int Prefill(const CacheView& view, const PrefillStep& step, const Launch& launch) const = 0;
};

const UpdateKernels& ScalarKernels();
const UpdateKernels* Avx2Kernels();  // null when this CPU lacks AVX2 or FMA
const UpdateKernels& HostKernels();  // the fastest of the above on this CPU
const UpdateKernels* CudaKernels();  // null in a build without CUDA

}  // namespace kvsummary
