#include "client/replay/disaggregate_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/table.h"

namespace kvsummary {
namespace {

using Json = nlohmann::ordered_json;

Json Latency(const std::vector<double>& us) {
  return {{"calls", us.size()}, {"p50_us", Percentile(us, 0.5)}, {"p99_us", Percentile(us, 0.99)}};
}

Json Geometry(const CacheGeometry& g) {
  return {{"block_size", g.block_size},
          {"block_stride", g.block_stride},
          {"capacity", g.capacity},
          {"rows_per_layer", g.rows_per_layer}};
}

}  // namespace

void DisaggregateReport::Add(const DisaggregateReport& other) {
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  requests += other.requests;
  prompt_tokens += other.prompt_tokens;
  output_tokens += other.output_tokens;
  rejected_drafts += other.rejected_drafts;
  handoffs += other.handoffs;
  bytes += other.bytes;
  for (std::size_t i = 0; i < transports.size(); ++i) transports[i] += other.transports[i];
  reconnects += other.reconnects;
  damaged_chunks += other.damaged_chunks;
  device_nanoseconds += other.device_nanoseconds;
  append(offer_us, other.offer_us);
  append(append_us, other.append_us);
  append(accept_us, other.accept_us);
  append(handoff_us, other.handoff_us);
  checked_regions += other.checked_regions;
  checked_ring_rows += other.checked_ring_rows;
  mismatch_count += other.mismatch_count;
  append(mismatches, other.mismatches);
  mismatches.resize(std::min(mismatches.size(), kMaxMismatches));
  interrupted = interrupted || other.interrupted;
}

std::string FormatTable(const DisaggregateReport& report, const DisaggregateOptions& options) {
  std::string table = "replay on two daemons\n";
  table += TableLine("layers", options.prefill.layers);
  table += TableLine("block sizes, tokens",
                     absl::StrFormat("%d, %d", options.prefill.block_size, options.decode.block_size));
  table += TableLine("drafts a step (k)", options.decode.k);
  table += TableLine("requests", report.requests);
  table += TableLine("prompt tokens", report.prompt_tokens);
  table += TableLine("output tokens", report.output_tokens);
  table += TableLine("rejected drafts", report.rejected_drafts);
  table += TableLine("wall time, s", absl::StrFormat("%.1f", report.wall_seconds));
  table += TableLine("hand-offs", report.handoffs);
  for (std::size_t i = 0; i < report.transports.size(); ++i) {
    if (report.transports[i] == 0) continue;
    table +=
        TableLine(absl::StrFormat("  %s", NameOf(static_cast<HandoffTransport>(i))), report.transports[i]);
  }
  table += TableLine("  bytes", report.bytes);
  table += TableLine("  reconnects", report.reconnects);
  table += TableLine("  damaged chunks", report.damaged_chunks);
  table += LatencyLine("Offer p50/p99, us", report.offer_us);
  table += LatencyLine("Append p50/p99, us", report.append_us);
  table += LatencyLine("Accept p50/p99, us", report.accept_us);
  table += LatencyLine(options.layer_wise ? "last Append to Accept, us" : "Offer and Accept p50/p99, us",
                       report.handoff_us);
  table += TableLine("regions compared", report.checked_regions);
  table += TableLine("ring rows compared", report.checked_ring_rows);
  table += TableLine("mismatches", report.mismatch_count);
  return table;
}

std::string FormatJson(const DisaggregateReport& report, const DisaggregateOptions& options) {
  Json transports = Json::object();
  for (std::size_t i = 0; i < report.transports.size(); ++i) {
    if (report.transports[i] == 0) continue;
    transports[NameOf(static_cast<HandoffTransport>(i))] = report.transports[i];
  }
  Json mismatches = Json::array();
  for (const Mismatch& m : report.mismatches) mismatches.push_back(m.what);
  const Json json{{"layers", options.prefill.layers},
                  {"prefill_cache", Geometry(options.prefill)},
                  {"decode_cache", Geometry(options.decode)},
                  {"k", options.decode.k},
                  {"layer_wise", options.layer_wise},
                  {"requests", report.requests},
                  {"prompt_tokens", report.prompt_tokens},
                  {"output_tokens", report.output_tokens},
                  {"rejected_drafts", report.rejected_drafts},
                  {"wall_seconds", report.wall_seconds},
                  {"handoffs", report.handoffs},
                  {"transports", transports},
                  {"bytes", report.bytes},
                  {"reconnects", report.reconnects},
                  {"damaged_chunks", report.damaged_chunks},
                  {"device_nanoseconds", report.device_nanoseconds},
                  {"offer", Latency(report.offer_us)},
                  {"append", Latency(report.append_us)},
                  {"accept", Latency(report.accept_us)},
                  {"handoff", Latency(report.handoff_us)},
                  {"regions_compared", report.checked_regions},
                  {"ring_rows_compared", report.checked_ring_rows},
                  {"mismatches", report.mismatch_count},
                  {"first_mismatches", mismatches},
                  {"interrupted", report.interrupted}};
  return json.dump() + "\n";
}

}  // namespace kvsummary
