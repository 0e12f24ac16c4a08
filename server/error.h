// Refusals: an absl::Status with a reason from the documented list (proto/kvsummary/v1/errors.proto) and
// the field at fault, carried as payloads so that nothing below server/rpc needs protobuf.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvsummary {

// X(reason, code): names as in ErrorReason, without its prefix.
#define KVSUMMARY_REASONS(X)                     \
  X(NAME_INVALID, kInvalidArgument)              \
  X(CACHE_EXISTS, kAlreadyExists)                \
  X(CACHE_NOT_FOUND, kNotFound)                  \
  X(GENERATION_STALE, kAborted)                  \
  X(DEVICE_NOT_FOUND, kNotFound)                 \
  X(EXPF_MISMATCH, kFailedPrecondition)          \
  X(DEVICE_FAILED, kInternal)                    \
  X(MEMORY_BUDGET_EXCEEDED, kResourceExhausted)  \
  X(OUT_OF_MEMORY, kResourceExhausted)           \
  X(QUEUE_FULL, kResourceExhausted)              \
  X(DRAINING, kUnavailable)                      \
  X(COUNT_OUT_OF_RANGE, kInvalidArgument)        \
  X(BLOCK_SIZE_INVALID, kInvalidArgument)        \
  X(BLOCK_STRIDE_INVALID, kInvalidArgument)      \
  X(CAPACITY_TOO_SMALL, kInvalidArgument)        \
  X(CAPACITY_ABOVE_ROWS, kInvalidArgument)       \
  X(CACHE_TOO_LARGE, kInvalidArgument)           \
  X(K_INVALID, kInvalidArgument)                 \
  X(LAYERS_OUT_OF_RANGE, kInvalidArgument)       \
  X(SIZE_MISMATCH, kInvalidArgument)             \
  X(SLOT_OUT_OF_RANGE, kInvalidArgument)         \
  X(NULL_BLOCK, kInvalidArgument)                \
  X(RING_BASE_MISALIGNED, kInvalidArgument)      \
  X(RING_OUT_OF_RANGE, kInvalidArgument)         \
  X(NULL_RING_BLOCK, kInvalidArgument)           \
  X(POSITION_OUT_OF_RANGE, kInvalidArgument)     \
  X(SLOT_POSITION_MISMATCH, kInvalidArgument)    \
  X(DUPLICATE_SLOT, kInvalidArgument)            \
  X(DUPLICATE_RING_BASE, kInvalidArgument)       \
  X(RING_BASE_DIFFERS, kInvalidArgument)         \
  X(QUERY_START_LOC_INVALID, kInvalidArgument)   \
  X(SEQ_LEN_INVALID, kInvalidArgument)           \
  X(QUERY_TOO_LONG, kInvalidArgument)            \
  X(VERIFY_CAPACITY, kFailedPrecondition)        \
  X(POSITIONS_NOT_CONSECUTIVE, kInvalidArgument) \
  X(PADDING_BETWEEN_ROWS, kInvalidArgument)      \
  X(BLOCK_OUT_OF_RANGE, kInvalidArgument)        \
  X(DUPLICATE_BLOCK, kInvalidArgument)           \
  X(FIELD_MISSING, kInvalidArgument)             \
  X(MESSAGE_MALFORMED, kInvalidArgument)         \
  X(SESSION_NOT_FOUND, kNotFound)                \
  X(SESSION_REQUIRED, kInvalidArgument)          \
  X(SESSION_ENDED, kAborted)                     \
  X(SESSION_LIMIT, kResourceExhausted)           \
  X(CACHE_IN_USE, kFailedPrecondition)           \
  X(CACHE_STILL_MAPPED, kFailedPrecondition)     \
  X(CACHE_NOT_YOURS, kFailedPrecondition)        \
  X(MEMORY_KIND_UNSUPPORTED, kInvalidArgument)   \
  X(DESCRIPTOR_SOCKET_OFF, kFailedPrecondition)  \
  X(PEER_NOT_ALLOWED, kPermissionDenied)         \
  X(TICKET_UNKNOWN, kNotFound)                   \
  X(DESCRIPTOR_MISSING, kInvalidArgument)        \
  X(MEMFD_NOT_SEALED, kInvalidArgument)          \
  X(MEMFD_TOO_SMALL, kInvalidArgument)           \
  X(BUFFER_NOT_FOUND, kNotFound)                 \
  X(BUFFER_NOT_READY, kFailedPrecondition)       \
  X(BUFFER_REGISTERED, kAlreadyExists)           \
  X(BUFFER_RANGE, kInvalidArgument)              \
  X(BUFFER_DEVICE, kFailedPrecondition)          \
  X(HANDLE_INVALID, kInvalidArgument)            \
  X(CUDA_IPC_VMM_MEMORY, kFailedPrecondition)    \
  X(CUDA_IPC_MIG, kFailedPrecondition)           \
  X(CUDA_IPC_SAME_PROCESS, kFailedPrecondition)  \
  X(DEVICE_NOT_VISIBLE, kFailedPrecondition)     \
  X(WAIT_TIMEOUT, kDeadlineExceeded)             \
  X(QUEUE_BROKEN, kAborted)                      \
  X(NAMESPACE_NOT_FOUND, kNotFound)              \
  X(NAMESPACE_DIFFERS, kFailedPrecondition)      \
  X(NAMESPACE_LIMIT, kResourceExhausted)         \
  X(GROUP_INVALID, kInvalidArgument)             \
  X(GROUP_OUT_OF_RANGE, kInvalidArgument)        \
  X(RING_GROUP, kInvalidArgument)                \
  X(VIEW_MISMATCH, kInvalidArgument)             \
  X(HASH_WIDTH_INVALID, kInvalidArgument)        \
  X(PARENT_HASH_INVALID, kInvalidArgument)       \
  X(CHAIN_MISMATCH, kInvalidArgument)            \
  X(BLOCK_NOT_COMMITTED, kInvalidArgument)       \
  X(BLOCK_NOT_LEASED, kInvalidArgument)          \
  X(LEASE_NOT_FOUND, kNotFound)                  \
  X(QUOTA_EXCEEDED, kResourceExhausted)          \
  X(STORE_FULL, kResourceExhausted)              \
  X(CACHE_NOT_BOUND, kFailedPrecondition)        \
  X(REQUEST_UNDER_WAY, kAborted)                 \
  X(HANDOFF_OFF, kFailedPrecondition)            \
  X(HANDOFF_INVALID, kInvalidArgument)           \
  X(HANDOFF_NOT_FOUND, kNotFound)                \
  X(HANDOFF_EXPIRED, kNotFound)                  \
  X(HANDOFF_BUDGET_EXCEEDED, kResourceExhausted) \
  X(HANDOFF_LIMIT, kResourceExhausted)           \
  X(HANDOFF_TAKEN, kFailedPrecondition)          \
  X(HANDOFF_INCOMPLETE, kFailedPrecondition)     \
  X(HANDOFF_COMPLETE, kFailedPrecondition)       \
  X(HANDOFF_CANCELLED, kAborted)                 \
  X(GEOMETRY_DIFFERS, kFailedPrecondition)       \
  X(RESUME_OUT_OF_RANGE, kInvalidArgument)       \
  X(RESUME_NOT_SERVABLE, kFailedPrecondition)    \
  X(HANDOFF_PEER_NOT_ALLOWED, kPermissionDenied) \
  X(PEER_UNREACHABLE, kUnavailable)              \
  X(CHUNK_DAMAGED, kDataLoss)                    \
  X(HANDOFF_BLOCK_NOT_OFFERED, kInvalidArgument)

enum class Reason {
#define X(name, code) name,
  KVSUMMARY_REASONS(X)
#undef X
};

// "SLOT_OUT_OF_RANGE".
std::string_view ReasonName(Reason reason);

// A status of the reason's code. `field` is the path of the request's field at fault, as "slots[3]", or
// empty.
absl::Status Refuse(Reason reason, std::string_view field, std::string_view message);

// A refusal that another daemon has made, whose reason may be none of ours.
absl::Status MakeRefusal(absl::StatusCode code, std::string_view reason, std::string_view field,
                         std::string_view message);

// The same refusal, said of another field.
absl::Status AtField(absl::Status refusal, std::string_view field);

// The name of a status's reason, and its field; empty when Refuse did not make it.
std::string RefusalReason(const absl::Status& status);
std::string RefusalField(const absl::Status& status);

inline absl::string_view ToAbsl(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace kvsummary
