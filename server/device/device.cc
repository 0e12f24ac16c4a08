#include "server/device/device.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {

Device::Device(std::string name, std::int64_t budget_bytes, const Executor::Limits& limits)
    : name_(std::move(name)), budget_(name_, budget_bytes), executor_(name_, limits) {}

absl::Status Device::Open() {
  if (!opened_) {
    opened_ = true;
    Record(DoOpen());
  }
  return health();
}

absl::Status Device::health() const {
  std::lock_guard lock(mutex_);
  return health_;
}

absl::StatusOr<std::int64_t> Device::AllocationBytes(std::int64_t bytes, MemoryKind kind) const {
  if (kind == MemoryKind::kDefault || kind == MemoryKind::kMemfd) return bytes;
  return Refuse(Reason::MEMORY_KIND_UNSUPPORTED, "memory_kind",
                absl::StrFormat("%s has memory of kind MEMFD only", name_));
}

absl::StatusOr<std::unique_ptr<Memory>> Device::OpenIpc(const std::string& /*handle*/,
                                                        std::int64_t /*offset*/, std::int64_t /*bytes*/) {
  return Refuse(Reason::MEMORY_KIND_UNSUPPORTED, "memory.kind",
                absl::StrFormat("%s opens no CUDA IPC handles", name_));
}

absl::Status Device::Broken(std::string_view what) {
  auto status = Refuse(Reason::DEVICE_FAILED, "", absl::StrFormat("%s: %s", name_, what));
  Record(status);
  std::lock_guard lock(listener_mutex_);
  broken_ = true;
  if (on_broken_) std::exchange(on_broken_, nullptr)();
  return status;
}

void Device::set_on_broken(absl::AnyInvocable<void()> listener) {
  std::lock_guard lock(listener_mutex_);
  on_broken_ = std::move(listener);
  if (broken_ && on_broken_) std::exchange(on_broken_, nullptr)();
}

void Device::Record(absl::Status status) {
  std::lock_guard lock(mutex_);
  if (health_.ok()) health_ = std::move(status);
}

}  // namespace kvsummary
