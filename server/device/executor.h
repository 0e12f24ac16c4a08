// The one thread that works on a device: a bounded queue of closures, run in order.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace kvsummary {

class Executor {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  // `name` is of the thread (15 characters count) and in errors.
  explicit Executor(std::string name, std::size_t max_queued = 1024);
  ~Executor() { Stop(); }

  // Queues `work`, or refuses with QUEUE_FULL and drops it unrun. Any thread.
  absl::Status Submit(Work work);
  // Queues `work` however long the queue is: for what frees, which must not be refused.
  void SubmitFree(Work work);
  // Runs what is queued, then ends the thread. Idempotent; nothing may be submitted afterwards.
  void Stop();

 private:
  void Run();

  const std::string name_;
  const std::size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kvsummary
