// Memory of a CUDA device that other processes can map, and memory of theirs. All functions are called on
// the thread of the device's executor, with the device set and its primary context made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/memory.h"

namespace kvsummary {

// A device as errors name it ("cuda:0"), its number in the runtime, and whether it is a MIG instance.
struct CudaDeviceId {
  std::string name;
  int ordinal = 0;
  bool mig = false;
};

// The bytes that an allocation takes: rounded up to what the device allocates at least, so that no two
// allocations share what a handle opens. MEMORY_KIND_UNSUPPORTED or CUDA_IPC_MIG where the device cannot.
absl::StatusOr<std::int64_t> CudaAllocationBytes(const CudaDeviceId& device, std::int64_t bytes,
                                                 MemoryKind kind);

// Memory of CudaAllocationBytes' bytes, not zeroed. OUT_OF_MEMORY, or DEVICE_FAILED. To be freed when the
// device has done all work on it: freeing VMM memory does not wait, as cudaFree does.
absl::StatusOr<std::unique_ptr<Memory>> AllocateCudaVmm(const CudaDeviceId& device, std::int64_t bytes);
absl::StatusOr<std::unique_ptr<Memory>> AllocateCudaIpc(const CudaDeviceId& device, std::int64_t bytes);

// Bytes [offset, offset + bytes) of another process's allocation. HANDLE_INVALID, CUDA_IPC_SAME_PROCESS,
// CUDA_IPC_MIG, or MEMFD_TOO_SMALL.
absl::StatusOr<std::unique_ptr<Memory>> OpenCudaIpc(const CudaDeviceId& device, const std::string& handle,
                                                    std::int64_t offset, std::int64_t bytes);

}  // namespace kvsummary
