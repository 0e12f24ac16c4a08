#include "server/memory/budget.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {

Budget::Reservation::~Reservation() {
  if (budget_ == nullptr) return;
  std::lock_guard lock(budget_->mutex_);
  budget_->used_ -= bytes_;
}

absl::StatusOr<Budget::Reservation> Budget::Reserve(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > limit_ - used_) {
    return Refuse(Reason::MEMORY_BUDGET_EXCEEDED, "geometry",
                  absl::StrFormat("this takes %d bytes; %d of the %d that may be taken of %s are free", bytes,
                                  limit_ - used_, limit_, owner_));
  }
  used_ += bytes;
  return Reservation(this, bytes);
}

std::int64_t Budget::limit_bytes() const {
  std::lock_guard lock(mutex_);
  return limit_;
}

std::int64_t Budget::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

void Budget::set_limit_bytes(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  limit_ = std::max(bytes, used_);
}

}  // namespace kvsummary
