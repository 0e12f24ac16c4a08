// Waits for counters in shared memory: one thread polls them all on the host, so that no device and no
// other call ever waits behind a worker.
//
// The thread spins for a moment after something has happened, then naps, the longer the longer nothing
// happens (never above a millisecond), and sleeps for good while nothing waits. Every wait ends: when its
// counter gets there, when it is cancelled, when its session ends, or after the limit. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/references.h"
#include "server/session/session.h"

namespace kvsummary {

class Waits {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    Clock::duration limit = std::chrono::seconds(60);
    int max_per_session = 1024;
    std::function<Clock::time_point()> now = Clock::now;  // for `limit`
  };

  // Called once, on the thread of the waits, which it must not keep: OK when the counter has been reached,
  // CANCELLED, SESSION_ENDED or WAIT_TIMEOUT. May call anything here.
  using Done = absl::AnyInvocable<void(absl::Status) &&>;

  struct Wait;  // one that was started

  explicit Waits(Options options);
  // Cancels what still waits, and returns when all of it has been told.
  ~Waits();

  // Starts a wait; SESSION_LIMIT beyond the session's number of them, and then `done` is never called.
  // `field` is the counter's, for errors.
  absl::StatusOr<std::weak_ptr<Wait>> Start(std::shared_ptr<Session> session, Counter counter,
                                            std::string field, Done done);
  // Ends it soon, unless it has ended.
  void Cancel(const std::weak_ptr<Wait>& wait);
  // Waits of a session that have not been told.
  int Count(const Session& session) const;

 private:
  void Run();
  // What has become of a wait; nothing while it goes on.
  std::optional<absl::Status> Outcome(const Wait& wait) const;
  void Release(const Session* session);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Wait>> started_;  // not yet seen by the thread
  std::map<const Session*, int> counts_;        // of sessions with waits
  bool woken_ = false;                          // since the thread last looked
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace kvsummary
