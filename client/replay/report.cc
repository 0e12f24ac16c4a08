#include "client/replay/report.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

constexpr auto kDrawInterval = std::chrono::milliseconds(200);

// "1,234,567"
std::string Grouped(std::int64_t value) {
  std::string text = absl::StrFormat("%d", value);
  for (auto i = static_cast<std::ptrdiff_t>(text.size()) - 3; i > 0; i -= 3) {
    text.insert(text.begin() + i, ',');
  }
  return text;
}

std::string Line(const char* name, const std::string& value) {
  return absl::StrFormat("  %-28s%20s\n", name, value);
}

std::string Line(const char* name, std::int64_t value) { return Line(name, Grouped(value)); }

std::string Line(const char* name, const LatencySummary& latency) {
  if (latency.calls == 0) return "";
  return absl::StrFormat("  %-28s%20s  (%s calls)\n", name,
                         absl::StrFormat("%s / %s", Grouped(static_cast<std::int64_t>(latency.p50_us)),
                                         Grouped(static_cast<std::int64_t>(latency.p99_us))),
                         Grouped(latency.calls));
}

std::int64_t PerSecond(std::int64_t count, double seconds) {
  return seconds > 0 ? static_cast<std::int64_t>(static_cast<double>(count) / seconds) : 0;
}

}  // namespace

ProgressBar::ProgressBar(std::FILE* file)
    : file_(isatty(fileno(file)) != 0 ? file : nullptr),
      start_(std::chrono::steady_clock::now()),
      next_draw_(start_) {}

ProgressBar::~ProgressBar() {
  if (file_ != nullptr) std::fputs("\r\033[K", file_);
}

void ProgressBar::Update(std::int64_t done, std::int64_t total, std::int64_t finished_requests) {
  const auto now = std::chrono::steady_clock::now();
  if (file_ == nullptr || now < next_draw_) return;
  next_draw_ = now + kDrawInterval;
  constexpr int kWidth = 40;
  const double part = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1;
  const auto filled = static_cast<std::size_t>(std::clamp(part, 0.0, 1.0) * kWidth);
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  const std::string text = absl::StrFormat(
      "\r[%s] %3.0f %%  %s requests  %s tokens/s\033[K", bar, part * 100, Grouped(finished_requests),
      Grouped(PerSecond(done, std::chrono::duration<double>(now - start_).count())));
  std::fputs(text.c_str(), file_);
  std::fflush(file_);
}

std::string FormatTable(const ReplayReport& report, const EngineOptions& options) {
  const SchedulerCounts& c = report.counts;
  const CacheGeometry& g = options.geometry;
  std::string table = "replay\n";
  table += Line("layers", g.layers);
  table += Line("block size, tokens", g.block_size);
  table += Line("blocks", g.blocks);
  table += Line("drafts a step (k)", g.k);
  table += Line("requests", c.finished);
  table += Line("prompt tokens", c.prompt_tokens);
  table += Line("  of them prefix hits", c.prefix_hit_tokens);
  table += Line("output tokens", c.output_tokens);
  table += Line("computed tokens", c.computed_rows);
  table += Line("  of them rejected drafts", c.rejected_drafts);
  table += Line("  of them recomputed", c.recomputed_rows);
  table += Line("preemptions", c.preemptions);
  table += Line("regions closed, a layer", report.regions_closed);
  table += Line("steps", report.steps);
  table += Line("wall time, s", absl::StrFormat("%.1f", report.wall_seconds));
  table += Line("computed tokens/s", PerSecond(c.computed_rows, report.wall_seconds));
  table += Line("prefill RPC p50/p99, us", report.prefill);
  table += Line(g.k > 0 ? "verify RPC p50/p99, us" : "decode RPC p50/p99, us", report.decode);
  table += Line("requests checked", report.sampled_requests);
  table += Line("  regions compared", report.checked_regions);
  table += Line("  ring rows compared", report.checked_ring_rows);
  table += Line("  mismatches", report.mismatch_count);
  return table;
}

std::string FormatJson(const ReplayReport& report, const EngineOptions& options) {
  const SchedulerCounts& c = report.counts;
  const CacheGeometry& g = options.geometry;
  const auto latency = [](const LatencySummary& l) {
    return nlohmann::ordered_json{{"calls", l.calls}, {"p50_us", l.p50_us}, {"p99_us", l.p99_us}};
  };
  auto mismatches = nlohmann::ordered_json::array();
  for (const Mismatch& m : report.mismatches) {
    nlohmann::ordered_json entry{{"request", m.request}, {"layer", m.layer}, {"region", m.region}};
    if (m.ring_position >= 0) entry["ring_position"] = m.ring_position;
    entry["what"] = m.what;
    mismatches.push_back(std::move(entry));
  }
  const nlohmann::ordered_json json{
      {"layers", g.layers},
      {"block_size", g.block_size},
      {"blocks", g.blocks},
      {"k", g.k},
      {"requests", c.finished},
      {"prompt_tokens", c.prompt_tokens},
      {"prefix_hit_tokens", c.prefix_hit_tokens},
      {"output_tokens", c.output_tokens},
      {"computed_tokens", c.computed_rows},
      {"rejected_drafts", c.rejected_drafts},
      {"recomputed_tokens", c.recomputed_rows},
      {"preemptions", c.preemptions},
      {"regions_closed", report.regions_closed},
      {"steps", report.steps},
      {"wall_seconds", report.wall_seconds},
      {"computed_tokens_per_second", PerSecond(c.computed_rows, report.wall_seconds)},
      {"prefill_rpc", latency(report.prefill)},
      {g.k > 0 ? "verify_rpc" : "decode_rpc", latency(report.decode)},
      {"requests_checked", report.sampled_requests},
      {"regions_compared", report.checked_regions},
      {"ring_rows_compared", report.checked_ring_rows},
      {"mismatches", report.mismatch_count},
      {"first_mismatches", std::move(mismatches)},
      {"interrupted", report.interrupted},
  };
  return json.dump() + "\n";
}

}  // namespace kvsummary
