#include "server/rpc/context.h"

#include <algorithm>
#include <cstring>
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

std::uint64_t HandoffIdentity::generation() const {
  std::uint64_t number = 0;
  std::memcpy(&number, instance.data(), std::min(sizeof(number), instance.size()));
  return number;
}

void SessionStreams::Add(std::uint64_t session, Stream* stream) {
  std::lock_guard lock(mutex_);
  streams_.emplace(session, stream);
  if (draining_) stream->Draining();
  if (ending_) stream->End();
}

void SessionStreams::Remove(std::uint64_t session) {
  std::lock_guard lock(mutex_);
  streams_.erase(session);
}

void SessionStreams::TellLost(std::uint64_t session, const std::string& name, std::uint64_t generation) {
  std::lock_guard lock(mutex_);
  if (const auto it = streams_.find(session); it != streams_.end()) it->second->CacheLost(name, generation);
}

void SessionStreams::TellDraining() {
  std::lock_guard lock(mutex_);
  draining_ = true;
  for (const auto& [session, stream] : streams_) stream->Draining();
}

void SessionStreams::EndAll() {
  std::lock_guard lock(mutex_);
  ending_ = true;
  for (const auto& [session, stream] : streams_) stream->End();
}

}  // namespace kvsummary
