// Addresses that a daemon listens on.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvsummary {

// Where to listen, in gRPC's form.
struct ListenAddress {
  std::string grpc;  // "unix:/abs/path" or "127.0.0.1:50051"
  std::string path;  // of the socket; empty for TCP
};

// "unix:PATH", "HOST:PORT" or ":PORT" (the loopback host), without any '%'. INVALID_ARGUMENT says what is
// wrong, also with a path that does not fit a socket address (107 bytes).
absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text);

}  // namespace kvsummary
