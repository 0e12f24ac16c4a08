// Answers of calls that sessions may repeat: by the request_id that the client chose, the last 1,024 of each
// session. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {

template <typename Answer>
class RememberedCalls {
 public:
  // The answer of an id whose call has ended, if it is remembered.
  std::optional<Answer> Find(std::uint64_t session, std::uint64_t request_id) const {
    const std::lock_guard lock(mutex_);
    const auto entry = sessions_.find(session);
    if (entry == sessions_.end()) return std::nullopt;
    const auto call = entry->second.calls.find(request_id);
    return call == entry->second.calls.end() ? std::nullopt : call->second;
  }
  // Begins the call of an id: nothing, or the answer of the one that had this id before. REQUEST_UNDER_WAY.
  // Id 0 is never remembered.
  absl::StatusOr<std::optional<Answer>> Begin(std::uint64_t session, std::uint64_t request_id) {
    if (request_id == 0) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto [call, is_new] = sessions_[session].calls.emplace(request_id, std::nullopt);
    if (!is_new && !call->second) {
      return Refuse(Reason::REQUEST_UNDER_WAY, "request_id",
                    absl::StrFormat("a call with request_id %d is under way", request_id));
    }
    return call->second;
  }
  // One that failed is forgotten: it has changed nothing and may be tried again.
  void End(std::uint64_t session, std::uint64_t request_id, const absl::StatusOr<Answer>& answer) {
    if (request_id == 0) return;
    const std::lock_guard lock(mutex_);
    const auto entry = sessions_.find(session);
    if (entry == sessions_.end()) return;  // it has ended
    if (!answer.ok()) {
      entry->second.calls.erase(request_id);
      return;
    }
    entry->second.calls[request_id] = *answer;
    entry->second.ended.push_back(request_id);
    if (entry->second.ended.size() <= kRemembered) return;
    entry->second.calls.erase(entry->second.ended.front());
    entry->second.ended.pop_front();
  }
  // To be called when a session that has begun calls has ended.
  void EndSession(std::uint64_t session) {
    const std::lock_guard lock(mutex_);
    sessions_.erase(session);
  }

 private:
  static constexpr std::size_t kRemembered = 1024;

  struct Entry {
    std::map<std::uint64_t, std::optional<Answer>> calls;  // nothing: under way
    std::deque<std::uint64_t> ended;                       // the oldest first
  };
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Entry> sessions_;
};

}  // namespace kvsummary
