// Measures what UcxHelper fetches a second over the loopback interface, against ucx_perftest's ucp_am_bw: the
// same UCX_* environment, the same messages of 1 MiB, the same run, one after the other, and medians.
//
//   bench_ucx [--rounds=N] [--mib=M] [--staging-mib=S]
//
// Two helpers; M MiB are fetched, over and over the S MiB (default 1, which is what ucx_perftest sends again
// and again) of one's staging memory into 16 places of the other's landing memory, as the daemon does.
// "fetch" only fetches, and hashes what lies in the places at its end; "checked" copies every message to
// memory of its own and hashes it there (in this process) when it has come, before its place is used again,
// inside the time measured: a third process at work, where ucx_perftest has two. CPU seconds are of all of
// them. The memory is the daemon's (AllocateStagingMemory): see there which pages it has. Exit status 1 when
// a hash differs.
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "client/ucx_perftest.h"
#include "server/checksum.h"
#include "server/memory/memory.h"
#include "server/ucx/ucx_helper.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kPlaces = 2 * kUcxPeerFetches;  // of 1 MiB, in landing memory

struct Figure {
  double gb_per_s = 0;
  double cpu_s = 0;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "bench_ucx: %s\n", why.c_str());
  std::exit(1);
}

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status().ToString());
  return *std::move(value);
}

double Seconds(const timeval& t) {
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
}
double OwnCpu() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

double CpuOf(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  // Fields 14 and 15; the name, field 2, may hold spaces.
  unsigned long long user = 0, system = 0;
  std::sscanf(line.c_str() + line.rfind(')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu",
              &user, &system);
  return static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

class Ours {
 public:
  explicit Ours(std::int64_t staging_mib) : staging_bytes_(staging_mib * kMiB) {
    const UcxHelper::Options options{.binary = HelperPath(), .net_device = "lo"};
    source_ = OrDie(UcxHelper::Start(options));
    target_ = OrDie(UcxHelper::Start(options));
    std::mt19937_64 random(1);
    for (std::int64_t i = 0; i < staging_bytes_; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(static_cast<char*>(staging_->data()) + i, &word, 8);
    }
    for (std::int64_t i = 0; i < staging_bytes_; i += kMiB) {
      hashes_.push_back(Checksum(static_cast<char*>(staging_->data()) + i, kMiB));
    }
    OrDie(source_->AddStaging(staging_->descriptor(), staging_bytes_));
    OrDie(target_->AddLanding(landing_->descriptor(), kPlaces * kMiB));
    if (!source_->Lend(kToken, 0, 0, staging_bytes_).ok()) Die("Lend");
    Run(staging_bytes_ / kMiB + kPlaces, true);
  }

  const std::string& version() const { return source_->version(); }

  Figure Run(std::int64_t messages, bool checked) {
    checked_ = checked;
    messages_ = messages;
    next_ = 0;
    absl::BlockingCounter left(static_cast<int>(messages));
    left_ = &left;
    const double cpu = AllCpu();
    const Clock::time_point start = Clock::now();
    for (std::int64_t place = 0; place < kPlaces; ++place) FetchNext(place);
    left.Wait();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const Figure figure{static_cast<double>(messages * kMiB) / seconds / 1e9, AllCpu() - cpu};
    for (std::int64_t place = 0; place < kPlaces; ++place) Check(place);
    return figure;
  }

 private:
  static constexpr std::uint64_t kToken = 42;

  static std::string HelperPath() {
    const char* path = std::getenv("SUMMARYD_UCX");
    return path != nullptr ? path : "bazel-bin/server/ucx/summaryd-ucx";
  }

  double AllCpu() const { return OwnCpu() + CpuOf(source_->pid()) + CpuOf(target_->pid()); }

  void Check(std::int64_t place) {
    std::memcpy(copy_.data(), static_cast<char*>(landing_->data()) + place * kMiB, kMiB);
    if (Checksum(copy_.data(), kMiB) != hashes_[chunks_[static_cast<std::size_t>(place)]]) {
      Die(absl::StrCat("what came into place ", place, " is damaged"));
    }
  }

  // Into a place that is free; from its callback, the next.
  void FetchNext(std::int64_t place) {
    const std::int64_t message = next_++;
    if (message >= messages_) return;
    const std::int64_t chunk = message % (staging_bytes_ / kMiB);
    chunks_[static_cast<std::size_t>(place)] = static_cast<std::size_t>(chunk);
    target_->Fetch({.peer = source_->address(),
                    .token = kToken,
                    .from = chunk * kMiB,
                    .bytes = kMiB,
                    .to = place * kMiB},
                   [this, place](const absl::Status& status) {
                     if (!status.ok()) Die(status.ToString());
                     if (checked_) Check(place);
                     FetchNext(place);
                     left_->DecrementCount();
                   });
  }

  const std::int64_t staging_bytes_;
  const std::unique_ptr<Memory> staging_ = OrDie(AllocateStagingMemory(staging_bytes_));
  const std::unique_ptr<Memory> landing_ = OrDie(AllocateLandingMemory(kPlaces * kMiB));
  std::vector<char> copy_ = std::vector<char>(kMiB);  // of the helper's thread
  std::vector<std::uint64_t> hashes_;
  std::unique_ptr<UcxHelper> source_, target_;
  std::vector<std::size_t> chunks_ = std::vector<std::size_t>(kPlaces);  // what each place has got
  std::int64_t messages_ = 0;
  bool checked_ = false;
  std::atomic<std::int64_t> next_ = 0;
  absl::BlockingCounter* left_ = nullptr;
};

Figure Perftest(std::int64_t messages) {
  const auto result = OrDie(RunUcxPerftest(kMiB, messages));
  return {result.bytes_per_second / 1e9, result.cpu_seconds};
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Print(const char* name, const std::vector<Figure>& figures, std::int64_t messages) {
  std::vector<double> rates, cpus;
  for (const Figure& f : figures) {
    rates.push_back(f.gb_per_s);
    cpus.push_back(f.cpu_s);
  }
  const double gigabytes = static_cast<double>(messages * kMiB) / 1e9;
  std::printf("%-12s median %.2f GB/s (%.2f to %.2f), CPU %.2f s for each GB\n", name, Median(rates),
              *std::min_element(rates.begin(), rates.end()), *std::max_element(rates.begin(), rates.end()),
              Median(cpus) / gigabytes);
}

int Main(int argc, char** argv) {
  int rounds = 9;
  std::int64_t messages = 2000, staging_mib = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--rounds=", 0) == 0) {
      rounds = std::atoi(argument.c_str() + 9);
    } else if (argument.rfind("--mib=", 0) == 0) {
      messages = std::atol(argument.c_str() + 6);
    } else if (argument.rfind("--staging-mib=", 0) == 0) {
      staging_mib = std::atol(argument.c_str() + 14);
    } else {
      Die("usage: bench_ucx [--rounds=N] [--mib=M] [--staging-mib=S]");
    }
  }
  spdlog::set_level(spdlog::level::err);
  Ours ours(staging_mib);
  std::printf("UCX %s, %ld messages of 1 MiB out of %ld MiB, %d rounds\n", ours.version().c_str(), messages,
              staging_mib, rounds);
  std::vector<Figure> theirs, fetch, checked;
  std::vector<double> fetch_ratios, checked_ratios;
  for (int round = 0; round < rounds; ++round) {
    theirs.push_back(Perftest(messages));
    fetch.push_back(ours.Run(messages, false));
    checked.push_back(ours.Run(messages, true));
    fetch_ratios.push_back(fetch.back().gb_per_s / theirs.back().gb_per_s);
    checked_ratios.push_back(checked.back().gb_per_s / theirs.back().gb_per_s);
    std::printf("round %d, GB/s: ucx_perftest %.2f, fetch %.2f, checked %.2f\n", round + 1,
                theirs.back().gb_per_s, fetch.back().gb_per_s, checked.back().gb_per_s);
    std::fflush(stdout);
  }
  Print("ucx_perftest", theirs, messages);
  Print("fetch", fetch, messages);
  Print("checked", checked, messages);
  std::printf("median of the rounds' ratios to ucx_perftest: fetch %.2f, checked %.2f\n",
              Median(fetch_ratios), Median(checked_ratios));
  return 0;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) { return kvsummary::Main(argc, argv); }
