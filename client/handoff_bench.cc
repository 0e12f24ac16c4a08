#include "client/handoff_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "client/commands.h"
#include "client/plane.h"
#include "client/raw_transfer.h"
#include "client/session.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int32_t kBlockSize = 64;
constexpr std::int32_t kCapacity = kRegionTokens - 1 + 2;  // every position that an offer may resume at

double Seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
double Microseconds(Clock::time_point start) { return Seconds(start) * 1e6; }

// One daemon's cache, deleted with it.
class Side {
 public:
  static absl::StatusOr<std::unique_ptr<Side>> Open(const std::string& address, const TlsFiles& tls,
                                                    const std::string& device,
                                                    const CacheGeometry& geometry) {
    auto client = Client::Connect(address, {.tls = tls});
    if (!client.ok()) return client.status();
    auto session = (*client)->OpenSession("handoff-bench");
    if (!session.ok()) return session.status();
    auto cache = (*client)->CreateCache(UniqueName("handoff-bench"), device, geometry);
    if (!cache.ok()) return cache.status();
    return std::unique_ptr<Side>(new Side(*std::move(client), *std::move(session), *std::move(cache)));
  }
  ~Side() { client->DeleteCache(cache).IgnoreError(); }  // a daemon that is gone has none
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  const std::unique_ptr<Client> client;
  const std::unique_ptr<ClientSession> session;
  const Cache cache;

 private:
  Side(std::unique_ptr<Client> c, std::unique_ptr<ClientSession> s, Cache made)
      : client(std::move(c)), session(std::move(s)), cache(std::move(made)) {}
};

// A request of the bench: the i-th ones on both sides have the same blocks.
struct Request {
  std::vector<std::int64_t> blocks;
  std::int64_t ring_block = 0;
  std::string handoff;  // of this round
  double offer_us = 0;
  double accept_us = 0;
  AcceptResult accepted;
};

// Calls `work` for every request, all at once; the first error.
absl::Status ForAll(std::vector<Request>& requests, const std::function<absl::Status(Request&)>& work) {
  if (requests.size() == 1) return work(requests[0]);
  std::vector<absl::Status> results(requests.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = work(requests[i]); });
  }
  absl::Status status;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    threads[i].join();
    status.Update(results[i]);
  }
  return status;
}

// Bytes of a block in all layers: of this request and block alone.
std::vector<std::uint8_t> BlockBytes(const CacheGeometry& g, std::int64_t block) {
  std::vector<std::uint64_t> words(static_cast<std::size_t>(g.dense_block_stride()) / sizeof(std::uint64_t));
  std::mt19937_64 random(static_cast<std::uint64_t>(block));
  for (std::uint64_t& word : words) word = random();
  std::vector<std::uint8_t> bytes(words.size() * sizeof(std::uint64_t));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

class Bench {
 public:
  Bench(const HandoffBenchOptions& options, Side& source, Side& target)
      : options_(options), source_(source), target_(target) {
    const std::int64_t blocks = (options.tokens + kBlockSize - 1) / kBlockSize;
    for (std::int32_t i = 0; i < options.concurrency; ++i) {
      Request request{.blocks = std::vector<std::int64_t>(static_cast<std::size_t>(blocks)),
                      .ring_block = 1 + i,
                      .handoff = {},
                      .accepted = {}};
      std::iota(request.blocks.begin(), request.blocks.end(), 1 + i * blocks);
      requests_.push_back(std::move(request));
    }
  }

  absl::StatusOr<HandoffBenchReport> Run() {
    if (auto status = Fill(); !status.ok()) return status;
    if (auto status = Round(); !status.ok()) return status;
    const std::int64_t round_bytes = report_.request_bytes * options_.concurrency;
    const auto raw =
        MakeRawTransfers(options_.from, round_bytes, report_.transport == HandoffTransport::kUcx);
    if (!raw.ok()) return raw.status();
    report_ = HandoffBenchReport();
    report_.missing = raw->missing;
    for (const auto& transfer : raw->transfers) report_.raw.push_back({transfer->name(), {}});
    while (report_.requests < options_.requests) {
      if (auto status = Round(); !status.ok()) return status;
      for (std::size_t i = 0; i < raw->transfers.size(); ++i) {
        const auto seconds = raw->transfers[i]->Move(round_bytes);
        if (!seconds.ok()) return seconds.status();
        report_.raw[i].seconds.push_back(*seconds);
      }
    }
    if (auto status = Compare(); !status.ok()) return status;
    return std::move(report_);
  }

 private:
  absl::Status Fill() {
    const CacheGeometry& g = source_.cache.geometry;
    const std::vector<std::uint16_t> rows(
        static_cast<std::size_t>(g.layers) * static_cast<std::size_t>(g.capacity) * kRowElements, 0x3f80);
    for (const Request& request : requests_) {
      for (const std::int64_t block : request.blocks) {
        auto status = source_.client->WritePages(source_.cache, std::span(&block, 1), {0, g.layers},
                                                 BlockBytes(g, block));
        if (!status.ok()) return status;
      }
      auto status =
          source_.client->WriteRing(source_.cache, std::span(&request.ring_block, 1), {0, g.layers}, rows);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Round() {
    const auto offering = Clock::now();
    auto status = ForAll(requests_, [this](Request& request) { return Offer(request); });
    if (!status.ok()) return status;
    report_.offer_seconds.push_back(Seconds(offering));
    const auto accepting = Clock::now();
    status = ForAll(requests_, [this](Request& request) { return Accept(request); });
    if (!status.ok()) return status;
    report_.accept_seconds.push_back(Seconds(accepting));
    for (const Request& request : requests_) {
      report_.offer_us.push_back(request.offer_us);
      report_.accept_us.push_back(request.accept_us);
      report_.end_to_end_us.push_back(request.offer_us + request.accept_us);
      report_.device_ns.push_back(static_cast<double>(request.accepted.device_time.count()));
      report_.reconnects += request.accepted.reconnects;
      report_.damaged_chunks += request.accepted.damaged_chunks;
    }
    report_.request_bytes = requests_[0].accepted.bytes;
    report_.transport = requests_[0].accepted.transport;
    report_.requests += std::ssize(requests_);
    return absl::OkStatus();
  }

  absl::Status Offer(Request& request) {
    const auto start = Clock::now();
    auto offer = source_.session->Offer(
        source_.cache,
        {.committed_tokens = options_.tokens, .blocks = request.blocks, .ring_block = request.ring_block});
    if (!offer.ok()) return offer.status();
    request.offer_us = Microseconds(start);
    request.handoff = std::move(offer->handoff);
    return absl::OkStatus();
  }

  absl::Status Accept(Request& request) {
    const auto start = Clock::now();
    auto accepted = target_.session->Accept(
        target_.cache, request.handoff,
        {.resume_position = options_.tokens, .blocks = request.blocks, .ring_block = request.ring_block});
    if (!accepted.ok()) return accepted.status();
    request.accept_us = Microseconds(start);
    request.accepted = *accepted;
    return absl::OkStatus();
  }

  // Counts the blocks that differ, of those that are full.
  absl::Status Compare() {
    const CacheGeometry& g = target_.cache.geometry;
    for (const Request& request : requests_) {
      for (std::int64_t i = 0; i < options_.tokens / kBlockSize; ++i) {
        const std::int64_t block = request.blocks[static_cast<std::size_t>(i)];
        const auto pages = target_.client->ReadPages(target_.cache, std::span(&block, 1), {0, g.layers});
        if (!pages.ok()) return pages.status();
        report_.wrong_blocks += *pages != BlockBytes(g, block);
      }
    }
    return absl::OkStatus();
  }

  const HandoffBenchOptions& options_;
  Side& source_;
  Side& target_;
  std::vector<Request> requests_;
  HandoffBenchReport report_;
};

}  // namespace

absl::StatusOr<HandoffBenchReport> BenchHandoffs(const HandoffBenchOptions& options) {
  CacheGeometry g{};
  g.layers = options.layers;
  g.block_size = kBlockSize;
  g.blocks = 1 + options.concurrency * ((options.tokens + kBlockSize - 1) / kBlockSize);
  g.ring_blocks = 1 + options.concurrency;
  g.capacity = kCapacity;
  const auto source = Side::Open(options.from, options.tls, options.from_device, g);
  if (!source.ok()) return source.status();
  const auto target = Side::Open(options.to, options.tls, options.to_device, g);
  if (!target.ok()) return target.status();
  return Bench(options, **source, **target).Run();
}

std::vector<Flag> HandoffBenchFlags() {
  return {{"from", "ADDRESS", nullptr, "the daemon that offers"},
          {"to", "ADDRESS", nullptr,
           "the daemon that accepts, which allows the other as a peer; may be the same"},
          {"tokens", "N", "8192", "tokens of a request", CheckInt64},
          {"requests", "N", "20", "requests, in whole rounds of --concurrency", CheckInt64},
          {"layers", "N", "23", "layers of the caches", CheckInt32},
          {"concurrency", "N", "1", "requests that are offered, then accepted, at a time", CheckInt32},
          {"from-device", "DEVICE", "", "host or cuda:N; else the daemon's default"},
          {"to-device", "DEVICE", "", "host or cuda:N; else the daemon's default"},
          {"json", nullptr, "", "print one JSON object instead of a table"}};
}

int RunHandoffBench(const Invocation& invocation) {
  const HandoffBenchOptions options{.from = invocation.Text("from"),
                                    .to = invocation.Text("to"),
                                    .tls = invocation.Tls(),
                                    .from_device = invocation.Text("from-device"),
                                    .to_device = invocation.Text("to-device"),
                                    .tokens = invocation.Int64("tokens"),
                                    .requests = invocation.Int64("requests"),
                                    .layers = invocation.Int32("layers"),
                                    .concurrency = invocation.Int32("concurrency")};
  for (const char* flag : {"tokens", "requests", "layers", "concurrency"}) {
    if (invocation.Int64(flag) >= 1) continue;
    return Fail(absl::InvalidArgumentError(
        absl::StrFormat("--%s=%s: must be at least 1", flag, invocation.Text(flag))));
  }
  const auto report = BenchHandoffs(options);
  if (!report.ok()) return Fail(report.status());
  absl::PrintF("%s", invocation.On("json") ? FormatJson(*report, options) : FormatTable(*report, options));
  if (report->wrong_blocks > 0) absl::FPrintF(stderr, "MISMATCH: %d blocks differ\n", report->wrong_blocks);
  return FlushOutput(report->wrong_blocks > 0 ? kFailure : 0);
}

}  // namespace kvsummary
