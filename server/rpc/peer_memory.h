// Staging memory of another daemon, as far as it can be read here: mapped where it is of this host, opened
// where it is a CUDA device's. What has been opened is kept for the offers that come later. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "kvsummary/v1/handoff.pb.h"
#include "server/device/device.h"

namespace kvsummary {

// Memory of the host that another process has made, mapped for reading; no access faults, whatever
// the other process does.
class MappedStaging {
 public:
  MappedStaging(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~MappedStaging();
  MappedStaging(const MappedStaging&) = delete;
  MappedStaging& operator=(const MappedStaging&) = delete;
  const char* data() const { return static_cast<const char*>(data_); }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }

 private:
  void* const data_;
  const std::size_t bytes_;
};

class PeerMemory {
 public:
  // One of the two; neither: it cannot be read.
  struct View {
    std::shared_ptr<MappedStaging> mapping = nullptr;
    std::shared_ptr<const Memory> memory = nullptr;  // of a CUDA device
    std::int64_t bytes = 0;

    explicit operator bool() const { return mapping != nullptr || memory != nullptr; }
  };

  // `local`: the source is known to be of this host. Only then is a path that it names looked for.
  explicit PeerMemory(bool local) : local_(local) {}

  // The memory that an offer lies in, for a device.
  View Open(const v1::PullAccepted& accepted, Device& device);
  // To be called when a stream begins: its source tells anew what it lends.
  void Forget();

 private:
  // With mutex_ held.
  View OpenIpcLocked(const v1::MemoryHandle& memory, Device& device);

  const bool local_;
  std::mutex mutex_;
  std::shared_ptr<MappedStaging> mapping_;
  // By handle, and device that it is opened for.
  std::map<std::pair<std::string, std::string>, std::shared_ptr<const Memory>> opened_;
};

}  // namespace kvsummary
