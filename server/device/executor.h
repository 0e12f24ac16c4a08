// The one thread that works on a device: a queue of closures, run in order, bounded in number and in the
// bytes that they hold.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace kvsummary {

class Executor {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  struct Limits {
    std::size_t works = 1024;
    std::size_t bytes = std::size_t{2} << 30;
    // How long the thread looks for more work before it sleeps: waking it takes tens of microseconds.
    std::chrono::microseconds poll{0};
  };

  // `name` is of the thread (15 characters count) and in errors.
  explicit Executor(std::string name) : Executor(std::move(name), Limits()) {}
  Executor(std::string name, const Limits& limits);
  ~Executor() { Stop(); }

  // Queues `work`, which keeps `bytes` of memory until it has run, or refuses with QUEUE_FULL and drops it
  // unrun. Any thread.
  absl::Status Submit(Work work, std::size_t bytes = 0);
  // Queues `work` however long the queue is: for what frees, which must not be refused.
  void SubmitFree(Work work);
  // Runs what is queued, then ends the thread. Idempotent; nothing may be submitted afterwards.
  void Stop();

 private:
  struct Queued {
    Work work;
    std::size_t bytes;
  };

  void Run();
  // Returns when there is something queued, or after the time to poll.
  void Poll() const;

  const std::string name_;
  const Limits limits_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Queued> queue_;
  std::size_t bytes_ = 0;  // of the queued works and the one that runs
  std::atomic<std::int64_t> submitted_ = 0;
  std::int64_t taken_ = 0;  // of submitted_; the thread's
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kvsummary
