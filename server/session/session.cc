#include "server/session/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/name.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

absl::Status Ended() { return Refuse(Reason::SESSION_ENDED, "session_id", "the session has ended"); }

absl::Status NoBuffer(std::uint64_t id) {
  return Refuse(Reason::BUFFER_NOT_FOUND, "buffer_id", absl::StrFormat("the session has no buffer %d", id));
}

absl::Status CheckId(const std::string& id) {
  if (id.size() == kSessionIdBytes) return absl::OkStatus();
  return Refuse(
      Reason::SESSION_REQUIRED, "session_id",
      absl::StrFormat("the call needs a session_id of %d bytes, not %d", kSessionIdBytes, id.size()));
}

}  // namespace

Session::Session(std::string id, std::uint64_t number, std::string name)
    : id_(std::move(id)), number_(number), name_(std::move(name)) {}

bool Session::ended() const {
  std::lock_guard lock(mutex_);
  return ended_;
}

absl::StatusOr<std::uint64_t> Session::ReserveBuffer() {
  std::lock_guard lock(mutex_);
  if (ended_) return Ended();
  if (buffers_.size() >= kMaxSessionBuffers) {
    return Refuse(Reason::SESSION_LIMIT, "session_id",
                  absl::StrFormat("the session has %d buffers already", buffers_.size()));
  }
  buffers_.emplace(next_buffer_, nullptr);
  return next_buffer_++;
}

absl::Status Session::FillBuffer(std::uint64_t buffer_id, std::shared_ptr<Buffer> buffer) {
  std::lock_guard lock(mutex_);
  if (ended_) return Ended();
  const auto it = buffers_.find(buffer_id);
  if (it == buffers_.end()) return NoBuffer(buffer_id);
  const auto same = std::find_if(buffers_.begin(), buffers_.end(), [&](const auto& entry) {
    return entry.second != nullptr && !buffer->identity().empty() &&
           entry.second->identity() == buffer->identity();
  });
  if (same != buffers_.end()) {
    buffers_.erase(it);
    return Refuse(Reason::BUFFER_REGISTERED, "memory",
                  absl::StrFormat("buffer %d is this memory already", same->first));
  }
  it->second = std::move(buffer);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Buffer>> Session::FindBuffer(std::uint64_t buffer_id) const {
  std::lock_guard lock(mutex_);
  if (ended_) return Ended();
  const auto it = buffers_.find(buffer_id);
  if (it == buffers_.end()) return NoBuffer(buffer_id);
  if (it->second == nullptr) {
    return Refuse(Reason::BUFFER_NOT_READY, "buffer_id",
                  absl::StrFormat("the ticket of buffer %d has not been redeemed yet", buffer_id));
  }
  return it->second;
}

absl::StatusOr<std::shared_ptr<Buffer>> Session::RemoveBuffer(std::uint64_t buffer_id) {
  std::lock_guard lock(mutex_);
  if (ended_) return Ended();
  const auto it = buffers_.find(buffer_id);
  if (it == buffers_.end()) return NoBuffer(buffer_id);
  auto buffer = std::move(it->second);
  buffers_.erase(it);
  return buffer;
}

Session::BufferTotals Session::buffer_totals() const {
  std::lock_guard lock(mutex_);
  BufferTotals totals{.count = static_cast<std::int64_t>(buffers_.size())};
  for (const auto& [id, buffer] : buffers_) {
    if (buffer != nullptr) totals.bytes += buffer->bytes();
  }
  return totals;
}

void Session::OnEnd(const void* key, std::function<void()> listener) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_) {
      listeners_.emplace(key, std::move(listener));
      return;
    }
  }
  listener();
}

void Session::Forget(const void* key) {
  std::unique_lock lock(mutex_);
  listeners_.erase(key);
  called_.wait(lock, [&] { return calling_ != key || ending_thread_ == std::this_thread::get_id(); });
}

void Session::End() {
  std::map<std::uint64_t, std::shared_ptr<Buffer>> buffers;  // unmapped without the lock
  std::unique_lock lock(mutex_);
  if (ended_) return;
  ended_ = true;
  buffers.swap(buffers_);
  ending_thread_ = std::this_thread::get_id();
  while (!listeners_.empty()) {
    auto listener = listeners_.extract(listeners_.begin());
    calling_ = listener.key();
    lock.unlock();
    listener.mapped()();
    lock.lock();
    calling_ = nullptr;
    called_.notify_all();
  }
  lock.unlock();
}

absl::StatusOr<std::shared_ptr<Session>> SessionManager::Open(const std::string& name) {
  if (auto s = CheckName(name); !s.ok()) return s;
  auto id = RandomBytes(kSessionIdBytes);
  if (!id.ok()) return id.status();
  std::lock_guard lock(mutex_);
  if (sessions_.size() >= kMaxSessions) {
    return Refuse(Reason::SESSION_LIMIT, "",
                  absl::StrFormat("the daemon has %d sessions already", sessions_.size()));
  }
  auto session = std::make_shared<Session>(*id, next_number_++, name);
  sessions_.emplace(*std::move(id), session);
  return session;
}

absl::StatusOr<std::shared_ptr<Session>> SessionManager::Find(const std::string& id) const {
  if (auto s = CheckId(id); !s.ok()) return s;
  std::lock_guard lock(mutex_);
  if (const auto it = sessions_.find(id); it != sessions_.end()) return it->second;
  const auto ended = FindEnded(id);
  return ended.ok() ? Ended() : ended.status();
}

absl::StatusOr<std::uint64_t> SessionManager::NumberOf(const std::string& id) const {
  if (auto s = CheckId(id); !s.ok()) return s;
  std::lock_guard lock(mutex_);
  if (const auto it = sessions_.find(id); it != sessions_.end()) return it->second->number();
  return FindEnded(id);
}

absl::StatusOr<std::uint64_t> SessionManager::FindEnded(const std::string& id) const {
  const auto it =
      std::find_if(ended_.begin(), ended_.end(), [&](const auto& ended) { return ended.id == id; });
  if (it != ended_.end()) return it->number;
  return Refuse(Reason::SESSION_NOT_FOUND, "session_id", "no live session has this id");
}

void SessionManager::End(const std::shared_ptr<Session>& session) {
  {
    std::lock_guard lock(mutex_);
    if (sessions_.erase(session->id()) != 0) ended_.push_back({session->id(), session->number()});
    if (ended_.size() > kMaxSessions) ended_.pop_front();
  }
  session->End();
}

std::vector<std::shared_ptr<Session>> SessionManager::List() const {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, session] : sessions_) sessions.push_back(session);
  }
  std::sort(sessions.begin(), sessions.end(),
            [](const auto& a, const auto& b) { return a->number() < b->number(); });
  return sessions;
}

}  // namespace kvsummary
