// The commands of summaryctl that ask the daemon something. Each prints its answer to stdout and returns the
// exit code: 0, 1 on a failure (told on stderr), 2 where the flags make no sense together.
#pragma once

#include "absl/status/status.h"
#include "client/command_line.h"

namespace kvsummary {

inline constexpr int kFailure = 1;
inline constexpr int kUsage = 2;

// Tells a failure on stderr: code, message, reason and field. Returns kFailure.
int Fail(const absl::Status& status);

// kFailure when stdout did not take everything that was printed, else `code`.
int FlushOutput(int code);

int RunPing(const Invocation& invocation);
int RunSessions(const Invocation& invocation);
int RunCaches(const Invocation& invocation);
int RunCreateCache(const Invocation& invocation);
int RunDeleteCache(const Invocation& invocation);
int RunStats(const Invocation& invocation);
// kFailure when the store's books do not agree.
int RunCheck(const Invocation& invocation);
int RunNamespaces(const Invocation& invocation);
int RunDump(const Invocation& invocation);

}  // namespace kvsummary
