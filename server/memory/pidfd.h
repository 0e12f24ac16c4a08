// Pidfds: a process by a descriptor, which tells its end for certain and across PID namespaces.
#pragma once

namespace kvsummary {

// Whether the descriptor is a pidfd of a whole process (not of one of its threads).
bool IsPidfd(int descriptor);

// Whether the pidfd's process has ended: then none of its mappings is left.
bool HasEnded(int pidfd);

}  // namespace kvsummary
