// Memory for the rows and arrays of direct updates by a program that has them on the host: of the host
// itself, or of a CUDA device, with a stream to go with it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

class StepMemory {
 public:
  virtual ~StepMemory() = default;
  // For the launches that use the memory; null on the host.
  virtual void* stream() const = 0;
  // Address of `bytes` for kernels, aligned to 256 bytes. Ends what an earlier call gave.
  virtual absl::StatusOr<char*> Reserve(std::int64_t bytes) = 0;
  // Copies, ordered with the stream: `host` can be used on return.
  virtual absl::Status Write(char* to, const void* host, std::int64_t bytes) = 0;
  virtual absl::Status Read(void* host, const char* from, std::int64_t bytes) = 0;
  // The cudaIpcMemHandle_t of what Reserve gave last; empty on the host.
  virtual absl::StatusOr<std::string> IpcHandle() const = 0;
  // Waits for the stream.
  virtual absl::Status Synchronize() = 0;

  // Makes host memory known to the device, until this object goes: for the two below.
  virtual absl::Status Register(std::span<char> host) = 0;
  // In the stream's turn: sets a counter in such memory, or waits until it is at `value` or beyond.
  virtual absl::Status Signal(std::uint64_t* counter, std::uint64_t value) = 0;
  virtual absl::Status Await(const std::uint64_t* counter, std::uint64_t value) = 0;
};

std::unique_ptr<StepMemory> MakeHostStepMemory();
// DEVICE_NOT_VISIBLE when this process does not see the device, or the build has no CUDA.
absl::StatusOr<std::unique_ptr<StepMemory>> MakeCudaStepMemory(const std::string& device_uuid);

}  // namespace kvsummary
