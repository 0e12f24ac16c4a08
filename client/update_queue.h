// A session's submission queue: updates without a call each.
//
//   auto queue = (*session)->OpenQueue();
//   auto number = (*queue)->Decode(*cache, {0, 23}, {.rows = ..., .slots = ..., ...});
//   auto result = (*queue)->Wait(*number);
//
// The daemon takes updates in the order of their submission, with the checks and the errors of
// ClientSession's calls. A refused one changes nothing and holds nobody back: those behind it are applied.
// proto/update_queue.h says what lies in the memory.
//
// When the session is over, however that comes, every wait ends: Wait answers why, and completed() has a
// value above every number. Not thread-safe; may outlive the session.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/descriptor_client.h"
#include "client/session.h"
#include "proto/update_queue.h"

namespace kvsummary {

// The queue's memory as this process has it mapped, shared by the queue and its session. Thread-safe.
class QueueMapping {
 public:
  // INTERNAL when the memory is not a queue of this version.
  static absl::StatusOr<std::shared_ptr<QueueMapping>> Map(const OwnedDescriptor& memory, std::int64_t bytes,
                                                           OwnedDescriptor wake);
  ~QueueMapping();
  QueueMapping(const QueueMapping&) = delete;
  QueueMapping& operator=(const QueueMapping&) = delete;

  UpdateQueueMemory& memory() const { return *memory_; }
  void Wake() const;
  // Releases every wait on behalf of a daemon that has gone.
  void End();
  // The number up to which completions are known to be whole.
  std::uint64_t answered() const { return answered_; }

 private:
  QueueMapping(UpdateQueueMemory* memory, OwnedDescriptor wake) : memory_(memory), wake_(std::move(wake)) {}

  UpdateQueueMemory* const memory_;
  const OwnedDescriptor wake_;
  std::atomic<std::uint64_t> answered_ = kUpdateQueueEnded;
};

class UpdateQueue {
 public:
  // Made by ClientSession::OpenQueue.
  UpdateQueue(std::shared_ptr<QueueMapping> mapping, std::chrono::milliseconds timeout)
      : mapping_(std::move(mapping)), timeout_(timeout) {}

  // Submits an update and answers its number; numbers rise by one from 1. Waits for room when
  // kUpdateQueueEntries are unanswered already, for the client's timeout at most (DEADLINE_EXCEEDED).
  // NAME_INVALID for a name that no cache has; any other fault is in the answer to the update.
  absl::StatusOr<std::uint64_t> Decode(const Cache& cache, LayerSpan layers, const SharedUpdate& update);
  absl::StatusOr<std::uint64_t> Verify(const Cache& cache, LayerSpan layers, const SharedUpdate& update);
  absl::StatusOr<std::uint64_t> Prefill(const Cache& cache, LayerSpan layers, const SharedUpdate& update);

  // Waits for the answer to an update, for the client's timeout at most (DEADLINE_EXCEEDED; the update goes
  // on). An answer is kept until kUpdateQueueEntries more updates have been submitted, then it
  // is an OUT_OF_RANGE.
  absl::StatusOr<UpdateResult> Wait(std::uint64_t number);

  // For a stream that waits: the counter that reaches an update's number when that has been answered (GEQ),
  // and the memory that it lies in, to be registered with cudaHostRegister. As long as this object lives.
  const std::uint64_t* completed() const { return &mapping_->memory().completed; }
  std::span<char> memory() const {
    return {reinterpret_cast<char*>(&mapping_->memory()), sizeof(UpdateQueueMemory)};
  }

 private:
  absl::StatusOr<std::uint64_t> Submit(QueueStepKind kind, const Cache& cache, LayerSpan layers,
                                       const SharedUpdate& update);
  // Waits until the entry of this number has been answered, or the queue has ended.
  absl::Status Await(std::uint64_t number) const;
  bool ended() const;
  absl::Status end() const;

  const std::shared_ptr<QueueMapping> mapping_;
  const std::chrono::milliseconds timeout_;
  std::uint64_t submitted_ = 0;
};

}  // namespace kvsummary
