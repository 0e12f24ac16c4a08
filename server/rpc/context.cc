#include "server/rpc/context.h"

#include <utility>

#include "server/error.h"

namespace kvsummary {

absl::Status Drain::Enter() {
  std::lock_guard lock(mutex_);
  if (draining_) return Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls");
  ++calls_;
  return absl::OkStatus();
}

void Drain::Leave() {
  std::lock_guard lock(mutex_);
  if (--calls_ == 0) idle_.notify_all();
}

void Drain::Begin() {
  std::lock_guard lock(mutex_);
  draining_ = true;
  for (const auto& [key, listener] : listeners_) listener();
}

void Drain::Await(std::chrono::system_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  idle_.wait_until(lock, deadline, [this] { return calls_ == 0; });
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
