// Hand-offs in the client's terms: what ClientSession's calls of them take and answer (client/session.h), as
// in kvsummary/v1/handoff.proto.
//
//   auto offer = (*prefill)->Offer(cache, {.committed_tokens = n, .blocks = blocks, .ring_block = 3});
//   ... the blocks and the ring block are free; offer->handoff travels to the decode side ...
//   auto accepted = (*decode)->Accept(cache, offer->handoff, {.resume_position = n - 1, .blocks = ..., ...});
//
// Of `blocks`, only those that the daemon needs are sent: a request may name all that it has.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "client/prefix.h"
#include "kernels/layout.h"

namespace kvsummary {

// A request, or with `more` the part of it that there is.
struct OfferedRequest {
  std::int64_t committed_tokens = 0;
  std::span<const std::int64_t> blocks = {};                 // from the request's first on
  std::int64_t ring_block = 0;                               // 0: none, with `more`
  std::optional<std::int64_t> highest_stored_position = {};  // absent: committed_tokens - 1 + k
  std::optional<std::int32_t> back_off_tokens = {};          // absent: 2
  std::uint64_t namespace_id = 0;                            // of `groups`
  std::span<const GroupBlocks> groups = {};                  // none of their blocks negative
  std::uint64_t request_id = 0;                              // 0: none
  SharedCounter ready = {};
  std::int32_t consumers = 0;  // 0: one
  bool detached = false;
  std::chrono::milliseconds lifetime{0};  // 0: the daemon's default
  bool more = false;                      // Append follows
  std::optional<LayerSpan> layers = {};   // with `more`; absent: all
};
struct HandoffOffer {
  std::string handoff;  // for the decode side; whoever has it can read the request
  std::uint64_t offer_id = 0;
  std::chrono::milliseconds lifetime{0};
  std::int64_t staged_bytes = 0;
};

// What is added to an offer that was made with `more`.
struct AppendedPart {
  std::optional<LayerSpan> layers = {};  // absent: all
  std::int64_t committed_tokens = 0;     // of these layers, so far
  std::int64_t offered_tokens = 0;       // committed_tokens of these layers' part before; 0: there was none
  std::span<const std::int64_t> blocks = {};  // from the request's first on
  std::span<const GroupBlocks> groups = {};
  std::uint64_t request_id = 0;
  SharedCounter ready = {};
  bool last = false;
  std::int64_t ring_block = 0;                               // with `last`
  std::optional<std::int64_t> highest_stored_position = {};  // with `last`
};

// Where a request goes.
struct AcceptedRequest {
  std::int64_t resume_position = 0;
  std::span<const std::int64_t> blocks = {};  // from the request's first on
  std::int64_t ring_block = 0;
  std::uint64_t namespace_id = 0;  // of `groups`
  std::span<const GroupBlocks> groups = {};
  SharedCounter ready = {};
  std::string transfer_id = {};  // 16 bytes; empty: a new one
};

// The numbers of kvsummary.v1.HandoffTransport.
enum class HandoffTransport { kUnspecified = 0, kSameDaemon = 1, kSameHost = 2, kUcx = 3, kGrpc = 4 };

// "same daemon", "same host", "UCX", "gRPC"; "unknown" for any other.
const char* NameOf(HandoffTransport transport);

struct AcceptResult {
  HandoffTransport transport = HandoffTransport::kUnspecified;
  std::int64_t bytes = 0;
  std::int64_t committed_tokens = 0;  // of the offer
  std::int32_t reconnects = 0;
  std::int64_t damaged_chunks = 0;
  std::chrono::nanoseconds device_time{0};
};

}  // namespace kvsummary
