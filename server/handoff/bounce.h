// Host memory that devices can address: where bytes of a network pass through on their way to a device.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/handoff/plan.h"

namespace kvsummary {

class Bounces {
 public:
  // `devices` must outlive it.
  explicit Bounces(const std::vector<std::unique_ptr<Device>>& devices);

  // (executor of `device`) `bytes` bytes, at most kChunkBytes, of host memory where the device can address
  // them: themselves, or a copy that lasts until the next call for the device. OUT_OF_MEMORY.
  absl::StatusOr<const char*> Land(Device& device, const char* data, std::int64_t bytes);

 private:
  struct Slot {
    std::unique_ptr<Memory> memory = nullptr;
    std::shared_ptr<void> mapped = nullptr;  // ends before the memory
  };
  std::map<const Device*, Slot> slots_;  // each used on its device's executor alone
};

}  // namespace kvsummary
