#include "server/handoff/bounce.h"

#include <cstring>
#include <utility>

namespace kvsummary {

Bounces::Bounces(const std::vector<std::unique_ptr<Device>>& devices) {
  for (const auto& device : devices) slots_[device.get()];
}

absl::StatusOr<const char*> Bounces::Land(Device& device, const char* data, std::int64_t bytes) {
  if (!device.pins_host_memory()) return data;
  Slot& slot = slots_.at(&device);
  if (slot.memory == nullptr) {
    auto memory = AllocateHostMemory(kChunkBytes);
    if (!memory.ok()) return memory.status();
    auto mapped = device.MapHost((*memory)->data(), (*memory)->bytes());
    if (!mapped.ok()) return mapped.status();
    slot = {*std::move(memory), *std::move(mapped)};
  }
  std::memcpy(slot.memory->data(), data, static_cast<std::size_t>(bytes));
  return static_cast<const char*>(slot.memory->data());
}

}  // namespace kvsummary
