#include "client/replay/report.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/table.h"

namespace kvsummary {
namespace {

constexpr auto kDrawInterval = std::chrono::milliseconds(200);

double Share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::string Percent(std::int64_t part, std::int64_t whole) {
  return absl::StrFormat("%.2f %%", Share(part, whole) * 100);
}

std::string PrefixTable(const ReplayReport& report) {
  const PrefixReport& p = *report.prefix;
  const SchedulerCounts& c = report.counts;
  std::string table = "page store\n";
  table += TableLine("engines, with restarts", p.engines);
  table += TableLine("hit rate, by prompt tokens", Percent(c.found_tokens, c.prompt_tokens));
  table += TableLine("  of an infinite store", Percent(c.ever_found_tokens, c.prompt_tokens));
  table += TableLine("tokens not recomputed", c.prefix_hit_tokens);
  table += TableLine("pages loaded", p.loaded_pages);
  table += TableLine("  bytes", p.loaded_bytes);
  table += TableLine("  found, but bad", p.bad_pages);
  table += TableLine("pages stored", p.stored_pages);
  table += TableLine("  present before", p.present_pages);
  table += TableLine("  dropped for want of room", p.dropped_pages);
  for (const PrefixReport::Tier& tier : p.tiers) {
    table += TableLine(tier.name + " evicted", tier.evicted_pages);
    table += TableLine("  copied down", tier.demoted_pages);
    table += TableLine("  brought up", tier.promoted_pages);
  }
  return table;
}

void AddPrefix(const ReplayReport& report, nlohmann::ordered_json& json) {
  const PrefixReport& p = *report.prefix;
  const SchedulerCounts& c = report.counts;
  json["hit_rate"] = Share(c.found_tokens, c.prompt_tokens);
  json["infinite_hit_rate"] = Share(c.ever_found_tokens, c.prompt_tokens);
  json["found_tokens"] = c.found_tokens;
  json["loaded_pages"] = p.loaded_pages;
  json["loaded_bytes"] = p.loaded_bytes;
  json["bad_pages"] = p.bad_pages;
  json["stored_pages"] = p.stored_pages;
  json["present_pages"] = p.present_pages;
  json["dropped_pages"] = p.dropped_pages;
  json["engines"] = p.engines;
  auto& tiers = json["tiers"] = nlohmann::ordered_json::array();
  for (const PrefixReport::Tier& tier : p.tiers) {
    tiers.push_back({{"name", tier.name},
                     {"evicted_pages", tier.evicted_pages},
                     {"demoted_pages", tier.demoted_pages},
                     {"promoted_pages", tier.promoted_pages}});
  }
  json["loaded_regions_compared"] = report.checked_loaded_regions;
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
  table += TableLine("layers", g.layers);
  table += TableLine("block size, tokens", g.block_size);
  table += TableLine("blocks", g.blocks);
  table += TableLine("drafts a step (k)", g.k);
  table += TableLine("requests", c.finished);
  table += TableLine("prompt tokens", c.prompt_tokens);
  table += TableLine("  of them prefix hits", c.prefix_hit_tokens);
  table += TableLine("output tokens", c.output_tokens);
  table += TableLine("computed tokens", c.computed_rows);
  table += TableLine("  of them rejected drafts", c.rejected_drafts);
  table += TableLine("  of them recomputed", c.recomputed_rows);
  table += TableLine("preemptions", c.preemptions);
  table += TableLine("regions closed, a layer", report.regions_closed);
  table += TableLine("steps", report.steps);
  table += TableLine("wall time, s", absl::StrFormat("%.1f", report.wall_seconds));
  table += TableLine("computed tokens/s", PerSecond(c.computed_rows, report.wall_seconds));
  table += LatencyLine("prefill RPC p50/p99, us", report.prefill_us);
  table += LatencyLine(g.k > 0 ? "verify RPC p50/p99, us" : "decode RPC p50/p99, us", report.decode_us);
  table += TableLine("requests checked", report.sampled_requests);
  table += TableLine("  regions compared", report.checked_regions);
  if (report.prefix) table += TableLine("    of them loaded", report.checked_loaded_regions);
  table += TableLine("  ring rows compared", report.checked_ring_rows);
  table += TableLine("  mismatches", report.mismatch_count);
  if (report.prefix) table += PrefixTable(report);
  return table;
}

std::string FormatJson(const ReplayReport& report, const EngineOptions& options) {
  const SchedulerCounts& c = report.counts;
  const CacheGeometry& g = options.geometry;
  const auto latency = [](const std::vector<double>& us) {
    return nlohmann::ordered_json{
        {"calls", us.size()}, {"p50_us", Percentile(us, 0.5)}, {"p99_us", Percentile(us, 0.99)}};
  };
  auto mismatches = nlohmann::ordered_json::array();
  for (const Mismatch& m : report.mismatches) {
    nlohmann::ordered_json entry{{"request", m.request}, {"layer", m.layer}, {"region", m.region}};
    if (m.ring_position >= 0) entry["ring_position"] = m.ring_position;
    entry["what"] = m.what;
    mismatches.push_back(std::move(entry));
  }
  nlohmann::ordered_json json{
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
      {"prefill_rpc", latency(report.prefill_us)},
      {g.k > 0 ? "verify_rpc" : "decode_rpc", latency(report.decode_us)},
      {"requests_checked", report.sampled_requests},
      {"regions_compared", report.checked_regions},
      {"ring_rows_compared", report.checked_ring_rows},
      {"mismatches", report.mismatch_count},
      {"first_mismatches", std::move(mismatches)},
      {"interrupted", report.interrupted},
  };
  if (report.prefix) AddPrefix(report, json);
  return json.dump() + "\n";
}

}  // namespace kvsummary
