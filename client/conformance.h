// summaryctl conformance: golden files (client/golden.h) run through the daemon, on one of the planes.
//
// Each case gets a cache of its geometry with strides of its own and two layers more: the case runs on the
// middle one, and the others, block 0 and ring block 0 must stay zero. After every step all pages and ring
// rows are read back and laid into a copy of the case's backing and ring, where gaps, null blocks and rows
// beyond the capacity keep their first bytes; its digests must be the recorded ones, and after the last
// step its bytes too. The cache is deleted at the end, also after a failure.
#pragma once

#include <cstdint>
#include <string>

#include "client/client.h"
#include "client/command_line.h"
#include "client/plane.h"

namespace kvsummary {

struct ConformanceCount {
  std::int64_t passed = 0;  // steps
  std::int64_t failed = 0;  // steps; one for a file that cannot be read
};

// Runs one file by `plane` on `device` (empty: the daemon's default) and tells on stderr what differs.
ConformanceCount RunGoldenFile(Client& client, PlaneKind plane, const std::string& device,
                               const std::string& path);

// The command. The last line on stdout is "N passed, N failed"; 1 when something failed.
int RunConformance(const Invocation& invocation);

}  // namespace kvsummary
