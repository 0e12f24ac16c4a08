// Sessions and what they hold: tickets, registered buffers, mapped caches, waits.
//
// A session lives from Open to End; End comes from the end of its gRPC stream, however that comes. Ending
// is idempotent, never blocks on a device, and frees everything: after it, Find and FindBuffer refuse, the
// listeners given to OnEnd have been called, and what kernels still use goes with their last reference.
// All of it is thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/buffer.h"

namespace kvsummary {

class Session {
 public:
  // `id`: 16 random bytes, secret. `number`: public.
  Session(std::string id, std::uint64_t number, std::string name);

  const std::string& id() const { return id_; }
  std::uint64_t number() const { return number_; }
  const std::string& name() const { return name_; }
  bool ended() const;

  // Reserves an id for a buffer that is still to come (a memfd's ticket has to be redeemed first), or
  // registers one at once. RESOURCE_EXHAUSTED beyond the limits of a session, SESSION_NOT_FOUND after End.
  absl::StatusOr<std::uint64_t> ReserveBuffer();
  absl::Status FillBuffer(std::uint64_t buffer_id, std::shared_ptr<Buffer> buffer);
  // BUFFER_NOT_FOUND, or BUFFER_NOT_READY while it is only reserved.
  absl::StatusOr<std::shared_ptr<Buffer>> FindBuffer(std::uint64_t buffer_id) const;
  // Forgets it and hands it to the caller, who may wait for its last use. BUFFER_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Buffer>> RemoveBuffer(std::uint64_t buffer_id);

  // Calls `listener` at End; at once when that has been. `key` is for Forget, after which it is not called.
  void OnEnd(const void* key, std::function<void()> listener);
  void Forget(const void* key);

 private:
  friend class SessionManager;
  void End();

  const std::string id_;
  const std::uint64_t number_;
  const std::string name_;
  mutable std::mutex mutex_;
  bool ended_ = false;
  std::uint64_t next_buffer_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Buffer>> buffers_;  // null: reserved
  std::map<const void*, std::function<void()>> listeners_;
};

class SessionManager {
 public:
  // NAME_INVALID, or RESOURCE_EXHAUSTED beyond the daemon's limit of sessions.
  absl::StatusOr<std::shared_ptr<Session>> Open(const std::string& name);
  // SESSION_NOT_FOUND for an id that is not a live session's.
  absl::StatusOr<std::shared_ptr<Session>> Find(const std::string& id) const;
  void End(const std::shared_ptr<Session>& session);
  // Oldest first.
  std::vector<std::shared_ptr<Session>> List() const;

 private:
  mutable std::mutex mutex_;
  std::uint64_t next_number_ = 1;
  std::map<std::string, std::shared_ptr<Session>> sessions_;  // by id
};

}  // namespace kvsummary
