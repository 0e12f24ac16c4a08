// Memory of a client's that the daemon has mapped, for updates to refer to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace kvsummary {

// Unmapped when destroyed. Work that uses a buffer holds a shared pointer until the device has finished
// with it: so the end of a session never takes memory from under a kernel.
class Buffer {
 public:
  // Calls what was given to OnUnmapped: by then the derived destructor has unmapped the memory.
  virtual ~Buffer() {
    if (unmapped_) unmapped_();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Address in this process: of the host, or of the device.
  char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // Name of the CUDA device that has it ("cuda:0"); empty for host memory.
  const std::string& device() const { return device_; }
  // The same for the same memory, whoever maps it; empty: not known.
  const std::string& identity() const { return identity_; }

  // Only for the one that took the buffer out of its session (Session::RemoveBuffer), and once.
  void OnUnmapped(std::function<void()> listener) { unmapped_ = std::move(listener); }

 protected:
  Buffer(char* data, std::int64_t bytes, std::string device, std::string identity = "")
      : data_(data), bytes_(bytes), device_(std::move(device)), identity_(std::move(identity)) {}

 private:
  char* const data_;
  const std::int64_t bytes_;
  const std::string device_;
  const std::string identity_;
  std::function<void()> unmapped_;
};

}  // namespace kvsummary
