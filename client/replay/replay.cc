#include "client/replay/replay.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/commands.h"
#include "client/plane.h"
#include "client/replay/engines.h"
#include "client/replay/report.h"
#include "client/replay/run_disaggregate.h"
#include "client/replay/stop_on_signal.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

absl::Status CheckAtLeast(const Invocation& invocation, const char* flag, std::int64_t least) {
  if (invocation.Int64(flag) >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s=%s: must be at least %d", flag, invocation.Text(flag), least));
}

// Blocks of the cache, the null block included.
std::int64_t BlocksFor(const Invocation& invocation, const CacheGeometry& g,
                       std::span<const TraceRequest> requests) {
  if (invocation.Int64("blocks") > 0) return invocation.Int64("blocks");
  std::int64_t all = 1;
  for (const TraceRequest& r : requests) {
    all += (r.rows() + g.block_size - 1) / g.block_size;
  }
  return std::min({all, invocation.Bytes("cache-bytes") / g.block_stride, kMaxIndex / g.block_size});
}

void PrintReport(const ReplayReport& report, const EngineOptions& options, bool json) {
  absl::PrintF("%s", json ? FormatJson(report, options) : FormatTable(report, options));
  std::fflush(stdout);
  for (const Mismatch& m : report.mismatches) absl::FPrintF(stderr, "MISMATCH: %s\n", m.what);
}

}  // namespace

std::vector<Flag> ReplayFlags() {
  std::vector<Flag> flags{
      {"trace", "FILE", nullptr, "requests, one JSON object a line"},
      {"requests", "N", "0", "only the trace's first N requests; 0: all", CheckInt64},
      {"concurrency", "N", "64", "running requests at most", CheckInt32},
      {"layers", "N", "1", "layers of the cache", CheckInt32},
      {"k", "N", "0", "drafts of a verify step; 0: decode steps", CheckInt32},
      {"block-size", "TOKENS", "64", "8, 16, 32 ... 512", CheckInt32},
      {"cache-bytes", "SIZE", "2GiB", "summary pages of the cache at most", CheckBytes},
      {"blocks", "N", "0", "blocks of the cache; 0: by --cache-bytes", CheckInt64},
      {"chunk-tokens", "TOKENS", "8192", "prefill rows of a step at most", CheckInt32},
      {"sample", "N", "-1", "requests whose bytes are checked; -1: one in 50, at least 8", CheckInt64},
      {"seed", "N", "1", "of rows, acceptance and sample", CheckInt64},
      {"device", "DEVICE", "", "host or cuda:N; else the daemon's default"},
      PlaneFlag(),
      {"prefix", nullptr, "", "prompts start from the longest prefix in the daemon's page store"},
      {"publish-output", nullptr, "", "with --prefix: blocks of outputs are stored too"},
      {"engines", "N", "1", "engines at a time, each with a cache and part of the requests", CheckInt32},
      {"restart-engine-every", "N", "0", "requests after which an engine is killed and replaced; 0: never",
       CheckInt64},
      {"json", nullptr, "", "print one JSON object instead of a table"}};
  for (const Flag& flag : DisaggregateFlags()) flags.push_back(flag);
  return flags;
}

absl::Status CheckReplayFlags(const Invocation& invocation) {
  for (const auto& [flag, least] : {std::pair{"requests", 0},
                                    {"concurrency", 1},
                                    {"layers", 1},
                                    {"k", 0},
                                    {"block-size", kRegionTokens},
                                    {"blocks", 0},
                                    {"chunk-tokens", 1},
                                    {"sample", -1},
                                    {"engines", 1},
                                    {"restart-engine-every", 0},
                                    {"seed", 0}}) {
    if (auto status = CheckAtLeast(invocation, flag, least); !status.ok()) return status;
  }
  if (invocation.On("publish-output") && !invocation.On("prefix")) {
    return absl::InvalidArgumentError("--publish-output: is of no use without --prefix");
  }
  return CheckDisaggregateFlags(invocation);
}

absl::StatusOr<EngineOptions> ReplayOptions(const Invocation& invocation,
                                            std::span<const TraceRequest> requests) {
  if (auto status = CheckReplayFlags(invocation); !status.ok()) return status;
  CacheGeometry g{};
  g.layers = invocation.Int32("layers");
  g.block_size = invocation.Int32("block-size");
  g.block_stride = g.dense_block_stride();
  g.blocks = BlocksFor(invocation, g, requests);
  if (g.blocks < 2) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--cache-bytes=%s, --blocks=%s: a block takes %d bytes, and at least 2 are needed",
                        invocation.Text("cache-bytes"), invocation.Text("blocks"), g.block_stride));
  }
  g.ring_blocks = invocation.Int64("concurrency") + 1;
  g.k = invocation.Int32("k");
  g.capacity = std::max(kMinVerifyCapacity, kRegionTokens - 1 + g.k);
  g.rows_per_layer = g.capacity;

  const std::int64_t count = std::ssize(requests);
  const std::int64_t sample = invocation.Int64("sample");
  const EngineOptions options{.geometry = g,
                              .concurrency = invocation.Int32("concurrency"),
                              .chunk_tokens = invocation.Int32("chunk-tokens"),
                              .sampled_requests = std::min(
                                  count, sample >= 0 ? sample : std::max<std::int64_t>(8, (count + 49) / 50)),
                              .seed = static_cast<std::uint64_t>(invocation.Int64("seed")),
                              .order = {},
                              .publish_output = invocation.On("publish-output")};
  if (auto status = CheckReplay(requests, options); !status.ok()) return status;
  return options;
}

int RunReplay(const Invocation& invocation) {
  const auto requests = ReadTrace(invocation.Text("trace"), invocation.Int64("requests"));
  if (!requests.ok()) return Fail(requests.status());
  if (invocation.On("disaggregate")) return RunDisaggregate(invocation, *requests);
  const auto options = ReplayOptions(invocation, *requests);
  if (!options.ok()) return Fail(options.status());
  const StopOnSignal stop_on_signal;
  absl::StatusOr<ReplayReport> report;
  {
    ProgressBar bar(stderr);
    const auto progress = [&bar](std::int64_t done, std::int64_t total, const SchedulerCounts& counts) {
      bar.Update(done, total, counts.finished);
    };
    report = RunEngines(*requests,
                        {.engine = *options,
                         .address = invocation.Address(),
                         .tls = invocation.Tls(),
                         .plane = *ParsePlane(invocation.Text("plane")),
                         .device = invocation.Text("device"),
                         .engines = invocation.Int32("engines"),
                         .restart_every = invocation.Int64("restart-engine-every"),
                         .prefix = invocation.On("prefix")},
                        progress, stop_on_signal.stopped());
  }

  int code = 0;
  if (!report.ok()) {
    code = Fail(report.status());
  } else {
    PrintReport(*report, *options, invocation.On("json"));
    if (report->interrupted) {
      absl::FPrintF(stderr, "interrupted after %d of %d requests; the cache is deleted\n",
                    report->counts.finished, requests->size());
      code = kInterrupted;
    }
    if (report->mismatch_count > 0) code = kFailure;
  }
  return FlushOutput(code);
}

}  // namespace kvsummary
