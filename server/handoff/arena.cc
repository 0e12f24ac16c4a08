#include "server/handoff/arena.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t RoundUp(std::int64_t bytes) {
  return (bytes + Arena::kGranule - 1) / Arena::kGranule * Arena::kGranule;
}

}  // namespace

Arena::Extent::~Extent() {
  if (arena_ != nullptr) arena_->Free(offset_, bytes_);
}

Arena::Arena(Device& device, std::int64_t capacity_bytes)
    : device_(device), capacity_(capacity_bytes / kGranule * kGranule) {
  if (capacity_ > 0) free_[0] = capacity_;
}

Arena::~Arena() {
  {
    std::unique_lock lock(mutex_);
    all_free_.wait(lock, [this] { return used_ == 0; });
  }
  device_.executor().SubmitFree(
      [memory = std::move(memory_), reservation = std::move(reservation_)]() mutable { memory.reset(); });
}

std::int64_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

absl::StatusOr<Arena::Extent> Arena::Reserve(std::int64_t bytes) {
  if (bytes == 0) return Extent();
  const std::lock_guard lock(mutex_);
  const std::int64_t wanted = bytes > capacity_ ? bytes : RoundUp(bytes);
  // The smallest that fits, so that large ranges stay for large offers.
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second >= wanted && (best == free_.end() || range->second < best->second)) best = range;
  }
  if (best == free_.end()) {
    return Refuse(
        Reason::HANDOFF_BUDGET_EXCEEDED, "",
        absl::StrFormat("no %d contiguous bytes are free of the %d for hand-offs on %s: %d are taken", bytes,
                        capacity_, device_.name(), used_));
  }
  const auto [offset, size] = *best;
  free_.erase(best);
  if (size > wanted) free_[offset + wanted] = size - wanted;
  used_ += wanted;
  return Extent(this, offset, wanted);
}

void Arena::Free(std::int64_t offset, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_ -= bytes;
  if (used_ == 0) all_free_.notify_all();
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

absl::Status Arena::Prepare() {
  if (memory() != nullptr) return device_.health();
  if (auto s = device_.Open(); !s.ok()) return s;
  // A CUDA IPC handle is what another daemon of this host can open, whatever device it writes to.
  MemoryKind kind = device_.uuid().empty() ? MemoryKind::kDefault : MemoryKind::kCudaIpc;
  auto bytes = device_.AllocationBytes(capacity_, kind);
  if (!bytes.ok()) {  // MIG has none
    kind = MemoryKind::kDefault;
    bytes = device_.AllocationBytes(capacity_, kind);
  }
  if (!bytes.ok()) return bytes.status();
  auto reservation = device_.budget().Reserve(*bytes);
  if (!reservation.ok()) return AtField(reservation.status(), "");
  auto memory = device_.AllocateStaging(*bytes, kind);
  if (!memory.ok()) return AtField(memory.status(), "");
  const std::lock_guard lock(mutex_);
  reservation_ = *std::move(reservation);
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

const Memory* Arena::memory() const {
  const std::lock_guard lock(mutex_);
  return memory_.get();
}

}  // namespace kvsummary
