// Movement of pages by a CUDA device: what Device::MovePages and MapHost need there.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/copy.h"
#include "server/device/cuda_memory.h"

namespace kvsummary {

// Registers host memory with CUDA until the answer is destroyed. OUT_OF_MEMORY when the system has no more
// memory to pin, DEVICE_FAILED.
absl::StatusOr<std::shared_ptr<void>> MapCudaHost(const CudaDeviceId& device, void* data, std::int64_t bytes);

// Whether movements by the device can address memory of the other's cudaMalloc, from now on. The device's
// context is current.
bool EnableCudaPeer(const CudaDeviceId& device, const CudaDeviceId& other);

// Brings the views and ids of a movement to the device, launches it and waits for it. Of one device, whose
// context is current in every call. Pages are not staged.
class CudaPageStage {
 public:
  // As Device::MovePages. When a CUDA call fails the answer is an error, and error() tells which. When there
  // is no memory for views and ids it is OUT_OF_MEMORY, and no error(): the next movement may have it.
  absl::StatusOr<std::chrono::nanoseconds> Move(cudaStream_t stream, const PageSet& from,
                                                std::span<const std::int64_t> from_blocks, const PageSet& to,
                                                std::span<const std::int64_t> to_blocks);
  cudaError_t error() const { return error_; }
  // Frees what has been taken. To be called before the end.
  void Free();

 private:
  // Whether the CUDA call succeeded; keeps its error.
  bool Did(cudaError_t error);
  // The same of its calls, but for a lack of memory, which it does not keep.
  bool Reserve(std::size_t bytes);

  cudaError_t error_ = cudaSuccess;  // the first
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
  char* host_ = nullptr;    // pinned
  char* device_ = nullptr;  // as large
  std::size_t bytes_ = 0;
};

}  // namespace kvsummary
