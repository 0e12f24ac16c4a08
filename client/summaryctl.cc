// summaryctl: asks a daemon from the command line. Exit codes: 0 done, 1 failed, 2 wrong usage.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/command_line.h"
#include "client/commands.h"
#include "client/conformance.h"
#include "client/handoff_bench.h"
#include "client/plane.h"
#include "client/replay/replay.h"

namespace kvsummary {
namespace {

absl::Status CheckFormat(const std::string& value) {
  if (value == "hex" || value == "raw") return absl::OkStatus();
  return absl::InvalidArgumentError("formats are hex and raw");
}

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands{
      {"ping", "", "Tells the round trip, the version and the devices with their memory.", {}, RunPing},
      {"caches", "", "Lists the caches.", {}, RunCaches},
      {"sessions", "", "Lists the sessions and what they hold.", {}, RunSessions},
      {"stats",
       "",
       "Tells what the daemon has done since its start, and what its page store holds.",
       {{"json", nullptr, "", "print one JSON object instead of a table"}},
       RunStats},
      {"check",
       "",
       "Whether the page store's books agree with each other; 1 when they do not.",
       {},
       RunCheck},
      {"namespaces", "", "Lists the page store's namespaces and what they take.", {}, RunNamespaces},
      {"create-cache",
       "",
       "Makes a cache, zeroed.",
       {{"name", "NAME", nullptr, "unique in the daemon"},
        {"layers", "N", nullptr, "layers that keep summaries", CheckInt32},
        {"blocks", "N", nullptr, "KV blocks, the null block included", CheckInt64},
        {"block-size", "TOKENS", nullptr, "a multiple of 8", CheckInt32},
        {"ring-blocks", "N", nullptr, "requests at a time and the null ring block", CheckInt64},
        {"capacity", "ROWS", nullptr, "ring rows of a request and layer, at least 7 + k", CheckInt32},
        {"rows-per-layer", "ROWS", "0", "ring rows reserved; 0: the capacity", CheckInt32},
        {"k", "N", "0", "speculative tokens of a verify step", CheckInt32},
        {"device", "DEVICE", "", "host or cuda:N; else the daemon's default"},
        {"block-stride", "SIZE", "0", "bytes from block to block; 0: the least", CheckBytes}},
       RunCreateCache},
      {"delete-cache",
       "",
       "Deletes a cache; its memory is free at once, unless a process has it mapped.",
       {{"name", "NAME", nullptr, "of the cache"}},
       RunDeleteCache},
      {"dump",
       "",
       "Prints pages, ring rows, or everything when no block is named.",
       {{"name", "NAME", nullptr, "of the cache"},
        {"blocks", "LIST", "", "pages of these blocks, such as 1,4-7", CheckList},
        {"ring-blocks", "LIST", "", "rows of these ring blocks", CheckList},
        {"layers", "FIRST:COUNT", "", "else all layers", CheckLayers},
        {"format", "hex|raw", "hex", "raw: the bytes, [blocks][layers][...]", CheckFormat}},
       RunDump},
      {"conformance",
       "FILE...",
       "Runs golden files and compares every byte after every step.",
       {{"device", "DEVICE", "", "host or cuda:N; else the daemon's default"}, PlaneFlag()},
       RunConformance},
      {"replay", "",
       "Drives the daemon with a trace's traffic as an engine would, and checks pages and rings.",
       ReplayFlags(), RunReplay},
      {"handoff-bench", "", "Measures how fast requests are handed over from one daemon to another.",
       HandoffBenchFlags(), RunHandoffBench},
  };
  return commands;
}

int Main(const std::vector<std::string>& arguments) {
  const auto invocation = ParseCommandLine(Commands(), arguments);
  if (!invocation.ok()) {
    absl::FPrintF(stderr, "summaryctl: %s\n\"summaryctl help [COMMAND]\" tells more.\n",
                  std::string(invocation.status().message()));
    return kUsage;
  }
  if (!invocation->help) return invocation->command->run(*invocation);
  absl::PrintF("%s", invocation->command == nullptr ? Help(Commands()) : Help(*invocation->command));
  return FlushOutput(0);
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) { return kvsummary::Main({argv + 1, argv + argc}); }
