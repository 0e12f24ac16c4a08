// Pidfds: a process by a descriptor, which tells its end for certain and across PID namespaces.
#pragma once

#include <sys/types.h>

#include <optional>

namespace kvsummary {

// The process of a pidfd, as this process numbers it: 0 or -1 where it has no number here (it is of another
// PID namespace, or has ended). Nothing when the descriptor is not a pidfd of a whole process: of a file, or
// of a thread.
std::optional<pid_t> PidOf(int descriptor);

// Whether the pidfd's process has ended: then none of its mappings is left.
bool HasEnded(int pidfd);

}  // namespace kvsummary
