// Sessions and what they hold: tickets, registered buffers, mapped caches, waits.
//
// A session lives from Open to End; End comes from the end of its gRPC stream, however that comes. Ending
// is idempotent, never blocks on a device, and frees everything: after it, Find and FindBuffer refuse, the
// listeners given to OnEnd have been called, and what kernels still use goes with their last reference.
// All of it is thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/buffer.h"

namespace kvsummary {

inline constexpr std::size_t kSessionIdBytes = 16;
inline constexpr std::size_t kMaxSessions = 1024;
inline constexpr std::size_t kMaxSessionBuffers = 4096;

class Session {
 public:
  struct BufferTotals {
    std::int64_t count = 0;  // the reserved ones too
    std::int64_t bytes = 0;
  };

  // `id`: 16 random bytes, secret. `number`: public.
  Session(std::string id, std::uint64_t number, std::string name);

  const std::string& id() const { return id_; }
  std::uint64_t number() const { return number_; }
  const std::string& name() const { return name_; }
  std::chrono::steady_clock::time_point opened_at() const { return opened_at_; }
  bool ended() const;

  // Reserves an id for a buffer that is still to come (a memfd's ticket has to be redeemed first).
  // SESSION_LIMIT beyond the limits of a session, SESSION_ENDED after End.
  absl::StatusOr<std::uint64_t> ReserveBuffer();
  // Puts the buffer under its reserved id, or refuses and forgets the id: BUFFER_REGISTERED when the session
  // has memory of the same identity already, SESSION_ENDED after End.
  absl::Status FillBuffer(std::uint64_t buffer_id, std::shared_ptr<Buffer> buffer);
  // BUFFER_NOT_FOUND, or BUFFER_NOT_READY while it is only reserved.
  absl::StatusOr<std::shared_ptr<Buffer>> FindBuffer(std::uint64_t buffer_id) const;
  // Forgets it and hands it to the caller, who may wait for its last use; null where it was only reserved.
  // BUFFER_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Buffer>> RemoveBuffer(std::uint64_t buffer_id);
  BufferTotals buffer_totals() const;

  // Calls `listener` at End; at once when that has been. A second listener of one key is dropped. `key` is
  // for Forget, after which it is not called: Forget waits for a listener that is being called on another
  // thread, so its caller holds no lock that the listener takes.
  void OnEnd(const void* key, std::function<void()> listener);
  void Forget(const void* key);

 private:
  friend class SessionManager;
  void End();

  const std::string id_;
  const std::uint64_t number_;
  const std::string name_;
  const std::chrono::steady_clock::time_point opened_at_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  bool ended_ = false;
  std::uint64_t next_buffer_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Buffer>> buffers_;  // null: reserved
  std::map<const void*, std::function<void()>> listeners_;
  // The listener that End is calling, and the thread that does.
  const void* calling_ = nullptr;
  std::thread::id ending_thread_;
  std::condition_variable called_;
};

class SessionManager {
 public:
  // NAME_INVALID, or SESSION_LIMIT beyond the daemon's limit of sessions.
  absl::StatusOr<std::shared_ptr<Session>> Open(const std::string& name);
  // SESSION_REQUIRED for an id that has not 16 bytes, SESSION_ENDED for one of the last kMaxSessions that
  // have ended, SESSION_NOT_FOUND for any other that is not a live session's.
  absl::StatusOr<std::shared_ptr<Session>> Find(const std::string& id) const;
  // The number of a session that lives or is one of the last that have ended. Refuses as Find.
  absl::StatusOr<std::uint64_t> NumberOf(const std::string& id) const;
  void End(const std::shared_ptr<Session>& session);
  // Oldest first.
  std::vector<std::shared_ptr<Session>> List() const;

 private:
  absl::StatusOr<std::uint64_t> FindEnded(const std::string& id) const;  // with mutex_ held

  mutable std::mutex mutex_;
  std::uint64_t next_number_ = 1;
  std::map<std::string, std::shared_ptr<Session>> sessions_;  // by id
  struct EndedSession {
    std::string id;
    std::uint64_t number;
  };
  std::deque<EndedSession> ended_;  // the last kMaxSessions
};

}  // namespace kvsummary
