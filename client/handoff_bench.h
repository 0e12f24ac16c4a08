// summaryctl handoff-bench: how fast requests are handed over from one daemon to another, or within one.
//
// Rounds: as many requests at a time as --concurrency says are offered, then accepted, all blocks and rings
// as they would be after prefill; then the same bytes are moved by what hand-offs are made of
// (client/raw_transfer.h). The first round is not counted. Rates are medians over rounds, latencies of all
// calls. In the end the bytes of the last round are compared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/command_line.h"
#include "client/handoff.h"
#include "client/tls.h"

namespace kvsummary {

struct HandoffBenchOptions {
  std::string from = {};  // addresses; equal: one daemon
  std::string to = {};
  TlsFiles tls = {};             // of the client's connections to them
  std::string from_device = {};  // empty: the daemon's default
  std::string to_device = {};
  std::int64_t tokens = 0;    // of a request
  std::int64_t requests = 0;  // at least; whole rounds are run
  std::int32_t layers = 0;
  std::int32_t concurrency = 1;
};

struct HandoffBenchReport {
  // The bytes of a round, moved in another way.
  struct Raw {
    std::string name;
    std::vector<double> seconds;  // one a round
  };

  std::int64_t requests = 0;
  std::int64_t request_bytes = 0;  // accepted of each
  HandoffTransport transport = HandoffTransport::kUnspecified;
  std::vector<double> offer_seconds, accept_seconds;  // of rounds: all Offers, all Accepts
  std::vector<double> offer_us, accept_us;            // of calls
  std::vector<double> end_to_end_us;                  // Offer and Accept of a request
  std::vector<double> device_ns;                      // of Accepts
  std::vector<Raw> raw;
  std::vector<std::string> missing;  // what of these could not be measured, and why
  std::int64_t reconnects = 0;
  std::int64_t damaged_chunks = 0;
  std::int64_t wrong_blocks = 0;  // whose bytes differ in the end
};

// Makes a cache on either side, and deletes it in the end, also after an error.
absl::StatusOr<HandoffBenchReport> BenchHandoffs(const HandoffBenchOptions& options);

std::string FormatTable(const HandoffBenchReport& report, const HandoffBenchOptions& options);
// One object on one line.
std::string FormatJson(const HandoffBenchReport& report, const HandoffBenchOptions& options);

std::vector<Flag> HandoffBenchFlags();

// The command. kFailure after an error or when bytes differ.
int RunHandoffBench(const Invocation& invocation);

}  // namespace kvsummary
