// Clients' host memory that a CUDA device reads where it lies. The executor's, with the device set.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>

#include "kernels/update.h"

namespace kvsummary {

// Bounded: 256 MiB of a buffer, since pinning takes the executor's time (about 0.1 ms a MiB), and 1 GiB of
// all.
class CudaPinnedBuffers {
 public:
  // Pins a buffer, or leaves it as it is when it is too large or cannot be pinned.
  void Pin(char* data, std::int64_t bytes);
  // Whether the buffer is pinned: then no work on it may be left on the device when it is unpinned.
  bool IsPinned(const char* data) const { return bytes_at_.contains(Address(data)); }
  void Unpin(char* data);

  // Whether all rows lie in one pinned buffer.
  bool Hold(const RowsView& in, std::int64_t layers, std::int64_t rows) const;
  std::int64_t bytes() const { return bytes_; }  // any thread

 private:
  static std::uintptr_t Address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

  std::map<std::uintptr_t, std::int64_t> bytes_at_;
  std::atomic<std::int64_t> bytes_ = 0;
};

// Queues the copies that make packed rows at `to` of rows in pinned memory, of any strides.
cudaError_t CopyPinnedRows(char* to, const RowsView& in, std::int64_t layers, std::int64_t rows,
                           cudaStream_t stream);

}  // namespace kvsummary
