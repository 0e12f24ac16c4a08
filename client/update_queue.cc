#include "client/update_queue.h"

#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/status.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// How long a wait polls before it naps, and the share of the time waited so far that a nap takes at most.
constexpr std::chrono::microseconds kSpin{500};
constexpr int kNapShare = 8;
constexpr Clock::duration kLongestNap = std::chrono::milliseconds(1);

QueueArray ToEntry(const SharedArray& array) { return {array.buffer_id, array.offset_bytes, array.count}; }
QueueCounter ToEntry(const SharedCounter& counter) {
  return {counter.buffer_id, counter.offset_bytes, counter.value};
}

template <std::size_t N>
std::string Text(const char (&text)[N]) {
  return std::string(text, strnlen(text, N));
}

}  // namespace

absl::StatusOr<std::shared_ptr<QueueMapping>> QueueMapping::Map(const OwnedDescriptor& memory,
                                                                std::int64_t bytes, OwnedDescriptor wake) {
  if (!memory.valid() || !wake.valid() || bytes != kUpdateQueueBytes) {
    return absl::InternalError(absl::StrCat("the daemon's queue has ", bytes, " bytes, expected ",
                                            kUpdateQueueBytes, ", or lacks a descriptor"));
  }
  void* data = mmap(nullptr, sizeof(UpdateQueueMemory), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (data == MAP_FAILED) return absl::InternalError(absl::StrCat("mmap of a queue: ", std::strerror(errno)));
  const std::shared_ptr<QueueMapping> mapping(
      new QueueMapping(static_cast<UpdateQueueMemory*>(data), std::move(wake)));
  const UpdateQueueMemory& queue = mapping->memory();
  if (queue.magic != kUpdateQueueMagic || queue.version != kUpdateQueueVersion) {
    return absl::InternalError(
        absl::StrCat("the daemon's queue is of version ", queue.version, ", not ", kUpdateQueueVersion));
  }
  return mapping;
}

QueueMapping::~QueueMapping() { munmap(memory_, sizeof(UpdateQueueMemory)); }

void QueueMapping::Wake() const { eventfd_write(wake_.get(), 1); }

void QueueMapping::End() {
  const std::atomic_ref completed(memory_->completed);
  const std::uint64_t answered = completed.load();
  if (answered == kUpdateQueueEnded) return;  // by the daemon, which has said why
  answered_ = answered;
  memory_->end_code = static_cast<std::uint32_t>(absl::StatusCode::kUnavailable);
  completed.store(kUpdateQueueEnded);
}

absl::StatusOr<std::uint64_t> UpdateQueue::Decode(const Cache& cache, LayerSpan layers,
                                                  const SharedUpdate& update) {
  return Submit(QueueStepKind::kDecode, cache, layers, update);
}

absl::StatusOr<std::uint64_t> UpdateQueue::Verify(const Cache& cache, LayerSpan layers,
                                                  const SharedUpdate& update) {
  return Submit(QueueStepKind::kVerify, cache, layers, update);
}

absl::StatusOr<std::uint64_t> UpdateQueue::Prefill(const Cache& cache, LayerSpan layers,
                                                   const SharedUpdate& update) {
  return Submit(QueueStepKind::kPrefill, cache, layers, update);
}

absl::StatusOr<std::uint64_t> UpdateQueue::Submit(QueueStepKind kind, const Cache& cache, LayerSpan layers,
                                                  const SharedUpdate& u) {
  if (cache.name.size() > kQueueCacheNameBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument,
                     absl::StrCat("a cache's name has not ", cache.name.size(), " bytes"), "NAME_INVALID",
                     "cache.name");
  }
  if (submitted_ >= kUpdateQueueEntries) {
    if (auto s = Await(submitted_ + 1 - kUpdateQueueEntries); !s.ok()) return s;
  }
  if (ended()) return end();
  UpdateQueueMemory& queue = mapping_->memory();
  QueueEntry& entry = queue.entries[submitted_ % kUpdateQueueEntries];
  entry.kind = static_cast<std::uint32_t>(kind);
  entry.cache_name_bytes = static_cast<std::uint32_t>(cache.name.size());
  entry.cache_generation = cache.generation;
  entry.first_layer = layers.first;
  entry.layers = layers.count;
  entry.rows = {u.rows.buffer_id, u.rows.key_offset_bytes, u.rows.z_offset_bytes, u.rows.row_stride_bytes,
                u.rows.layer_stride_bytes};
  entry.slots = ToEntry(u.slots);
  entry.positions = ToEntry(u.positions);
  entry.query_start_loc = ToEntry(u.query_start_loc);
  entry.seq_lens = ToEntry(u.seq_lens);
  entry.ring_bases = ToEntry(u.ring_bases);
  entry.ready = ToEntry(u.ready);
  entry.done = ToEntry(u.done);
  cache.name.copy(entry.cache_name, sizeof(entry.cache_name));
  ++submitted_;
  std::atomic_ref(queue.submitted).store(submitted_);
  if (std::atomic_ref(queue.sleeping).load() != 0) mapping_->Wake();
  return submitted_;
}

absl::Status UpdateQueue::Await(std::uint64_t number) const {
  const std::atomic_ref completed(mapping_->memory().completed);
  const auto start = Clock::now();
  while (completed.load(std::memory_order_acquire) < number) {
    const auto waited = Clock::now() - start;
    if (waited < kSpin) {
      std::this_thread::yield();
    } else if (waited < timeout_) {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / kNapShare, kLongestNap));
    } else {
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon has not answered update ", number, " within ", timeout_.count(), " ms"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<UpdateResult> UpdateQueue::Wait(std::uint64_t number) {
  if (number == 0 || number > submitted_ || submitted_ - number >= kUpdateQueueEntries) {
    return absl::OutOfRangeError(absl::StrCat("there is no answer to update ", number, " any more, or yet"));
  }
  if (auto s = Await(number); !s.ok()) return s;
  const QueueCompletion& completion = mapping_->memory().completions[(number - 1) % kUpdateQueueEntries];
  if (completion.number != number || number > mapping_->answered()) return end();
  if (completion.code == 0) {
    return UpdateResult{.rows = completion.rows, .regions_closed = completion.regions_closed};
  }
  return MakeError(static_cast<absl::StatusCode>(completion.code), Text(completion.message),
                   Text(completion.reason), Text(completion.field));
}

bool UpdateQueue::ended() const {
  return std::atomic_ref(mapping_->memory().completed).load() == kUpdateQueueEnded;
}

absl::Status UpdateQueue::end() const {
  const UpdateQueueMemory& queue = mapping_->memory();
  return FromPlain({static_cast<int>(queue.end_code), Text(queue.end_reason), "the queue has ended"});
}

}  // namespace kvsummary
