// Starts summaryd-ucx.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"

namespace kvsummary {

// A child that has to be waited for.
struct UcxProcess {
  pid_t pid = 0;
  Descriptor pidfd;
  Descriptor socket;  // the daemon's end, non-blocking
};

// The helper's environment: this process's, and for each variable of UCX that matters here and that this
// process's does not set, a value of ours. UCX reads most of them before main.
std::vector<std::string> UcxEnvironment(const std::string& net_device);

// The child has the standard streams (no input), its end of the socketpair and no other descriptor.
// NOT_FOUND when there is no such binary.
absl::StatusOr<UcxProcess> SpawnUcx(const std::string& binary, const std::string& net_device,
                                    std::chrono::milliseconds progress_deadline);

}  // namespace kvsummary
