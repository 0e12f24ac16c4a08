#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "client/direct/direct.h"
#include "client/plane.h"
#include "client/session.h"
#include "client/status.h"
#include "client/step_memory.h"
#include "tests/gpu/daemon_check.h"

namespace kvsummary::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr CacheGeometry kGeometry{.layers = 4,
                                  .blocks = 257,
                                  .block_size = 64,
                                  .block_stride = 4 * 2048,
                                  .ring_blocks = 257,
                                  .capacity = 10,
                                  .rows_per_layer = 10,
                                  .k = 3};
constexpr LayerSpan kAll{0, 4};
constexpr std::int64_t kRequests = 256;
constexpr std::int64_t kArrayBytes = kRequests * 8;
constexpr std::int64_t kRowsAt = 3 * kArrayBytes;
constexpr std::int64_t kCounterAt = kRowsAt + kAll.count * kRequests * kRowBytes;
constexpr std::int64_t kBytes = kCounterAt + 64;

// What a worker is killed at.
constexpr const char* kKinds[] = {"direct updates", "shared updates, device rows",
                                  "a wait for rows announced", "shared updates, host rows"};
constexpr int kKindCount = 4;
constexpr int kReady = 6;          // workers that wait for their death, so that their start costs no time
constexpr double kLimitMs = 1000;  // of the 99th percentile
constexpr double kPatienceMs = 30'000;
constexpr double kSettleMs = 2000;
constexpr double kShortSettleMs = 500;
constexpr long long kGpuSlackBytes = 4 << 20;  // less than one worker's; an MPS server keeps a little of each
constexpr long long kRssSlackBytes = 32 << 20;  // the allocator's, of threads that come and go

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The arrays of a decode of every request at position 0, and rows of zeros.
std::vector<char> StepBytes() {
  std::vector<char> bytes(kBytes);
  auto* slots = reinterpret_cast<std::int64_t*>(bytes.data());
  auto* bases = reinterpret_cast<std::int64_t*>(bytes.data() + 2 * kArrayBytes);
  for (std::int64_t r = 0; r < kRequests; ++r) {
    slots[r] = (r + 1) * kGeometry.block_size;
    bases[r] = (r + 1) * kGeometry.rows_per_block();
  }
  return bytes;
}

DecodeStep InMemory(const char* at) {
  const auto array = [&](int i) { return reinterpret_cast<const std::int64_t*>(at + i * kArrayBytes); };
  return {static_cast<std::int32_t>(kRequests), PackedRows(at + kRowsAt, kRequests), array(0), array(1),
          array(2)};
}

SharedUpdate InBuffers(std::uint64_t arrays, std::uint64_t rows) {
  const auto array = [&](int i) { return SharedArray{arrays, i * kArrayBytes, kRequests}; };
  return {.rows = {rows, kRowsAt, kRowsAt + kRowBytes / 2, kRowBytes, kRequests * kRowBytes},
          .slots = array(0),
          .positions = array(1),
          .ring_bases = array(2)};
}

// A worker process. Killed when destroyed.
class Worker {
 public:
  Worker(const CheckOptions& options, int number) : name_("kills/" + std::to_string(number)) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]);
      close(ends[1]);
      const std::string device = "--device=" + options.device;
      const std::string kind = std::to_string(number % kKindCount);
      execl(options.program.c_str(), "daemon_check", "worker", device.c_str(), name_.c_str(), kind.c_str(),
            nullptr);
      _exit(127);
    }
    close(ends[1]);
    output_ = ends[0];
  }
  ~Worker() {
    close(output_);
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const std::string& name() const { return name_; }
  // Whether it got to its work; what it says otherwise is printed.
  bool Await() {
    char c = 0;
    ssize_t got = 0;
    std::string said;
    while ((got = read(output_, &c, 1)) == 1 || (got < 0 && errno == EINTR)) {
      if (got == 1 && c == '+') return true;
      if (got == 1) said += c;
    }
    std::printf("FAIL worker %s ended before its work: %s\n", name_.c_str(), said.c_str());
    return false;
  }
  void Kill() const { kill(pid_, SIGKILL); }
  // Whether it is dead by now.
  bool Reap() {
    if (pid_ < 0) return true;
    if (waitpid(pid_, nullptr, WNOHANG) != pid_) return false;
    pid_ = -1;
    return true;
  }

 private:
  const std::string name_;
  pid_t pid_ = -1;
  int output_ = -1;
};

// What the daemon holds.
struct Held {
  long long gpu_bytes = 0, budget_bytes = 0, overhead_bytes = 0, rss_bytes = 0;
  long descriptors = 0;
};

Held Look(Client& client, const CheckOptions& options, double settle_ms) {
  Held held;
  // The driver frees a dead process's context some time after its parent has seen it dead.
  held.gpu_bytes = UsedGpuBytes(client, options.device);
  for (const auto start = Clock::now(); MsSince(start) < settle_ms;)
    held.gpu_bytes = std::min(held.gpu_bytes, UsedGpuBytes(client, options.device));
  if (const auto info = client.GetServerInfo(); info.ok()) {
    for (const DeviceInfo& d : info->devices) {
      if (d.name != options.device) continue;
      held.budget_bytes = d.used_bytes;
      held.overhead_bytes = d.overhead_bytes;
    }
  }
  const std::string process = "/proc/" + std::to_string(options.daemon_pid);
  long long pages = 0;
  std::ifstream(process + "/statm") >> pages >> pages;
  held.rss_bytes = pages * sysconf(_SC_PAGESIZE);
  std::error_code error;
  for (std::filesystem::directory_iterator i(process + "/fd", error), end; !error && i != end;
       i.increment(error))
    ++held.descriptors;
  return held;
}

void Print(const char* when, const Held& held) {
  std::printf(
      "%s: GPU in use %lld bytes; the daemon's caches %lld, overhead %lld, RSS %lld KiB, %ld descriptors\n",
      when, held.gpu_bytes, held.budget_bytes, held.overhead_bytes, held.rss_bytes >> 10, held.descriptors);
  std::fflush(stdout);
}

struct Times {
  double session_ms = 0;  // until the daemon has ended its session
  double death_ms = 0;    // until the process is gone, as its parent sees it: the driver takes its time
  double reclaim_ms = 0;  // until its cache is another's, which needs both
};

absl::StatusOr<bool> IsListed(Client& client, const std::string& name) {
  const auto sessions = client.ListSessions();
  if (!sessions.ok()) return sessions.status();
  return std::any_of(sessions->begin(), sessions->end(),
                     [&](const SessionSummary& s) { return s.name == name; });
}

// Kills the worker and waits until all that it had is free.
absl::StatusOr<Times> Measure(Client& client, ClientSession& session, Worker& worker) {
  Times times;
  const auto start = Clock::now();
  worker.Kill();
  while (MsSince(start) < kPatienceMs) {
    if (times.death_ms == 0 && worker.Reap()) times.death_ms = MsSince(start);
    if (times.session_ms == 0) {
      const auto listed = IsListed(client, worker.name());
      if (!listed.ok()) return listed.status();
      if (*listed) continue;
      times.session_ms = MsSince(start);
    }
    const auto attached = session.AttachCache(worker.name());
    if (!attached.ok() && ReasonOf(attached.status()) != "CACHE_STILL_MAPPED") return attached.status();
    if (!attached.ok()) continue;
    times.reclaim_ms = MsSince(start);
    while (!worker.Reap()) std::this_thread::yield();
    if (times.death_ms == 0) times.death_ms = MsSince(start);
    if (auto s = client.DeleteCache(*attached); !s.ok()) return s;
    return times;
  }
  return absl::DeadlineExceededError(times.session_ms == 0 ? "its session has not ended"
                                                           : "its cache counts as mapped still");
}

void PrintHistogram(const std::vector<double>& sorted) {
  constexpr double kEdges[] = {1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 1000, 1e9};
  double from = 0;
  for (const double edge : kEdges) {
    const auto count =
        std::count_if(sorted.begin(), sorted.end(), [&](double t) { return t >= from && t < edge; });
    if (edge < 1e9) {
      std::printf("  %5.0f to %5.0f ms %4ld %s\n", from, edge, static_cast<long>(count),
                  std::string(static_cast<std::size_t>(std::min<long>(count, 60)), '#').c_str());
    } else {
      std::printf("  %5.0f ms or more  %4ld\n", from, static_cast<long>(count));
    }
    from = edge;
  }
}

double Percentile(std::vector<double>& values, std::size_t percent) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, values.size() * percent / 100)];
}

bool Flat(const char* what, long long before, long long after, long long slack) {
  if (after <= before + slack) return true;
  std::printf("FAIL %s grew from %lld to %lld\n", what, before, after);
  return false;
}

}  // namespace

int RunWorker(const CheckOptions& options, const std::string& name, int kind) {
  const auto client = Client::Connect(options.address);
  if (!client.ok()) return Fail("connect", client.status());
  const auto session = (*client)->OpenSession(name);
  if (!session.ok()) return Fail("OpenSession", session.status());
  const auto cache = (*session)->CreateCache(name, options.device, kGeometry);
  if (!cache.ok()) return Fail("CreateCache", cache.status());
  const auto exported = (*session)->ExportMemory(*cache);
  if (!exported.ok()) return Fail("ExportMemory", exported.status());
  DirectCache direct;
  if (const auto s = direct.Map(MapArguments(**session, *cache, *exported)); !s.ok())
    return Fail("kvs_map", FromPlain(s));
  const auto buffer = (*session)->RegisterBuffer(kBytes);
  if (!buffer.ok()) return Fail("RegisterBuffer", buffer.status());
  const auto bytes = StepBytes();
  std::memcpy((*buffer)->data(), bytes.data(), bytes.size());
  const bool cuda = exported->kind != HandleKind::kMemfd;
  auto memory = cuda ? MakeCudaStepMemory(exported->device_uuid) : MakeHostStepMemory();
  if (!memory.ok()) return Fail("step memory", memory.status());
  const auto at = (*memory)->Reserve(kBytes);
  if (!at.ok()) return Fail("step memory", at.status());
  if (const auto s = (*memory)->Write(*at, bytes.data(), kBytes); !s.ok()) return Fail("step memory", s);
  std::uint64_t rows = (*buffer)->id();
  if (cuda) {
    const auto handle = (*memory)->IpcHandle();
    if (!handle.ok()) return Fail("IpcHandle", handle.status());
    const auto id = (*session)->RegisterCudaBuffer(
        {reinterpret_cast<const std::uint8_t*>(handle->data()), handle->size()}, 0, kBytes,
        exported->device_uuid);
    if (!id.ok()) return Fail("RegisterCudaBuffer", id.status());
    rows = *id;
  }
  SharedUpdate update = InBuffers((*buffer)->id(), kind == 3 ? (*buffer)->id() : rows);
  if (kind == 2) update.ready = {(*buffer)->id(), kCounterAt, 1};  // never comes
  const auto work = [&]() -> absl::Status {
    if (kind != 0) return (*session)->Decode(*cache, kAll, update).status();
    if (auto s = FromPlain(direct.Decode(kAll, InMemory(*at), {.stream = (*memory)->stream()})); !s.ok())
      return s;
    return (*memory)->Synchronize();
  };
  if (kind != 2) {
    if (const auto s = work(); !s.ok()) return Fail(kKinds[kind], s);
  }
  std::printf("+");
  std::fflush(stdout);
  while (true) {
    if (const auto s = work(); !s.ok()) return Fail(kKinds[kind], s);
  }
}

int CheckKills(const CheckOptions& options) {
  const auto client = Client::Connect(options.address);
  if (!client.ok()) return Fail("connect", client.status());
  const auto session = (*client)->OpenSession("kills");
  if (!session.ok()) return Fail("OpenSession", session.status());
  // What a daemon takes once (a context, threads) is not growth: the first round is not counted.
  const auto own = (*session)->CreateCache("kills/own", options.device, kGeometry);
  if (!own.ok()) return Fail("CreateCache", own.status());
  if (const auto s = (*client)->DeleteCache(*own); !s.ok()) return Fail("DeleteCache", s);
  Print("no worker yet", Look(**client, options, kShortSettleMs));
  int number = 0;
  for (; number < 2 * kKindCount; ++number) {
    Worker worker(options, number);
    if (!worker.Await()) return 1;
    const auto times = Measure(**client, **session, worker);
    if (!times.ok()) return Fail("an uncounted kill", times.status());
    if (number < kKindCount) Print(kKinds[number], Look(**client, options, kShortSettleMs));
  }
  const Held before = Look(**client, options, kSettleMs);
  Print("before", before);

  std::vector<double> reclaim, death, ended, after_death, of_kind[kKindCount];
  std::deque<std::unique_ptr<Worker>> ready;
  const int end = number + options.kills;
  int next = number;
  for (; number < end; ++number) {
    while (next < end && next < number + kReady) ready.push_back(std::make_unique<Worker>(options, next++));
    if (!ready.front()->Await()) return 1;
    const auto times = Measure(**client, **session, *ready.front());
    if (!times.ok()) return Fail(ready.front()->name().c_str(), times.status());
    ready.pop_front();
    reclaim.push_back(times->reclaim_ms);
    death.push_back(times->death_ms);
    ended.push_back(times->session_ms);
    after_death.push_back(times->reclaim_ms - std::max(times->death_ms, times->session_ms));
    of_kind[number % kKindCount].push_back(times->reclaim_ms);
  }
  const Held after = Look(**client, options, kSettleMs);
  Print("after ", after);

  const double p99 = Percentile(reclaim, 99);
  std::printf("%d kills of a worker of %s: all it had is free again after\n", options.kills,
              options.device.c_str());
  PrintHistogram(reclaim);
  for (int kind = 0; kind < kKindCount; ++kind) {
    if (of_kind[kind].empty()) continue;
    const double median = Percentile(of_kind[kind], 50);
    std::printf("  p50 %.1f ms, longest %.1f ms when killed at %s\n", median, of_kind[kind].back(),
                kKinds[kind]);
  }
  const auto line = [](const char* what, std::vector<double>& ms) {
    std::printf("  %-54s p50 %.1f ms, p99 %.1f ms\n", what, Percentile(ms, 50), Percentile(ms, 99));
  };
  line("the daemon has ended its session after", ended);
  line("its parent sees it dead (all its memory unmapped) after", death);
  line("from the later of these until its cache is another's", after_death);
  bool good = Flat("GPU memory", before.gpu_bytes, after.gpu_bytes, kGpuSlackBytes);
  good &= Flat("memory of caches", before.budget_bytes, after.budget_bytes, 0);
  good &= Flat("resident memory", before.rss_bytes, after.rss_bytes, kRssSlackBytes);
  good &= Flat("descriptors", before.descriptors, after.descriptors, 0);
  if (p99 > kLimitMs) {
    std::printf("FAIL the 99th percentile is above %.0f ms\n", kLimitMs);
    good = false;
  }
  std::printf("%d kills: p50 %.1f ms, p99 %.1f ms, goal %.0f ms %s; memory and descriptors %s\n",
              options.kills, Percentile(reclaim, 50), p99, options.goal_ms,
              p99 <= options.goal_ms ? "met" : "missed", good ? "flat" : "or time NOT as they should be");
  return good ? 0 : 1;
}

}  // namespace kvsummary::gpu
