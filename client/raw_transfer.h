// The plain speed of what hand-offs are carried by, to be measured beside them: bytes moved with nothing
// around.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

class RawTransfer {
 public:
  virtual ~RawTransfer() = default;
  virtual std::string name() const = 0;
  // Moves `bytes` once, and returns when they are there.
  virtual absl::Status Move(std::int64_t bytes) = 0;
};

// One thread's memcpy between two places of host memory, of `bytes` at most.
std::unique_ptr<RawTransfer> MakeRawCopy(std::int64_t bytes);

// Zeros as PullResponses of 1 MiB over a stream of HandoffService.Pull, from a server of this process: over a
// Unix socket, or over TCP on the loopback.
absl::StatusOr<std::unique_ptr<RawTransfer>> MakeRawStream(bool unix_socket);

// All that are measured beside hand-offs of `bytes` from the daemon at `address`. Of UCX, its own benchmark's
// transfer belongs here.
absl::StatusOr<std::vector<std::unique_ptr<RawTransfer>>> MakeRawTransfers(const std::string& address,
                                                                           std::int64_t bytes);

}  // namespace kvsummary
