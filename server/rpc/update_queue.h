// Submission queues (proto/update_queue.h): one thread takes the entries of all of them, checks them as calls
// are checked, and gives them to their devices.
//
// The entries of a queue are applied one after the other; queues do not wait for each other, neither for a
// `ready` counter nor for a device nor for a check that takes long. While something happens the thread polls;
// a moment after the last event it sleeps, until the eventfd of a queue is written to. While an entry waits
// for its counter it polls for some time, then looks every millisecond.
//
// A queue ends with its session, and when its worker breaks the protocol. What is on a device by then is
// finished and answered first; nothing that comes later is taken. While the daemon drains, entries are
// refused.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"
#include "server/ops/stats.h"
#include "server/rpc/context.h"
#include "server/rpc/update_step.h"
#include "server/session/session.h"
#include "server/session/waits.h"

namespace kvsummary {

inline constexpr int kMaxSessionQueues = 4;

class UpdateQueues {
 public:
  // What the worker gets of its queue.
  struct Opened {
    Descriptor memory;
    Descriptor wake;
  };

  // `options`: the limit of a wait, and its clock.
  UpdateQueues(CacheManager& caches, Stats& stats, Drain& drain, const Waits::Options& options);
  // Ends every queue. Returns when no entry is on a device any more.
  ~UpdateQueues();
  UpdateQueues(const UpdateQueues&) = delete;
  UpdateQueues& operator=(const UpdateQueues&) = delete;

  // SESSION_LIMIT beyond the limit of a session, OUT_OF_MEMORY.
  absl::StatusOr<Opened> Open(const std::shared_ptr<Session>& session);

 private:
  struct Queue;
  struct Bell;
  using Clock = Waits::Clock;
  using Queues = std::vector<std::shared_ptr<Queue>>;

  void Run();
  // All below: on the thread. Each Advance answers whether it has done anything.
  bool AdvanceAll(Queues& queues);
  bool Advance(const std::shared_ptr<Queue>& queue);
  bool AdvanceWait(const std::shared_ptr<Queue>& queue);
  void Take(const std::shared_ptr<Queue>& queue);
  void Go(const std::shared_ptr<Queue>& queue);
  // Sleeps until there may be something to do, unless there is by now.
  void Sleep(Queues& queues, bool waiting);
  void End(Queue& queue, const absl::Status& why);

  // (any thread) Checks the entry that was taken, and gives it to its device.
  void Queued(const std::shared_ptr<Queue>& queue);
  // (any thread) The entry that was taken is over: the thread may take the next.
  void Answer(Queue& queue, const absl::StatusOr<StepEffect>& outcome);

  CacheManager& caches_;
  Stats& stats_;
  Drain& drain_;
  const Waits::Options options_;
  const Descriptor epoll_;
  const std::shared_ptr<Bell> bell_;
  std::atomic<bool> draining_ = false;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  Queues queues_;                      // those that have not ended
  std::atomic<bool> changed_ = false;  // queues_, since the thread last looked
  std::thread thread_;
};

}  // namespace kvsummary
