// What the daemon and its helper summaryd-ucx say to each other, over a socketpair of SOCK_SEQPACKET: one
// struct a message. Both ends are of one build and one machine.
//
// The helper's end is descriptor kUcxControlFd. The helper says kVersion and kListening, or kRefused and
// ends. Afterwards it answers each command that has an `id` with one kDone, in any order, and ends when the
// socket closes. A memory's descriptor comes with the command that adds it (SCM_RIGHTS).
#pragma once

#include <cstdint>

namespace kvsummary {

inline constexpr int kUcxControlFd = 3;

// Longest range of one fetch: one active message.
inline constexpr std::int64_t kMaxUcxFetchBytes = std::int64_t{1} << 20;

// Fetches from one peer that are under way at most; the others wait in order.
inline constexpr int kUcxPeerFetches = 8;

enum class UcxCommandKind : std::uint32_t {
  kAddStaging,  // id, bytes; maps the descriptor for reading. Memories are numbered from 0 as they come
  kAddLanding,  // id, bytes; maps the descriptor for writing; likewise, a count of its own
  kLend,        // token, staging, from, bytes
  kRevoke,      // id, token; done when no send of the token's ranges is under way
  kFetch,       // all but none
};

struct UcxCommand {
  UcxCommandKind kind;
  std::uint32_t staging;  // number of the memory, of the source
  std::uint32_t landing;  // number of the memory, of the target
  std::uint32_t ipv4;     // of the source, in network byte order
  std::uint32_t port;     // of the source
  std::uint32_t unused;
  std::uint64_t id;
  std::uint64_t token;
  std::int64_t from;  // offset in the staging memory
  std::int64_t bytes;
  std::int64_t to;  // offset in the landing memory
};

enum class UcxEventKind : std::uint32_t {
  kVersion,    // text: UCX's version
  kListening,  // text: HOST:PORT
  kRefused,    // code, text: why it cannot start
  kDone,       // id, code, text
};

struct UcxEvent {
  UcxEventKind kind;
  std::int32_t code;  // absl::StatusCode
  std::uint64_t id;
  char text[240];  // ends with a zero
};

}  // namespace kvsummary
