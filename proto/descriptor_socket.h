// The protocol of the descriptor socket: how file descriptors travel between summaryd and its clients.
//
// A SOCK_SEQPACKET Unix socket. A client connects, sends one DescriptorRequest, gets one DescriptorReply,
// and may go on with the next. Tickets come from gRPC calls (CacheService.ExportMemory and RegisterBuffer,
// UpdateService.OpenQueue), are random, are good for one use and end with their session. The daemon checks
// the peer's uid and closes a connection that redeems nothing for five seconds or sends anything but this.
//
//   ticket of        request carries               reply carries
//   ExportMemory     a pidfd of the client itself  the segment's descriptor
//   RegisterBuffer   a memfd, sealed against       nothing: the buffer is registered
//                    shrinking and growing, its
//                    pages present (fallocate)
//   OpenQueue        any, which is closed          the queue's memfd, or its eventfd
//
// The pidfd tells the daemon when a mapping ends for certain: a generation stops calls, not writes to
// mapped memory. So it must be of the process that sends it, and that process must not pass the memory on:
// not by its descriptor, nor to a child by fork (madvise MADV_DONTFORK).
//
// Multi-byte fields are in the host's byte order: both ends are on one host.
#pragma once

#include <cstdint>

namespace kvsummary {

inline constexpr std::uint32_t kDescriptorMagic = 0x6b767331;  // "kvs1"
inline constexpr int kTicketBytes = 32;
inline constexpr int kDescriptorReasonBytes = 64;

struct DescriptorRequest {
  std::uint32_t magic = kDescriptorMagic;
  std::uint32_t reserved = 0;
  std::uint8_t ticket[kTicketBytes] = {};
};
static_assert(sizeof(DescriptorRequest) == 40);

struct DescriptorReply {
  std::uint32_t magic = kDescriptorMagic;
  std::uint32_t code = 0;        // of absl::StatusCode; 0: done
  std::uint64_t size_bytes = 0;  // of the memory
  char reason[kDescriptorReasonBytes] =
      {};  // name as in kvsummary/v1/errors.proto, zero-terminated; empty: done
};
static_assert(sizeof(DescriptorReply) == 80);

}  // namespace kvsummary
