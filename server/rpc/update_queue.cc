#include "server/rpc/update_queue.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/update_queue.h"
#include "server/error.h"
#include "server/memory/memory.h"
#include "server/rpc/grpc_thread.h"

namespace kvsummary {
namespace {

// How long the thread polls after the last event: always, and while an entry waits for its counter (a worker
// announces the steps of a forward pass, which takes milliseconds, ahead).
constexpr std::chrono::microseconds kSpin{100};
constexpr std::chrono::milliseconds kWaitingSpin{10};
constexpr int kWaitingNapMs = 1;

// A copy of an entry that its worker may be changing.
QueueEntry CopyEntry(QueueEntry& from) {
  QueueEntry entry;
  auto* to = reinterpret_cast<std::uint64_t*>(&entry);
  auto* words = reinterpret_cast<std::uint64_t*>(&from);
  for (std::size_t i = 0; i < sizeof(entry) / sizeof(*to); ++i) {
    to[i] = std::atomic_ref(words[i]).load(std::memory_order_relaxed);
  }
  return entry;
}

std::optional<ArrayPlace> Place(const QueueArray& array) {
  if (array.buffer_id == 0) return std::nullopt;
  return ArrayPlace{array.buffer_id, array.offset_bytes, array.count};
}

std::optional<CounterPlace> Place(const QueueCounter& counter) {
  if (counter.buffer_id == 0) return std::nullopt;
  return CounterPlace{counter.buffer_id, counter.offset_bytes, counter.value};
}

absl::StatusOr<StepKind> Kind(std::uint32_t kind) {
  switch (static_cast<QueueStepKind>(kind)) {
    case QueueStepKind::kDecode:
      return StepKind::kDecode;
    case QueueStepKind::kVerify:
      return StepKind::kVerify;
    case QueueStepKind::kPrefill:
      return StepKind::kPrefill;
  }
  return Refuse(Reason::FIELD_MISSING, "update", absl::StrFormat("%d is no kind of update", kind));
}

absl::StatusOr<StepRequest> ToStep(const QueueEntry& entry) {
  const auto kind = Kind(entry.kind);
  if (!kind.ok()) return kind.status();
  if (entry.cache_name_bytes > kQueueCacheNameBytes) {
    return Refuse(Reason::NAME_INVALID, "cache.name",
                  absl::StrFormat("a name has no %d bytes", entry.cache_name_bytes));
  }
  StepRequest step;
  step.kind = *kind;
  step.cache.assign(entry.cache_name, entry.cache_name_bytes);
  step.generation = entry.cache_generation;
  step.layers = {entry.first_layer, entry.layers};
  step.slots.place = Place(entry.slots);
  step.positions.place = Place(entry.positions);
  step.query_start_loc.place = Place(entry.query_start_loc);
  step.seq_lens.place = Place(entry.seq_lens);
  step.ring_bases.place = Place(entry.ring_bases);
  step.rows = RowsReference{entry.rows.buffer_id,
                            {.key_offset = entry.rows.key_offset_bytes,
                             .z_offset = entry.rows.z_offset_bytes,
                             .row_stride = entry.rows.row_stride_bytes,
                             .layer_stride = entry.rows.layer_stride_bytes}};
  return step;
}

// Zero-terminated, cut off where it is too long.
template <std::size_t N>
void CopyText(const std::string& text, char (&to)[N]) {
  to[text.copy(to, N - 1)] = '\0';
}

absl::Status DrainingStatus() {
  return Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls");
}

Descriptor Duplicate(int descriptor) { return Descriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

// What wakes the thread, beside the queues' eventfds. Outlives it while a device may still ring.
struct UpdateQueues::Bell {
  const Descriptor event{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> asleep = false;

  void Ring() const { eventfd_write(event.get(), 1); }
};

struct UpdateQueues::Queue {
  std::shared_ptr<Session> session;
  std::shared_ptr<Bell> bell;
  std::unique_ptr<Memory> memory;
  Descriptor wake;  // an eventfd
  UpdateQueueMemory& shared;
  std::atomic<bool> session_ended = false;
  // Set by the thread when it lets go of the entry that was taken, reset by whoever answers that: all below
  // is the thread's when it is not set, and the other's when it is.
  std::atomic<bool> under_way = false;
  bool waiting = false;  // for step.ready, until `deadline`
  bool ended = false;
  std::uint64_t answered = 0;  // entries; the worker's copy of this number is never read
  // Of the entry that was taken.
  std::optional<Drain::Call> call = std::nullopt;
  StepRequest request = {};
  Shared step = {};
  Clock::time_point deadline = {};
};

UpdateQueues::UpdateQueues(CacheManager& caches, Stats& stats, Drain& drain, const Waits::Options& options)
    : caches_(caches),
      stats_(stats),
      drain_(drain),
      options_(options),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      bell_(std::make_shared<Bell>()) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_->event.get(), &event);
  drain_.Listen(this, [this] {
    draining_ = true;
    bell_->Ring();
  });
  thread_ = std::thread([this] { Run(); });
}

UpdateQueues::~UpdateQueues() {
  drain_.Forget(this);
  stopping_ = true;
  bell_->Ring();
  thread_.join();
  for (const auto& queue : queues_) {
    queue->under_way.wait(true);
    if (queue->waiting) Answer(*queue, DrainingStatus());
    End(*queue, DrainingStatus());
  }
}

absl::StatusOr<UpdateQueues::Opened> UpdateQueues::Open(const std::shared_ptr<Session>& session) {
  auto memory = AllocateHostMemory(kUpdateQueueBytes);
  if (!memory.ok()) return AtField(memory.status(), "");
  Opened opened{.memory = Duplicate((*memory)->descriptor()),
                .wake = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))};
  Descriptor own_wake = Duplicate(opened.wake.get());
  if (!opened.memory || !opened.wake || !own_wake) {
    return Refuse(Reason::OUT_OF_MEMORY, "", "no file descriptors for a queue");
  }
  auto* shared = new ((*memory)->data()) UpdateQueueMemory;
  const std::shared_ptr<Queue> queue(
      new Queue{session, bell_, *std::move(memory), std::move(own_wake), *shared});
  {
    std::lock_guard lock(mutex_);
    const auto same = [&](const auto& other) { return other->session == session; };
    if (std::count_if(queues_.begin(), queues_.end(), same) >= kMaxSessionQueues) {
      return Refuse(Reason::SESSION_LIMIT, "session_id",
                    absl::StrFormat("the session has %d queues already", kMaxSessionQueues));
    }
    // Edge-triggered: nobody ever reads it, so a worker that reads too, or makes it block, changes nothing.
    epoll_event event{.events = EPOLLIN | EPOLLET, .data = {}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, queue->wake.get(), &event) != 0) {
      return Refuse(Reason::OUT_OF_MEMORY, "", "the system watches no more eventfds");
    }
    queues_.push_back(queue);
    changed_ = true;
  }
  session->OnEnd(queue.get(), [weak = std::weak_ptr(queue)] {
    if (const auto ending = weak.lock()) {
      ending->session_ended = true;
      ending->bell->Ring();
    }
  });
  bell_->Ring();
  return opened;
}

void UpdateQueues::Run() {
  pthread_setname_np(pthread_self(), "queues");
  Queues queues;
  auto last_event = Clock::now();
  while (!stopping_) {
    if (changed_.exchange(false)) {
      std::lock_guard lock(mutex_);
      queues = queues_;
    }
    if (AdvanceAll(queues)) {
      last_event = Clock::now();
      continue;
    }
    const bool waiting =
        std::any_of(queues.begin(), queues.end(), [](const auto& q) { return !q->under_way && q->waiting; });
    if (Clock::now() - last_event < (waiting ? Clock::duration(kWaitingSpin) : kSpin)) {
      std::this_thread::yield();
    } else {
      Sleep(queues, waiting);
    }
  }
}

void UpdateQueues::Sleep(Queues& queues, bool waiting) {
  // Whoever brings something now sees that the thread sleeps, or is seen by it.
  bell_->asleep = true;
  for (const auto& queue : queues) std::atomic_ref(queue->shared.sleeping) = 1;
  const bool busy = AdvanceAll(queues);
  epoll_event events[16];
  if (!busy) epoll_wait(epoll_.get(), events, std::size(events), waiting ? kWaitingNapMs : -1);
  bell_->asleep = false;
  for (const auto& queue : queues) std::atomic_ref(queue->shared.sleeping) = 0;
}

bool UpdateQueues::AdvanceAll(Queues& queues) {
  bool any = false;
  bool ended = false;
  for (const auto& queue : queues) {
    if (!Advance(queue)) continue;
    any = true;
    ended = ended || (!queue->under_way && queue->ended);
  }
  if (ended) {
    std::lock_guard lock(mutex_);
    std::erase_if(queues_, [](const auto& queue) { return !queue->under_way && queue->ended; });
    queues = queues_;
  }
  return any;
}

bool UpdateQueues::Advance(const std::shared_ptr<Queue>& queue) {
  Queue& q = *queue;
  if (q.under_way) return false;
  if (q.waiting) return AdvanceWait(queue);
  if (q.session_ended) {
    End(q, Refuse(Reason::SESSION_ENDED, "session_id", "the session has ended"));
    return true;
  }
  const std::uint64_t submitted = std::atomic_ref(q.shared.submitted).load();
  if (submitted == q.answered) return false;
  if (submitted - q.answered > kUpdateQueueEntries) {  // also when it has fallen
    End(q, Refuse(Reason::QUEUE_BROKEN, "submitted",
                  absl::StrFormat("%d entries are submitted and %d answered", submitted, q.answered)));
    return true;
  }
  Take(queue);
  return true;
}

void UpdateQueues::Take(const std::shared_ptr<Queue>& queue) {
  Queue& q = *queue;
  const QueueEntry entry = CopyEntry(q.shared.entries[q.answered % kUpdateQueueEntries]);
  q.call.emplace(drain_);
  if (!q.call->admitted().ok()) return Answer(q, q.call->admitted());
  auto request = ToStep(entry);
  if (!request.ok()) return Answer(q, request.status());
  auto step = FindShared(q.session, Place(entry.ready), Place(entry.done));
  if (!step.ok()) return Answer(q, step.status());
  q.request = *std::move(request);
  q.step = *std::move(step);
  if (!q.step.MustWait()) return Go(queue);
  q.waiting = true;
  q.deadline = options_.now() + options_.limit;
}

bool UpdateQueues::AdvanceWait(const std::shared_ptr<Queue>& queue) {
  Queue& q = *queue;
  if (q.step.ready->Reached()) {
    q.waiting = false;
    Go(queue);
    return true;
  }
  absl::Status status;
  if (q.session_ended) {
    status = Refuse(Reason::SESSION_ENDED, "shared.session_id", "the session ended while the step waited");
  } else if (draining_) {
    status = DrainingStatus();
  } else if (options_.now() >= q.deadline) {
    status = Refuse(Reason::WAIT_TIMEOUT, "shared.ready", "shared.ready did not reach its value in time");
  } else {
    return false;
  }
  q.waiting = false;
  Answer(q, status);
  return true;
}

void UpdateQueues::Go(const std::shared_ptr<Queue>& queue) {
  queue->under_way = true;
  if (!SlowToParse(queue->request)) return Queued(queue);
  OnGrpcThread([this, queue] { Queued(queue); });
}

void UpdateQueues::Queued(const std::shared_ptr<Queue>& queue) {
  auto update = Parse(caches_, queue->request, std::move(queue->step));
  if (!update.ok()) return Answer(*queue, update.status());
  Executor& executor = update->cache->device().executor();
  const std::size_t bytes = update->copied.bytes();
  const auto queued = executor.Submit(
      [this, queue, update = *std::move(update)] {
        const auto status = Apply(stats_, update);
        Answer(*queue, status.ok() ? absl::StatusOr<StepEffect>(update.effect) : status);
      },
      bytes);
  if (!queued.ok()) Answer(*queue, queued);
}

void UpdateQueues::Answer(Queue& queue, const absl::StatusOr<StepEffect>& outcome) {
  QueueCompletion completion;
  completion.number = queue.answered + 1;
  if (outcome.ok()) {
    completion.rows = outcome->rows;
    completion.regions_closed = outcome->regions_closed;
  } else {
    ++stats_.refused_steps;
    const absl::Status& status = outcome.status();
    completion.code = static_cast<std::uint32_t>(status.code());
    CopyText(RefusalReason(status), completion.reason);
    CopyText(RefusalField(status), completion.field);
    CopyText(std::string(status.message()), completion.message);
  }
  queue.shared.completions[queue.answered % kUpdateQueueEntries] = completion;
  ++queue.answered;
  std::atomic_ref(queue.shared.completed).store(queue.answered, std::memory_order_release);
  queue.step = Shared();
  queue.call.reset();
  if (!queue.under_way.exchange(false)) return;  // on the thread itself
  queue.under_way.notify_all();
  if (queue.bell->asleep) queue.bell->Ring();
}

void UpdateQueues::End(Queue& queue, const absl::Status& why) {
  queue.ended = true;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, queue.wake.get(),
            nullptr);  // the worker has it too: closing is not enough
  queue.session->Forget(&queue);
  queue.shared.end_code = static_cast<std::uint32_t>(why.code());
  CopyText(RefusalReason(why), queue.shared.end_reason);
  std::atomic_ref(queue.shared.completed).store(kUpdateQueueEnded, std::memory_order_release);
}

}  // namespace kvsummary
