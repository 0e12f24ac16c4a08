// Memory of a client's that the daemon has mapped, for updates to refer to.
#pragma once

#include <cstdint>
#include <string>

namespace kvsummary {

// Unmapped when destroyed. Work that uses a buffer holds a shared pointer until the device has finished
// with it: so the end of a session never takes memory from under a kernel.
class Buffer {
 public:
  virtual ~Buffer() = default;
  // Address in this process: of the host, or of the device.
  char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // Name of the CUDA device that has it ("cuda:0"); empty for host memory.
  const std::string& device() const { return device_; }

 protected:
  Buffer(char* data, std::int64_t bytes, std::string device)
      : data_(data), bytes_(bytes), device_(std::move(device)) {}

 private:
  char* const data_;
  const std::int64_t bytes_;
  const std::string device_;
};

}  // namespace kvsummary
