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
  // Moves `bytes`, and returns how long it took until they were there, in seconds.
  virtual absl::StatusOr<double> Move(std::int64_t bytes) = 0;
};

// One thread's memcpy between two places of host memory, of `bytes` at most.
std::unique_ptr<RawTransfer> MakeRawCopy(std::int64_t bytes);

// Zeros as PullResponses of 1 MiB over a stream of HandoffService.Pull, from a server of this process: over a
// Unix socket, or over TCP on the loopback.
absl::StatusOr<std::unique_ptr<RawTransfer>> MakeRawStream(bool unix_socket);

struct RawTransfers {
  std::vector<std::unique_ptr<RawTransfer>> transfers;
  std::vector<std::string> missing;  // what cannot be measured here, and why
};

// All that are measured beside hand-offs of `bytes` from the daemon at `address`; with those that travel by
// UCX also UCX's own benchmark (ucx_perftest.h), in messages of 1 MiB, of which it sends some hundreds
// whatever `bytes` are: it counts its rate, not its start.
absl::StatusOr<RawTransfers> MakeRawTransfers(const std::string& address, std::int64_t bytes, bool ucx);

}  // namespace kvsummary
