#include "client/commands.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "client/status.h"
#include "client/units.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kDumpBytes = 64 << 20;  // held at a time

void PrintCaches(const std::vector<Cache>& caches) {
  int width = 4;
  for (const Cache& cache : caches) width = std::max(width, static_cast<int>(cache.name.size()));
  absl::PrintF("%-*s %16s %-8s %7s %10s %10s %12s %11s %8s %14s %3s %12s\n", width, "NAME", "GENERATION",
               "DEVICE", "LAYERS", "BLOCKS", "BLOCK_SIZE", "BLOCK_STRIDE", "RING_BLOCKS", "CAPACITY",
               "ROWS_PER_BLOCK", "K", "MEMORY");
  for (const Cache& cache : caches) {
    const CacheGeometry& g = cache.geometry;
    absl::PrintF("%-*s %16d %-8s %7d %10d %10d %12d %11d %8d %14d %3d %12s\n", width, cache.name,
                 cache.generation, cache.device, g.layers, g.blocks, g.block_size, g.block_stride,
                 g.ring_blocks, g.capacity, g.rows_per_block(), g.k, FormatBytes(g.total_bytes()));
  }
}

std::string JoinedOrDash(const std::vector<std::string>& names) {
  return names.empty() ? "-" : absl::StrJoin(names, ",");
}

void PrintSessions(const std::vector<SessionSummary>& sessions) {
  int width = 4;
  for (const SessionSummary& s : sessions) width = std::max(width, static_cast<int>(s.name.size()));
  absl::PrintF("%7s %-*s %10s %8s %8s %12s %6s  %s\n", "SESSION", width, "NAME", "AGE", "TICKETS", "BUFFERS",
               "BYTES", "WAITS", "CACHES (MAPPED)");
  for (const SessionSummary& s : sessions) {
    absl::PrintF("%7d %-*s %8.1f s %8d %8d %12s %6d  %s (%s)\n", s.number, width, s.name, s.age_seconds,
                 s.tickets, s.buffers, FormatBytes(s.buffer_bytes), s.waits, JoinedOrDash(s.caches),
                 JoinedOrDash(s.mapped_caches));
  }
}

void PrintRaw(const void* bytes, std::int64_t size) {
  std::fwrite(bytes, 1, static_cast<std::size_t>(size), stdout);
}

void PrintHex(const void* bytes, std::int64_t size) {
  const absl::string_view view(static_cast<const char*>(bytes), static_cast<std::size_t>(size));
  absl::PrintF("%s\n", absl::BytesToHexString(view));
}

// Reads some blocks, and prints them.
using DumpPart = std::function<absl::Status(std::span<const std::int64_t>)>;

absl::Status DumpInParts(std::vector<std::int64_t> blocks, std::int64_t block_bytes, const DumpPart& dump) {
  const auto step = static_cast<std::size_t>(
      std::max<std::int64_t>(kDumpBytes / std::max<std::int64_t>(block_bytes, 1), 1));
  for (std::size_t first = 0; first < blocks.size(); first += step) {
    const auto part = std::span(blocks).subspan(first, std::min(step, blocks.size() - first));
    if (auto status = dump(part); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<std::int64_t> ListOrAll(const Invocation& invocation, const char* flag, std::int64_t all) {
  if (invocation.Given(flag)) return invocation.List(flag);
  std::vector<std::int64_t> list(static_cast<std::size_t>(all));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

absl::Status DumpPages(Client& client, const Cache& cache, LayerSpan layers, bool raw,
                       std::vector<std::int64_t> blocks) {
  const std::int64_t page = cache.geometry.page_bytes();
  return DumpInParts(std::move(blocks), layers.count * page, [&](std::span<const std::int64_t> part) {
    const auto pages = client.ReadPages(cache, part, layers);
    if (!pages.ok()) return pages.status();
    const std::uint8_t* at = pages->data();
    if (raw) {
      PrintRaw(at, static_cast<std::int64_t>(pages->size()));
      return absl::OkStatus();
    }
    for (const std::int64_t block : part) {
      for (std::int32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        for (std::int64_t region = 0; region < page / kSummaryBytes; ++region, at += kSummaryBytes) {
          absl::PrintF("block %d layer %d region %d: ", block, layer, region);
          PrintHex(at, kSummaryBytes);
        }
      }
    }
    return absl::OkStatus();
  });
}

absl::Status DumpRing(Client& client, const Cache& cache, LayerSpan layers, bool raw,
                      std::vector<std::int64_t> ring_blocks) {
  const std::int64_t tail = std::int64_t{cache.geometry.capacity} * kRowBytes;
  return DumpInParts(std::move(ring_blocks), layers.count * tail, [&](std::span<const std::int64_t> part) {
    const auto rows = client.ReadRing(cache, part, layers);
    if (!rows.ok()) return rows.status();
    const std::uint16_t* at = rows->data();
    if (raw) {
      PrintRaw(at, static_cast<std::int64_t>(rows->size() * sizeof(std::uint16_t)));
      return absl::OkStatus();
    }
    for (const std::int64_t block : part) {
      for (std::int32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        for (std::int32_t row = 0; row < cache.geometry.capacity; ++row, at += kRowElements) {
          absl::PrintF("ring block %d layer %d row %d: ", block, layer, row);
          PrintHex(at, kRowBytes);
        }
      }
    }
    return absl::OkStatus();
  });
}

}  // namespace

int Fail(const absl::Status& status) {
  absl::FPrintF(stderr, "summaryctl: %s\n", Describe(status));
  return kFailure;
}

int FlushOutput(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  return Fail(absl::DataLossError(absl::StrCat("cannot write to stdout: ", std::strerror(errno))));
}

int RunPing(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto begin = std::chrono::steady_clock::now();
  const auto info = (*client)->GetServerInfo();
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
  if (!info.ok()) return Fail(info.status());
  // GetServerInfo is two calls, one after the other.
  absl::PrintF("summaryd %s at %s: round trip %.2f ms, messages up to %s\n", info->version,
               invocation.Address(), elapsed.count() / 2, FormatBytes(info->max_message_bytes));
  for (const DeviceInfo& device : info->devices) {
    absl::PrintF("%c %-8s %s used of %s, %s", device.name == info->default_device ? '*' : ' ', device.name,
                 FormatBytes(device.used_bytes), FormatBytes(device.budget_bytes), device.description);
    if (!device.uuid.empty()) absl::PrintF(", %s", device.uuid);
    if (device.overhead_bytes > 0) absl::PrintF(", overhead %s", FormatBytes(device.overhead_bytes));
    if (!device.unusable_reason.empty()) absl::PrintF(", unusable: %s", device.unusable_reason);
    absl::PrintF("\n");
  }
  return FlushOutput(0);
}

int RunCaches(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto caches = (*client)->ListCaches();
  if (!caches.ok()) return Fail(caches.status());
  PrintCaches(*caches);
  return FlushOutput(0);
}

int RunSessions(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto sessions = (*client)->ListSessions();
  if (!sessions.ok()) return Fail(sessions.status());
  PrintSessions(*sessions);
  return FlushOutput(0);
}

int RunCreateCache(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto cache = (*client)->CreateCache(invocation.Text("name"), invocation.Text("device"),
                                            {.layers = invocation.Int32("layers"),
                                             .blocks = invocation.Int64("blocks"),
                                             .block_size = invocation.Int32("block-size"),
                                             .block_stride = invocation.Bytes("block-stride"),
                                             .ring_blocks = invocation.Int64("ring-blocks"),
                                             .capacity = invocation.Int32("capacity"),
                                             .rows_per_layer = invocation.Int32("rows-per-layer"),
                                             .k = invocation.Int32("k")});
  if (!cache.ok()) return Fail(cache.status());
  PrintCaches({*cache});
  return FlushOutput(0);
}

int RunDeleteCache(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto cache = (*client)->GetCache(invocation.Text("name"));
  if (!cache.ok()) return Fail(cache.status());
  const auto status = (*client)->DeleteCache(*cache);
  if (!status.ok()) return Fail(status);
  absl::PrintF("deleted %s\n", cache->name);
  return FlushOutput(0);
}

int RunDump(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto cache = (*client)->GetCache(invocation.Text("name"));
  if (!cache.ok()) return Fail(cache.status());
  const CacheGeometry& g = cache->geometry;
  const LayerSpan layers = invocation.Given("layers") ? invocation.Layers("layers") : LayerSpan{0, g.layers};
  const bool raw = invocation.Text("format") == "raw";
  const bool everything = !invocation.Given("blocks") && !invocation.Given("ring-blocks");
  if (everything || invocation.Given("blocks")) {
    const auto status = DumpPages(**client, *cache, layers, raw, ListOrAll(invocation, "blocks", g.blocks));
    if (!status.ok()) return Fail(status);
  }
  if (everything || invocation.Given("ring-blocks")) {
    const auto status =
        DumpRing(**client, *cache, layers, raw, ListOrAll(invocation, "ring-blocks", g.ring_blocks));
    if (!status.ok()) return Fail(status);
  }
  return FlushOutput(0);
}

}  // namespace kvsummary
