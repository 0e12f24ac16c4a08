#include "server/rpc/context.h"

#include <utility>

#include "server/error.h"

namespace kvsummary {

absl::Status Drain::Check() const {
  std::lock_guard lock(mutex_);
  if (!draining_) return absl::OkStatus();
  return Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls");
}

void Drain::Begin() {
  std::lock_guard lock(mutex_);
  draining_ = true;
  for (const auto& [key, listener] : listeners_) listener();
}

void Drain::Listen(const void* key, std::function<void()> listener) {
  std::lock_guard lock(mutex_);
  if (draining_) listener();
  listeners_.emplace(key, std::move(listener));
}

void Drain::Forget(const void* key) {
  std::lock_guard lock(mutex_);
  listeners_.erase(key);
}

}  // namespace kvsummary
