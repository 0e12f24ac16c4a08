#include "client/replay/replay.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <random>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/replay/engine.h"
#include "client/replay/report.h"
#include "client/replay/target.h"
#include "client/replay/trace.h"
#include "client/units.h"

namespace kvsummary {
namespace {

class ClientTarget : public Target {
 public:
  ClientTarget(Client& client, const Cache& cache) : client_(client), cache_(cache) {}

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& update) override {
    return client_.Decode(cache_, layers, update);
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& update) override {
    return client_.Verify(cache_, layers, update);
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& update) override {
    return client_.Prefill(cache_, layers, update);
  }
  absl::StatusOr<std::vector<std::uint8_t>> ReadPages(std::span<const std::int64_t> blocks) override {
    return client_.ReadPages(cache_, blocks, {0, cache_.geometry.layers});
  }
  absl::StatusOr<std::vector<std::uint16_t>> ReadRing(std::int64_t ring_block) override {
    return client_.ReadRing(cache_, std::span(&ring_block, 1), {0, cache_.geometry.layers});
  }

 private:
  Client& client_;
  const Cache& cache_;
};

std::atomic<bool> g_stop = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

// While it lives, SIGINT and SIGTERM set g_stop.
class StopOnSignal {
 public:
  StopOnSignal() {
    g_stop = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { g_stop = true; };
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~StopOnSignal() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

 private:
  struct sigaction interrupt_ = {};
  struct sigaction terminate_ = {};
};

template <typename Number>
absl::Status ParseNumber(const std::string& flag, const std::string& value, Number low, Number& out) {
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < low) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--%s is '%s', not a whole number from %d on", flag, value, low));
  }
  out = number;
  return absl::OkStatus();
}

absl::Status SetFlag(const std::string& flag, const std::string& value, ReplayOptions& o) {
  if (flag == "trace") return o.trace = value, absl::OkStatus();
  if (flag == "device") return o.device = value, absl::OkStatus();
  if (flag == "requests") return ParseNumber<std::int64_t>(flag, value, 1, o.requests);
  if (flag == "concurrency") return ParseNumber<std::int32_t>(flag, value, 1, o.concurrency);
  if (flag == "layers") return ParseNumber<std::int32_t>(flag, value, 1, o.layers);
  if (flag == "k") return ParseNumber<std::int32_t>(flag, value, 0, o.k);
  if (flag == "block-size") return ParseNumber<std::int32_t>(flag, value, 8, o.block_size);
  if (flag == "blocks") return ParseNumber<std::int64_t>(flag, value, 2, o.blocks);
  if (flag == "chunk-tokens") return ParseNumber<std::int32_t>(flag, value, 1, o.chunk_tokens);
  if (flag == "sample") return ParseNumber<std::int64_t>(flag, value, 0, o.sample);
  if (flag == "seed") return ParseNumber<std::uint64_t>(flag, value, 0, o.seed);
  if (flag == "cache-bytes") {
    const auto bytes = ParseBytes(value);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(absl::StrFormat("--cache-bytes: %s", bytes.status().message()));
    }
    o.cache_bytes = *bytes;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat("replay has no flag --%s", flag));
}

CacheGeometry GeometryOf(const ReplayOptions& options) {
  CacheGeometry g{.layers = options.layers, .block_size = options.block_size};
  g.block_stride = g.dense_block_stride();
  g.blocks = options.blocks > 0 ? options.blocks
                                : std::min(options.cache_bytes / std::max<std::int64_t>(g.block_stride, 1),
                                           kMaxIndex / options.block_size);
  g.ring_blocks = std::int64_t{options.concurrency} + 1;
  g.capacity = std::max(kMinVerifyCapacity, kRegionTokens - 1 + options.k);
  g.rows_per_layer = g.capacity;
  g.k = options.k;
  return g;
}

std::string UniqueName() {
  std::random_device random;
  return absl::StrFormat("replay-%08x%08x", random(), random());
}

int Fail(std::FILE* err, const absl::Status& status) {
  const std::string text = absl::StrFormat("replay: %s\n", status.message());
  std::fputs(text.c_str(), err);
  return 1;
}

void PrintReport(const ReplayReport& report, const EngineOptions& engine, bool json, std::FILE* out,
                 std::FILE* err) {
  const std::string text = json ? FormatJson(report, engine) : FormatTable(report, engine);
  std::fputs(text.c_str(), out);
  std::fflush(out);
  for (const Mismatch& m : report.mismatches) {
    const std::string line = absl::StrFormat("MISMATCH: %s\n", m.what);
    std::fputs(line.c_str(), err);
  }
}

}  // namespace

const char kReplayUsage[] =
    R"(  --trace=FILE         requests, one JSON object a line (required)
  --requests=N         only the trace's first N requests
  --concurrency=N      running requests at most (64)
  --layers=N           layers (1)
  --k=N                drafts of a verify step; 0: decode steps (0)
  --block-size=N       tokens a block: 8, 16, ... 512 (64)
  --cache-bytes=SIZE   summary pages of the cache, e.g. 8GiB (2GiB)
  --blocks=N           blocks of the cache, instead of --cache-bytes
  --chunk-tokens=N     prefill tokens of a step at most (8192)
  --sample=N           requests whose bytes are checked (one in 50, at least 8)
  --seed=N             of rows, acceptance and sample (1)
  --device=NAME        device of the cache (the daemon's default)
  --json               print one JSON object instead of a table
)";

absl::StatusOr<ReplayOptions> ParseReplayFlags(const std::vector<std::string>& args) {
  ReplayOptions options;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--json") {
      options.json = true;
      continue;
    }
    if (!arg.starts_with("--")) {
      return absl::InvalidArgumentError(absl::StrFormat("replay takes no argument '%s'", arg));
    }
    const std::size_t equals = arg.find('=');
    const bool joined = equals != std::string::npos;
    if (!joined && i + 1 == args.size()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s has no value", arg));
    }
    const std::string flag = arg.substr(2, joined ? equals - 2 : std::string::npos);
    const std::string value = joined ? arg.substr(equals + 1) : args[++i];
    if (auto status = SetFlag(flag, value, options); !status.ok()) return status;
  }
  if (options.trace.empty()) return absl::InvalidArgumentError("replay needs --trace=FILE");
  return options;
}

int RunReplay(const ReplayOptions& options, Client& client, std::FILE* out, std::FILE* err) {
  const auto requests = ReadTrace(options.trace, options.requests);
  if (!requests.ok()) return Fail(err, requests.status());
  const StopOnSignal stop_on_signal;
  const auto cache = client.CreateCache(UniqueName(), options.device, GeometryOf(options));
  if (!cache.ok()) return Fail(err, cache.status());

  const std::int64_t count = std::ssize(*requests);
  const EngineOptions engine{
      .geometry = cache->geometry,
      .concurrency = options.concurrency,
      .chunk_tokens = options.chunk_tokens,
      .sampled_requests = std::min(
          count, options.sample >= 0 ? options.sample : std::max<std::int64_t>(8, (count + 49) / 50)),
      .seed = options.seed};
  ClientTarget target(client, *cache);
  absl::StatusOr<ReplayReport> report;
  {
    ProgressBar bar(err);
    report = ReplayTrace(
        *requests, engine, target,
        [&bar](std::int64_t done, std::int64_t total, const SchedulerCounts& counts) {
          bar.Update(done, total, counts.finished);
        },
        g_stop);
  }
  const absl::Status deleted = client.DeleteCache(*cache);

  int exit_status = 0;
  if (!report.ok()) {
    exit_status = Fail(err, report.status());
  } else {
    PrintReport(*report, engine, options.json, out, err);
    if (report->interrupted) {
      const std::string text =
          absl::StrFormat("replay: interrupted after %d of %d requests%s\n", report->counts.finished, count,
                          deleted.ok() ? "; its cache is deleted" : "");
      std::fputs(text.c_str(), err);
      exit_status = 130;
    }
    if (report->mismatch_count > 0) exit_status = 1;
  }
  if (!deleted.ok()) {
    const std::string text =
        absl::StrFormat("replay: cache %s is not deleted: %s\n", cache->name, deleted.message());
    std::fputs(text.c_str(), err);
    exit_status = 1;
  }
  return exit_status;
}

}  // namespace kvsummary
