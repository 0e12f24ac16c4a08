// Checks of a running daemon that want processes of their own. Each returns the exit status: 0 passed, 1
// failed.
#pragma once

#include <string>
#include <vector>

#include "client/client.h"

namespace kvsummary::gpu {

struct CheckOptions {
  std::string program;  // this one
  std::string address;
  std::string device = "cuda:0";
  int daemon_pid = 0;
  int kills = 100;
  double goal_ms = 100;
  long long before_bytes = -1;  // of the GPU in use before the daemon was started
};

// Kills workers that have everything a session can have, each at one of several kinds of work, and prints how
// long it takes until another session has their cache, as a histogram. Fails when the 99th percentile is
// above a second, or when the daemon's GPU memory, resident memory or descriptors have grown.
int CheckKills(const CheckOptions& options);
// What CheckKills kills: a worker that has a cache `name` and does work of a kind.
int RunWorker(const CheckOptions& options, const std::string& name, int kind);

// The daemon takes nothing of the GPU before its first cache, and then no more than its caches and the
// overhead that it announces, whatever steps it has run; afterwards all but the overhead is free again.
int CheckMemory(const CheckOptions& options);

// Makes caches NAME=DEVICE in a session, prints a line of JSON for each with all that kvs_map needs, and
// keeps the session until its input ends.
int HoldSession(const CheckOptions& options, const std::vector<std::string>& caches);

// The message of a status, for a person.
int Fail(const char* what, const absl::Status& status);

// Bytes in use of the device's GPU, by all processes; -1 when nobody can tell.
long long UsedGpuBytes(Client& client, const std::string& device);

}  // namespace kvsummary::gpu
