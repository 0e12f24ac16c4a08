// Datagrams with descriptors on a SOCK_SEQPACKET socket.
#pragma once

#include <cstddef>
#include <vector>

#include "server/memory/descriptor.h"

namespace kvsummary {

enum class ReceiveResult {
  kMessage,  // whole
  kNothing,  // none is there (the socket does not block)
  kClosed,   // the peer has closed, or the socket is broken
  kBad,      // of another length than asked for, or with descriptors that were cut off
};

// Receives a message of exactly `bytes` bytes. `descriptors` gets those that came with it, close-on-exec,
// whatever the result: none is lost.
ReceiveResult ReceiveMessage(int socket, void* data, std::size_t bytes, std::vector<Descriptor>& descriptors);

// Sends a message, with `descriptor` unless that is -1. False when the peer does not take it at once.
bool SendMessage(int socket, const void* data, std::size_t bytes, int descriptor);

}  // namespace kvsummary
