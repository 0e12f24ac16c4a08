// A submission queue: updates of a session without gRPC, through memory that a worker and summaryd share.
//
// UpdateService.OpenQueue answers a ticket for the memory (a memfd of kUpdateQueueBytes, sealed) and one for
// an eventfd, both redeemed on the descriptor socket. The worker writes entries and counts them in
// `submitted`; the daemon takes them one after the other, in order, answers each in its completion and counts
// them in `completed`.
//
// To submit entry n, counted from 1 (one thread at a time):
//   1. wait until completed >= n - kUpdateQueueEntries: an entry's place is free when it has been answered;
//   2. write entries[(n - 1) % kUpdateQueueEntries];
//   3. store n to `submitted`, sequentially consistent;
//   4. load `sleeping`, sequentially consistent; if it is not 0, write 1 to the eventfd. (The daemon stores
//      `sleeping` and then looks at `submitted` once more before it sleeps: one of both sees the other.)
// Entry n has been answered when completed >= n; then completions[(n - 1) % kUpdateQueueEntries] says how,
// until entry n + kUpdateQueueEntries is submitted. A CUDA stream may wait for `completed` too
// (cuStreamWaitValue64, GEQ, on memory that is registered with cudaHostRegister): it rises for every entry,
// applied or refused.
//
// A refused entry changes nothing and holds nobody back: those behind it are applied. The counter that an
// entry names as `done` is set when the entry has been applied, before `completed` rises, and never for a
// refused one, as SharedStep.done in kvsummary/v1/update.proto: who waits for `done` alone must look at the
// completion too. Checks and errors are those of UpdateDecode, UpdateVerify and UpdatePrefill, field names
// included.
//
// A queue ends with its session, or when `submitted` has fallen or runs more than kUpdateQueueEntries ahead
// of the entries answered (QUEUE_BROKEN). Then `end_code` and `end_reason` say why, and `completed` is
// kUpdateQueueEnded, which releases every wait: an entry whose completion does not bear its number by then
// has not been applied, and never will be. When the daemon dies, the worker stores these itself, and does not
// know what became of entries that were not answered.
//
// All numbers are little-endian. The daemon keeps its own counts, copies an entry before it checks it, and
// reads nothing else here: what a worker writes where it should not harms the worker alone.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvsummary {

static_assert(std::endian::native == std::endian::little, "the queue lies in memory as it is defined");

inline constexpr std::uint32_t kUpdateQueueMagic = 0x6b767332;  // "kvs2"
inline constexpr std::uint32_t kUpdateQueueVersion = 1;
inline constexpr std::uint64_t kUpdateQueueEntries = 128;  // a power of two
inline constexpr std::uint64_t kUpdateQueueEnded = 0x7fffffffffffffff;
// Each counter, entry and completion begins a cache line, as the memory does. Their places see to that, not
// the alignment of their types: a copy on a stack needs none, and gcc 12 misplaces one of more than 32 bytes
// under detect_stack_use_after_return.
inline constexpr int kQueueLineBytes = 64;
inline constexpr int kQueueReasonBytes = 40;
inline constexpr int kQueueFieldBytes = 64;
inline constexpr int kQueueCacheNameBytes = 128;

enum class QueueStepKind : std::uint32_t { kDecode = 1, kVerify = 2, kPrefill = 3 };

// References as in kvsummary/v1/update.proto. An array or a counter with a buffer_id of 0 is absent.
struct QueueArray {
  std::uint64_t buffer_id = 0;
  std::int64_t offset_bytes = 0;
  std::int64_t count = 0;
};
struct QueueCounter {
  std::uint64_t buffer_id = 0;
  std::int64_t offset_bytes = 0;
  std::uint64_t value = 0;
};
struct QueueRows {
  std::uint64_t buffer_id = 0;
  std::int64_t key_offset_bytes = 0;
  std::int64_t z_offset_bytes = 0;
  std::int64_t row_stride_bytes = 0;
  std::int64_t layer_stride_bytes = 0;
};

// An update: the fields of Update...Request, rows and arrays by reference.
struct QueueEntry {
  std::uint32_t kind = 0;              // of QueueStepKind
  std::uint32_t cache_name_bytes = 0;  // of cache_name
  std::uint64_t cache_generation = 0;
  std::int32_t first_layer = 0;
  std::int32_t layers = 0;
  QueueRows rows;
  QueueArray slots;
  QueueArray positions;
  QueueArray query_start_loc;
  QueueArray seq_lens;
  QueueArray ring_bases;
  QueueCounter ready;
  QueueCounter done;
  char cache_name[kQueueCacheNameBytes] = {};
  char reserved[24] = {};
};
static_assert(sizeof(QueueEntry) == 384 && sizeof(QueueEntry) % kQueueLineBytes == 0);

// How an entry was answered.
struct QueueCompletion {
  std::uint64_t number = 0;  // of the entry; 0: none yet
  std::uint32_t code = 0;    // of absl::StatusCode; 0: applied
  std::uint32_t reserved = 0;
  std::int64_t rows = 0;                // as in UpdateResult
  std::int64_t regions_closed = 0;      // as in UpdateResult
  char reason[kQueueReasonBytes] = {};  // name as in kvsummary/v1/errors.proto, zero-terminated
  char field[kQueueFieldBytes] = {};    // at fault, zero-terminated
  char message[184] = {};               // for people, zero-terminated, cut off where it is longer
};
static_assert(sizeof(QueueCompletion) == 320 && sizeof(QueueCompletion) % kQueueLineBytes == 0);

struct UpdateQueueMemory {
  std::uint32_t magic = kUpdateQueueMagic;
  std::uint32_t version = kUpdateQueueVersion;
  std::uint32_t end_code = 0;  // of absl::StatusCode; 0: the queue is open. Written before `completed`
  char end_reason[kQueueReasonBytes] = {};
  char reserved[12] = {};
  std::uint64_t submitted = 0;  // by the worker
  char after_submitted[56] = {};
  std::uint64_t completed = 0;  // by the daemon
  char after_completed[56] = {};
  std::uint32_t sleeping = 0;  // by the daemon
  char after_sleeping[60] = {};
  QueueEntry entries[kUpdateQueueEntries];
  QueueCompletion completions[kUpdateQueueEntries];
};

static_assert(offsetof(UpdateQueueMemory, submitted) == 64 && offsetof(UpdateQueueMemory, completed) == 128 &&
              offsetof(UpdateQueueMemory, sleeping) == 192 && offsetof(UpdateQueueMemory, entries) == 256);
static_assert(alignof(UpdateQueueMemory) <= alignof(std::max_align_t));

inline constexpr std::int64_t kUpdateQueueBytes = sizeof(UpdateQueueMemory);

}  // namespace kvsummary
