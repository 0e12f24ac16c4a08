// summaryctl replay --disaggregate: prefills on one daemon, decodes on another
// (client/replay/disaggregate.h).
//
// The decode side is the daemon at --decode-address, which may be the first one; without that flag it is one
// of the command's own on this host's memory, which allows the first as a peer and ends with the command.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/command_line.h"
#include "client/replay/disaggregate.h"
#include "client/replay/trace.h"

namespace kvsummary {

// Flags of replay that say something only with --disaggregate, itself among them.
std::vector<Flag> DisaggregateFlags();

// INVALID_ARGUMENT for these flags without --disaggregate, and for those of another kind of replay with it.
absl::Status CheckDisaggregateFlags(const Invocation& invocation);

// What the flags mean for these requests. INVALID_ARGUMENT names the flag and its value.
//
// The two caches differ in all that may: the decode side's blocks have 16 tokens (64 where the source's have
// 16) and a gap behind them, its rings have more rows. There is room for --concurrency requests, or for those
// that fit --cache-bytes on each side, twice as many on the decode side.
absl::StatusOr<DisaggregateOptions> MakeDisaggregateOptions(const Invocation& invocation,
                                                            std::span<const TraceRequest> requests);

// The --peers by which a daemon allows one that is reached at this address.
std::string PeerOf(const std::string& address);

// What the command's own daemon is started with: it pulls from the first with the client's TLS.
std::vector<std::string> OwnDaemonFlags(const Invocation& invocation);

// The command, as RunReplay.
int RunDisaggregate(const Invocation& invocation, std::span<const TraceRequest> requests);

}  // namespace kvsummary
