#include "client/replay/engines.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/replay/plane_target.h"
#include "client/replay/session_prefixes.h"
#include "client/session.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// What the engines share.
struct Common {
  Common(std::span<const TraceRequest> all, const EnginesOptions& engines, const ReplayProgress& told,
         const std::atomic<bool>& stopping)
      : requests(all), options(engines), progress(told), stop(stopping) {
    for (const TraceRequest& r : requests) total += r.rows();
  }

  const std::span<const TraceRequest> requests;
  const EnginesOptions& options;
  const ReplayProgress& progress;
  const std::atomic<bool>& stop;
  std::int64_t total = 0;  // rows of all requests
  SeenBlocks seen;
  std::atomic<bool> failed = false;

  std::mutex mutex;
  ReplayReport report;  // guarded by mutex, as all below
  absl::Status status;
  std::int64_t done = 0;
};

class Engine {
 public:
  Engine(Common& common, std::int64_t number) : common_(common) {
    const std::int64_t count = std::ssize(common.requests);
    for (std::int64_t i = number; i < count; i += common.options.engines) order_.push_back(i);
  }

  void Run() {
    while (!order_.empty() && !common_.stop && !common_.failed) {
      if (auto status = Live(); !status.ok()) {
        common_.failed = true;
        const std::lock_guard lock(common_.mutex);
        common_.status.Update(status);
      }
    }
  }

 private:
  // One life, with what is left to do.
  absl::Status Live() {
    auto client = Client::Connect(common_.options.address, {.tls = common_.options.tls});
    if (!client.ok()) return client.status();
    auto plane = Plane::Create(common_.options.plane, **client, UniqueName("replay"), common_.options.device,
                               common_.options.engine.geometry);
    if (!plane.ok()) return plane.status();
    absl::Status status = Drive(**client, **plane);
    const std::string name = (*plane)->cache().name;
    const absl::Status deleted = (*plane)->Delete();
    if (status.ok() && !deleted.ok()) {
      return absl::Status(deleted.code(),
                          absl::StrCat("cache ", name, " is not deleted: ", deleted.message()));
    }
    return status;
  }

  // Until this life's end, which leaves the session with all that it holds.
  absl::Status Drive(Client& client, Plane& plane) {
    PlaneTarget target(client, plane);
    EngineOptions options = common_.options.engine;
    options.geometry = plane.cache().geometry;
    options.order = order_;
    options.stop_after = common_.options.restart_every;
    absl::StatusOr<ReplayReport> report;
    if (common_.options.prefix) {
      std::unique_ptr<ClientSession> own;
      ClientSession* session = plane.session();
      if (session == nullptr) {
        auto opened = client.OpenSession(plane.cache().name);
        if (!opened.ok()) return opened.status();
        own = *std::move(opened);
        session = own.get();
      }
      auto prefixes =
          SessionPrefixes::Open(*session, plane.cache(), common_.requests, options.seed, common_.seen);
      if (!prefixes.ok()) return prefixes.status();
      options.prefixes = &*prefixes;
      report = Replay(options, target);
      if (report.ok()) report->prefix = prefixes->report();
    } else {
      report = Replay(options, target);
    }
    if (!report.ok()) return report.status();
    const absl::flat_hash_set<std::int64_t> finished(report->finished.begin(), report->finished.end());
    std::erase_if(order_, [&finished](std::int64_t request) { return finished.contains(request); });
    const std::lock_guard lock(common_.mutex);
    common_.report.Add(*report);
    return absl::OkStatus();
  }

  absl::StatusOr<ReplayReport> Replay(const EngineOptions& options, Target& target) {
    const auto progress = [this, last = std::int64_t{0}](std::int64_t done, std::int64_t /*total*/,
                                                         const SchedulerCounts& counts) mutable {
      const std::lock_guard lock(common_.mutex);
      common_.done += done - std::exchange(last, done);
      common_.progress(common_.done, common_.total, counts);
    };
    return ReplayTrace(common_.requests, options, target, progress, common_.stop);
  }

  Common& common_;
  std::vector<std::int64_t> order_;  // of requests that have not finished
};

absl::StatusOr<std::vector<StoreTier>> Tiers(const EnginesOptions& options) {
  const auto client = Client::Connect(options.address, {.tls = options.tls});
  if (!client.ok()) return client.status();
  const auto stats = (*client)->GetStoreStats();
  if (!stats.ok()) return stats.status();
  return stats->tiers;
}

// What tiers have done between two times.
std::vector<PrefixReport::Tier> Difference(const std::vector<StoreTier>& after,
                                           const std::vector<StoreTier>& before) {
  std::vector<PrefixReport::Tier> tiers;
  for (std::size_t i = 0; i < std::min(after.size(), before.size()); ++i) {
    tiers.push_back({after[i].name, after[i].evicted_pages - before[i].evicted_pages,
                     after[i].demoted_pages - before[i].demoted_pages,
                     after[i].promoted_pages - before[i].promoted_pages});
  }
  return tiers;
}

}  // namespace

absl::StatusOr<ReplayReport> RunEngines(std::span<const TraceRequest> requests, const EnginesOptions& options,
                                        const ReplayProgress& progress, const std::atomic<bool>& stop) {
  const auto before = options.prefix ? Tiers(options) : std::vector<StoreTier>();
  if (!before.ok()) return before.status();
  Common common(requests, options, progress, stop);

  const auto start = Clock::now();
  std::vector<Engine> engines;
  for (std::int64_t number = 0; number < options.engines; ++number) engines.emplace_back(common, number);
  std::vector<std::thread> threads;
  threads.reserve(engines.size());
  for (Engine& engine : engines) threads.emplace_back([&engine] { engine.Run(); });
  for (std::thread& thread : threads) thread.join();
  if (!common.status.ok()) return common.status;

  ReplayReport report = std::move(common.report);
  report.wall_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  report.interrupted = stop && report.counts.finished < std::ssize(requests);
  if (report.prefix) {
    const auto after = Tiers(options);
    if (!after.ok()) return after.status();
    report.prefix->tiers = Difference(*after, *before);
  }
  return report;
}

}  // namespace kvsummary
