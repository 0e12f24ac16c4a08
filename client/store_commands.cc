// The commands that ask about the page store.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "client/commands.h"
#include "client/units.h"

namespace kvsummary {

int RunStats(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto stats = (*client)->GetStatsJson();
  if (!stats.ok()) return Fail(stats.status());
  if (invocation.On("json")) {
    absl::PrintF("%s\n", *stats);
    return FlushOutput(0);
  }
  // "/store/tiers/0/pages" as store.tiers.0.pages
  const nlohmann::ordered_json flat = nlohmann::ordered_json::parse(*stats).flatten();
  for (const auto& [path, value] : flat.items()) {
    std::string name = path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    absl::PrintF("%-32s %s\n", name, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return FlushOutput(0);
}

int RunCheck(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto report = (*client)->Check();
  if (!report.ok()) return Fail(report.status());
  for (const StoreTier& t : report->store.tiers) {
    absl::PrintF("%-8s %d pages, pinned %d + unpinned %d + free %d = %d bytes\n", t.name, t.pages,
                 t.pinned_bytes, t.unpinned_bytes, t.free_bytes, t.capacity_bytes);
  }
  absl::PrintF("%d pages, %d namespaces, %d leases: %s\n", report->store.pages, report->store.namespaces,
               report->store.leases, report->faults.empty() ? "clean" : "NOT CLEAN");
  for (const std::string& fault : report->faults) absl::FPrintF(stderr, "FAULT: %s\n", fault);
  return FlushOutput(report->faults.empty() ? 0 : kFailure);
}

int RunNamespaces(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto namespaces = (*client)->ListNamespaces();
  if (!namespaces.ok()) return Fail(namespaces.status());
  absl::PrintF("%4s %-24s %7s %10s %7s %6s %12s %12s %12s\n", "ID", "MODEL", "LAYERS", "BLOCK_SIZE", "LAYOUT",
               "SHARD", "PAGES", "USED", "QUOTA");
  for (const NamespaceUsage& n : *namespaces) {
    absl::PrintF("%4d %-24s %7d %10d %7d %6s %12d %12s %12s\n", n.id, n.identity.model, n.identity.layers,
                 n.identity.block_size, n.identity.layout_version,
                 absl::StrCat(n.identity.shard_rank, "/", n.identity.shard_count), n.pages,
                 FormatBytes(n.used_bytes), n.quota_bytes == 0 ? "-" : FormatBytes(n.quota_bytes));
  }
  return FlushOutput(0);
}

}  // namespace kvsummary
