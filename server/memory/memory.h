// A range of memory that holds one cache.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace kvsummary {

// Owns its range; frees it when destroyed. data() is an address of the device that made it.
class Memory {
 public:
  virtual ~Memory() = default;
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 protected:
  Memory(void* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  void* data_;
  std::int64_t bytes_;
};

// Zeroed host memory behind a memfd, every page of it present on return: the kernel will not find later
// that there is none. OUT_OF_MEMORY when there is none now.
absl::StatusOr<std::unique_ptr<Memory>> AllocateHostMemory(std::int64_t bytes);

// Bytes that a process may still take: what the kernel calls available, or less where a control group
// limits this process.
std::int64_t AvailableHostBytes();

}  // namespace kvsummary
