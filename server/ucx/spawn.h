// Starts summaryd-ucx.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"

namespace kvsummary {

// A child that has to be waited for.
struct UcxProcess {
  pid_t pid = 0;
  Descriptor pidfd;
  Descriptor socket;  // the daemon's end, non-blocking
};

// The child has the standard streams (no input), its end of the socketpair and no other descriptor, and
// UcxEnvironment.
// NOT_FOUND when there is no such binary.
absl::StatusOr<UcxProcess> SpawnUcx(const std::string& binary, const std::string& net_device,
                                    std::chrono::milliseconds progress_deadline);

}  // namespace kvsummary
