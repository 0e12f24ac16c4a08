// What handoff-bench prints.
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/handoff_bench.h"
#include "client/table.h"

namespace kvsummary {
namespace {

using Json = nlohmann::ordered_json;

// Median over rounds, in 10^9 bytes a second.
double Rate(std::int64_t bytes, const std::vector<double>& seconds) {
  const double median = Percentile(seconds, 0.5);
  return median > 0 ? static_cast<double>(bytes) / median / 1e9 : 0;
}

struct Rates {
  double offer = 0, accept = 0, end_to_end = 0, device = 0;
  std::vector<double> raw;
};

Rates RatesOf(const HandoffBenchReport& report, const HandoffBenchOptions& options) {
  const std::int64_t round = report.request_bytes * options.concurrency;
  std::vector<double> both;
  for (std::size_t i = 0; i < report.offer_seconds.size(); ++i) {
    both.push_back(report.offer_seconds[i] + report.accept_seconds[i]);
  }
  Rates rates{.offer = Rate(round, report.offer_seconds),
              .accept = Rate(round, report.accept_seconds),
              .end_to_end = Rate(round, both),
              .device = Rate(report.request_bytes, report.device_ns) * 1e9,
              .raw = {}};
  for (const HandoffBenchReport::Raw& raw : report.raw) rates.raw.push_back(Rate(round, raw.seconds));
  return rates;
}

std::string Number(double value) { return absl::StrFormat("%.3f", value); }

double Ratio(double a, double b) { return b > 0 ? a / b : 0; }

Json Latency(const std::vector<double>& us) {
  return {{"calls", us.size()}, {"p50_us", Percentile(us, 0.5)}, {"p99_us", Percentile(us, 0.99)}};
}

}  // namespace

std::string FormatTable(const HandoffBenchReport& report, const HandoffBenchOptions& options) {
  const Rates rates = RatesOf(report, options);
  std::string table = "hand-off bench\n";
  table += TableLine("tokens of a request", options.tokens);
  table += TableLine("layers", options.layers);
  table += TableLine("at a time", options.concurrency);
  table += TableLine("requests", report.requests);
  table += TableLine("bytes of a request", report.request_bytes);
  table += TableLine("transport", NameOf(report.transport));
  table += LatencyLine("Offer p50/p99, us", report.offer_us);
  table += LatencyLine("Accept p50/p99, us", report.accept_us);
  table += LatencyLine("end to end p50/p99, us", report.end_to_end_us);
  table += TableLine("Offer, GB/s", Number(rates.offer));
  table += TableLine("Accept, GB/s", Number(rates.accept));
  table += TableLine("end to end, GB/s", Number(rates.end_to_end));
  table += TableLine("device time p50, us", Number(Percentile(report.device_ns, 0.5) / 1000));
  table += TableLine("  GB/s", Number(rates.device));
  for (std::size_t i = 0; i < report.raw.size(); ++i) {
    table += TableLine(report.raw[i].name + ", GB/s", Number(rates.raw[i]));
    table += TableLine("  Accept / it", Number(Ratio(rates.accept, rates.raw[i])));
  }
  for (const std::string& missing : report.missing) table += "not measured: " + missing + "\n";
  table += TableLine("reconnects", report.reconnects);
  table += TableLine("damaged chunks", report.damaged_chunks);
  table += TableLine("blocks that differ", report.wrong_blocks);
  return table;
}

std::string FormatJson(const HandoffBenchReport& report, const HandoffBenchOptions& options) {
  const Rates rates = RatesOf(report, options);
  Json raw = Json::array();
  for (std::size_t i = 0; i < report.raw.size(); ++i) {
    raw.push_back({{"name", report.raw[i].name},
                   {"gb_per_second", rates.raw[i]},
                   {"accept_ratio", Ratio(rates.accept, rates.raw[i])}});
  }
  const Json json{{"from", options.from},
                  {"to", options.to},
                  {"tokens", options.tokens},
                  {"layers", options.layers},
                  {"concurrency", options.concurrency},
                  {"requests", report.requests},
                  {"request_bytes", report.request_bytes},
                  {"transport", NameOf(report.transport)},
                  {"offer", Latency(report.offer_us)},
                  {"accept", Latency(report.accept_us)},
                  {"end_to_end", Latency(report.end_to_end_us)},
                  {"offer_gb_per_second", rates.offer},
                  {"accept_gb_per_second", rates.accept},
                  {"end_to_end_gb_per_second", rates.end_to_end},
                  {"device_us_p50", Percentile(report.device_ns, 0.5) / 1000},
                  {"device_gb_per_second", rates.device},
                  {"raw", raw},
                  {"not_measured", report.missing},
                  {"reconnects", report.reconnects},
                  {"damaged_chunks", report.damaged_chunks},
                  {"wrong_blocks", report.wrong_blocks}};
  return json.dump() + "\n";
}

}  // namespace kvsummary
