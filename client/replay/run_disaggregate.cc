#include "client/replay/run_disaggregate.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "client/commands.h"
#include "client/own_daemon.h"
#include "client/plane.h"
#include "client/replay/disaggregate_report.h"
#include "client/replay/plane_target.h"
#include "client/replay/replay.h"
#include "client/replay/report.h"
#include "client/replay/stop_on_signal.h"
#include "client/session.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kGapBytes = 512;     // behind each block of the decode side
constexpr std::int32_t kBackOffTokens = 2;  // of offers, by default
constexpr std::int32_t kMoreRows = 3;       // that the decode side's rings have
constexpr const char* kUnixPrefix = "unix:";

// A cache of one daemon, with the session that hands over.
class Side {
 public:
  static absl::StatusOr<Side> Open(const Invocation& invocation, const std::string& address,
                                   const std::string& device, const CacheGeometry& geometry) {
    const PlaneKind kind = *ParsePlane(invocation.Text("plane"));
    Side side;
    auto client = invocation.Connect(address);
    if (!client.ok()) return client.status();
    side.client_ = *std::move(client);
    const std::string name = UniqueName("replay");
    auto plane = Plane::Create(kind, *side.client_, name, device, geometry);
    if (!plane.ok()) return plane.status();
    side.plane_ = *std::move(plane);
    if (side.plane_->session() == nullptr) {
      auto session = side.client_->OpenSession(name);
      if (!session.ok()) {
        side.plane_->Delete().IgnoreError();  // the first error is the one to tell
        return session.status();
      }
      side.session_ = *std::move(session);
    }
    return side;
  }

  Client& client() const { return *client_; }
  Plane& plane() const { return *plane_; }
  const Cache& cache() const { return plane_->cache(); }
  ClientSession& session() const { return session_ != nullptr ? *session_ : *plane_->session(); }

 private:
  std::unique_ptr<Client> client_;
  std::unique_ptr<Plane> plane_;
  std::unique_ptr<ClientSession> session_;  // null: the plane's
};

class SessionPath final : public HandoffPath {
 public:
  SessionPath(const Side& source, const Side& target) : source_(source), target_(target) {}

  absl::StatusOr<HandoffOffer> Offer(const OfferedRequest& offered) override {
    return source_.session().Offer(source_.cache(), offered);
  }
  absl::StatusOr<std::int64_t> Append(std::uint64_t offer_id, const AppendedPart& part) override {
    return source_.session().Append(source_.cache(), offer_id, part);
  }
  absl::StatusOr<AcceptResult> Accept(const std::string& handoff, const AcceptedRequest& accepted) override {
    return target_.session().Accept(target_.cache(), handoff, accepted);
  }
  absl::Status Cancel(std::uint64_t offer_id) override { return source_.session().CancelHandoff(offer_id); }

 private:
  const Side& source_;
  const Side& target_;
};

// Both caches, deleted in the end, also after an error.
absl::StatusOr<DisaggregateReport> RunOn(const std::string& decode_address, const std::string& decode_device,
                                         const Invocation& invocation, std::span<const TraceRequest> requests,
                                         DisaggregateOptions& options, const DisaggregateProgress& progress,
                                         const std::atomic<bool>& stop) {
  auto source = Side::Open(invocation, invocation.Address(), invocation.Text("device"), options.prefill);
  if (!source.ok()) return source.status();
  absl::StatusOr<DisaggregateReport> report = absl::UnknownError("nothing has run");
  if (auto target = Side::Open(invocation, decode_address, decode_device, options.decode); target.ok()) {
    options.prefill = source->cache().geometry;
    options.decode = target->cache().geometry;
    PlaneTarget prefill(source->client(), source->plane());
    PlaneTarget decode(target->client(), target->plane());
    SessionPath path(*source, *target);
    report = ReplayDisaggregated(requests, options, prefill, decode, path, progress, stop);
    if (const auto deleted = target->plane().Delete(); report.ok() && !deleted.ok()) report = deleted;
  } else {
    report = target.status();
  }
  if (const auto deleted = source->plane().Delete(); report.ok() && !deleted.ok()) report = deleted;
  return report;
}

void PrintReport(const DisaggregateReport& report, const DisaggregateOptions& options, bool json) {
  absl::PrintF("%s", json ? FormatJson(report, options) : FormatTable(report, options));
  std::fflush(stdout);
  for (const Mismatch& m : report.mismatches) absl::FPrintF(stderr, "MISMATCH: %s\n", m.what);
}

// Blocks for as many requests of `tokens` tokens as are wanted, or as the cache may hold.
std::int64_t BlocksFor(const Invocation& invocation, const CacheGeometry& g, std::int64_t wanted,
                       std::int64_t tokens) {
  if (invocation.Int64("blocks") > 0) return invocation.Int64("blocks");
  const std::int64_t blocks = (tokens + g.block_size - 1) / g.block_size;
  const std::int64_t held =
      std::min(invocation.Bytes("cache-bytes") / g.block_stride, kMaxIndex / g.block_size);
  return std::min(1 + wanted * blocks, held);
}

}  // namespace

std::vector<Flag> DisaggregateFlags() {
  return {{"disaggregate", nullptr, "",
           "prefill on one daemon, hand every request over, decode on another; every request is checked"},
          {"decode-address", "ADDRESS", "",
           "with --disaggregate: the daemon that decodes; else one is started on this host's memory"},
          {"decode-device", "DEVICE", "", "with --decode-address: as --device"},
          {"layer-wise", nullptr, "", "with --disaggregate: requests are accepted while they are prefilled"},
          {"summaryd", "PATH", "",
           "with --disaggregate: the daemon to start (default: beside this program, else in $PATH)"}};
}

absl::Status CheckDisaggregateFlags(const Invocation& invocation) {
  const bool on = invocation.On("disaggregate");
  for (const char* flag : {"decode-address", "decode-device", "layer-wise", "summaryd"}) {
    if (!on && invocation.Given(flag)) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": is of no use without --disaggregate"));
    }
  }
  if (!on) return absl::OkStatus();
  if (invocation.Given("decode-device") && !invocation.Given("decode-address")) {
    return absl::InvalidArgumentError("--decode-device: is of no use without --decode-address");
  }
  if (invocation.Given("summaryd") && invocation.Given("decode-address")) {
    return absl::InvalidArgumentError("--summaryd: is of no use with --decode-address");
  }
  for (const auto& [flag, unset] : {std::pair{"prefix", ""},
                                    {"publish-output", ""},
                                    {"engines", "1"},
                                    {"restart-engine-every", "0"},
                                    {"sample", "-1"}}) {
    if (invocation.Text(flag) != unset) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": is of no use with --disaggregate"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<DisaggregateOptions> MakeDisaggregateOptions(const Invocation& invocation,
                                                            std::span<const TraceRequest> requests) {
  if (auto status = CheckReplayFlags(invocation); !status.ok()) return status;
  std::int64_t prompt = 1;
  std::int64_t all = 1;
  for (const TraceRequest& r : requests) {
    prompt = std::max<std::int64_t>(prompt, r.input_length);
    all = std::max(all, r.rows());
  }
  const std::int32_t k = invocation.Int32("k");
  const std::int32_t layers = invocation.Int32("layers");
  const std::int32_t capacity = std::max(kMinVerifyCapacity, kRegionTokens - 1 + k + kBackOffTokens);
  DisaggregateOptions options{.prefill = {.layers = layers,
                                          .block_size = invocation.Int32("block-size"),
                                          .capacity = capacity,
                                          .rows_per_layer = capacity,
                                          .k = k},
                              .decode = {.layers = layers,
                                         .block_size = invocation.Int32("block-size") == 16 ? 64 : 16,
                                         .capacity = capacity + kMoreRows,
                                         .rows_per_layer = capacity + 2 * kMoreRows,
                                         .k = k},
                              .chunk_tokens = invocation.Int32("chunk-tokens"),
                              .seed = static_cast<std::uint64_t>(invocation.Int64("seed")),
                              .layer_wise = invocation.On("layer-wise")};
  CacheGeometry& prefill = options.prefill;
  CacheGeometry& decode = options.decode;
  prefill.block_stride = prefill.dense_block_stride();
  decode.block_stride = decode.dense_block_stride() + kGapBytes;
  const std::int64_t wanted = std::min<std::int64_t>(invocation.Int32("concurrency"), std::ssize(requests));
  prefill.blocks = BlocksFor(invocation, prefill, wanted, prompt);
  decode.blocks = BlocksFor(invocation, decode, 2 * wanted, all);
  const std::int64_t held = std::min(LanesOf(prefill, prompt), LanesOf(decode, all) / 2);
  options.concurrency = static_cast<std::int32_t>(std::clamp<std::int64_t>(held, 1, wanted));
  prefill.ring_blocks = 1 + options.concurrency;
  decode.ring_blocks = 1 + 2 * options.concurrency;
  if (auto status = CheckDisaggregate(requests, options); !status.ok()) return status;
  return options;
}

std::string PeerOf(const std::string& address) {
  if (absl::StartsWith(address, kUnixPrefix)) {
    std::error_code error;
    const auto path = std::filesystem::absolute(address.substr(std::string(kUnixPrefix).size()), error);
    return kUnixPrefix + path.string();
  }
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);  // IPv6
  return host;
}

std::vector<std::string> OwnDaemonFlags(const Invocation& invocation) {
  std::vector<std::string> flags{"--peers=" + PeerOf(invocation.Address()), "--drain-timeout=1"};
  for (const auto& [flag, own] : {std::pair{"tls-ca", "peer-ca"}, {"tls-cert", "cert"}, {"tls-key", "key"}}) {
    if (invocation.Given(flag)) flags.push_back(absl::StrCat("--tls-", own, "=", invocation.Text(flag)));
  }
  return flags;
}

int RunDisaggregate(const Invocation& invocation, std::span<const TraceRequest> requests) {
  auto options = MakeDisaggregateOptions(invocation, requests);
  if (!options.ok()) return Fail(options.status());
  const StopOnSignal stop_on_signal;
  std::string decode_address = invocation.Text("decode-address");
  std::string decode_device = invocation.Text("decode-device");
  std::unique_ptr<OwnDaemon> own;
  if (decode_address.empty()) {
    auto daemon = OwnDaemon::Start(invocation.Text("summaryd"), OwnDaemonFlags(invocation));
    if (!daemon.ok()) return Fail(daemon.status());
    own = *std::move(daemon);
    decode_address = own->address();
    decode_device = "host";
  }
  absl::StatusOr<DisaggregateReport> report;
  {
    ProgressBar bar(stderr);
    const auto progress = [&bar](std::int64_t done, std::int64_t total, std::int64_t finished) {
      bar.Update(done, total, finished);
    };
    report = RunOn(decode_address, decode_device, invocation, requests, *options, progress,
                   stop_on_signal.stopped());
  }
  if (!report.ok()) return Fail(report.status());
  PrintReport(*report, *options, invocation.On("json"));
  if (report->mismatch_count > 0) return FlushOutput(kFailure);
  if (report->interrupted) {
    absl::FPrintF(stderr, "interrupted after %d of %d requests; the caches are deleted\n", report->requests,
                  requests.size());
    return FlushOutput(kInterrupted);
  }
  return FlushOutput(0);
}

}  // namespace kvsummary
