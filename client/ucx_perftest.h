// What UCX itself carries a second: its own benchmark, ucx_perftest of Debian's ucx-utils, between two
// processes over the loopback interface, with the UCX_* environment that hand-offs have. While it runs its
// first process accepts one TCP connection on every interface.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvsummary {

struct UcxPerftestResult {
  double bytes_per_second = 0;
  double cpu_seconds = 0;  // of both processes, which never sleep
};

// Sends `messages` of so many bytes as active messages (ucp_am_bw). NOT_FOUND when ucx_perftest is not
// installed; UNAVAILABLE, with what it said, when it gives no figure within a minute.
absl::StatusOr<UcxPerftestResult> RunUcxPerftest(std::int64_t message_bytes, std::int64_t messages);

}  // namespace kvsummary
