// Memory of a CUDA device that other processes can map, and memory of theirs. All functions are called on
// the thread of the device's executor, with the device set and its primary context made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/open_once.h"
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

// Allocations of other processes by their IPC handles. Each is open once however many Memories lie in it, and
// closed with the last of them: opening takes 100 us and more, answering one that is open less than one.
//
// The handle is the key: its bytes name process, allocation and generation of it, and the device is this one.
class CudaIpcHandles {
 public:
  explicit CudaIpcHandles(CudaDeviceId device) : device_(std::move(device)) {}

  // Bytes [offset, offset + bytes) of the allocation. HANDLE_INVALID, CUDA_IPC_SAME_PROCESS, CUDA_IPC_MIG, or
  // MEMFD_TOO_SMALL.
  absl::StatusOr<std::unique_ptr<Memory>> Open(const std::string& handle, std::int64_t offset,
                                               std::int64_t bytes);

  // Bytes of an allocation from its start, closed when destroyed.
  class Opening {
   public:
    Opening(void* base, std::int64_t bytes) : base_(base), bytes_(bytes) {}
    ~Opening();
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;
    char* base() const { return static_cast<char*>(base_); }
    std::int64_t bytes() const { return bytes_; }

   private:
    void* const base_;
    const std::int64_t bytes_;
  };

 private:
  absl::StatusOr<std::unique_ptr<Opening>> OpenAnew(const std::string& handle) const;

  const CudaDeviceId device_;
  OpenOnce<Opening> openings_;
};

}  // namespace kvsummary
