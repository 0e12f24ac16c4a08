// Measures what UcxHelper fetches a second over one interface, against ucx_perftest's ucp_am_bw: the same
// UCX_* environment, the same messages of 1 MiB, the same run, one after the other, and medians.
//
//   bench_ucx [--rounds=N] [--mib=M] [--staging-mib=S] [--device=lo]
//
// Two helpers; M MiB are fetched, over and over the S MiB (default 1, which is what ucx_perftest sends again
// and again) of one's staging memory into 16 places of the other's landing memory. "fetch" only fetches, and
// hashes what lies in the places at its end; "checked" hashes every message (XXH3, in this process) when it
// has come, before its place is used again, inside the time measured: a third process at work, where
// ucx_perftest has two. CPU seconds are of all of them. The memory has 2 MiB pages where the machine grants
// some (vm.nr_overcommit_hugepages). Exit status 1 when a hash differs.
#include <fcntl.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "server/ucx/ucx_helper.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kHugeBytes = 2 * kMiB;
constexpr std::int64_t kPlaces = 16;  // of 1 MiB, in landing memory

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
double Cpu(const rusage& usage) { return Seconds(usage.ru_utime) + Seconds(usage.ru_stime); }

double OwnCpu() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Cpu(usage);
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

struct Mapped {
  explicit Mapped(std::int64_t bytes) : fd(memfd_create("bench", MFD_CLOEXEC | MFD_HUGETLB)) {
    const std::int64_t whole = (bytes + kHugeBytes - 1) / kHugeBytes * kHugeBytes;
    huge = fd >= 0 && posix_fallocate(fd, 0, whole) == 0;
    if (!huge) {
      close(fd);
      fd = memfd_create("bench", MFD_CLOEXEC);
      if (ftruncate(fd, bytes) != 0) Die("ftruncate");
    }
    data = static_cast<char*>(mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_POPULATE, fd, 0));
    if (data == MAP_FAILED) Die("mmap");
  }
  int fd;
  bool huge;
  char* data;
};

class Ours {
 public:
  Ours(const std::string& device, std::int64_t staging_mib) : staging_bytes_(staging_mib * kMiB) {
    const UcxHelper::Options options{.binary = HelperPath(), .net_device = device};
    source_ = OrDie(UcxHelper::Start(options));
    target_ = OrDie(UcxHelper::Start(options));
    std::mt19937_64 random(1);
    for (std::int64_t i = 0; i < staging_bytes_; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(staging_.data + i, &word, 8);
    }
    for (std::int64_t i = 0; i < staging_bytes_; i += kMiB)
      hashes_.push_back(XXH3_64bits(staging_.data + i, kMiB));
    OrDie(source_->AddStaging(staging_.fd, staging_bytes_));
    OrDie(target_->AddLanding(landing_.fd, kPlaces * kMiB));
    if (!source_->Lend(kToken, 0, 0, staging_bytes_).ok()) Die("Lend");
    Run(staging_bytes_ / kMiB + kPlaces, true);
  }

  const std::string& version() const { return source_->version(); }
  bool huge() const { return staging_.huge && landing_.huge; }

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
    if (XXH3_64bits(landing_.data + place * kMiB, kMiB) !=
        hashes_[chunks_[static_cast<std::size_t>(place)]]) {
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
  Mapped staging_{staging_bytes_}, landing_{kPlaces * kMiB};
  std::vector<std::uint64_t> hashes_;
  std::unique_ptr<UcxHelper> source_, target_;
  std::vector<std::size_t> chunks_ = std::vector<std::size_t>(kPlaces);  // what each place has got
  std::int64_t messages_ = 0;
  bool checked_ = false;
  std::atomic<std::int64_t> next_ = 0;
  absl::BlockingCounter* left_ = nullptr;
};

class Perftest {
 public:
  explicit Perftest(const std::string& device) : environment_(UcxEnvironment(device)) {}

  Figure Run(std::int64_t messages) const {
    const std::string port = absl::StrCat(20000 + getpid() % 10000);
    const pid_t server = Spawn({"ucx_perftest", "-p", port}, "/dev/null");
    char output[] = "/tmp/kvs-XXXXXX";
    close(mkstemp(output));
    rusage usage{};
    Figure figure;
    for (int attempt = 0; attempt < 50 && figure.gb_per_s == 0; ++attempt) {
      usleep(100000);  // until the server listens, which it says in no other way
      const pid_t client = Spawn({"ucx_perftest", "127.0.0.1", "-p", port, "-t", "ucp_am_bw", "-s",
                                  absl::StrCat(kMiB), "-n", absl::StrCat(messages), "-w", "100", "-f", "-v"},
                                 output);
      wait4(client, nullptr, 0, &usage);
      figure.gb_per_s = ReadRate(output);
    }
    if (figure.gb_per_s == 0) Die("ucx_perftest gave no figure");
    figure.cpu_s = Cpu(usage);
    wait4(server, nullptr, 0, &usage);
    figure.cpu_s += Cpu(usage);
    unlink(output);
    return figure;
  }

 private:
  pid_t Spawn(std::vector<std::string> arguments, const char* output) const {
    std::vector<std::string> environment = environment_;
    std::vector<char*> argv, envp;
    for (std::string& s : arguments) argv.push_back(s.data());
    for (std::string& s : environment) envp.push_back(s.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output, O_WRONLY | O_TRUNC, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    pid_t pid = 0;
    if (posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), envp.data()) != 0) {
      Die("there is no ucx_perftest: install ucx-utils");
    }
    posix_spawn_file_actions_destroy(&actions);
    return pid;
  }

  // The last line: iterations, three latencies, average and overall MB/s, two message rates. 0: none.
  static double ReadRate(const char* path) {
    std::ifstream in(path);
    double average = 0, overall = 0;
    for (std::string line; std::getline(in, line);) {
      if (std::sscanf(line.c_str(), "%*[^,],%*[^,],%*[^,],%*[^,],%lf,%lf", &average, &overall) != 2)
        overall = 0;
    }
    return overall * static_cast<double>(kMiB) / 1e9;
  }

  const std::vector<std::string> environment_;
};

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
  std::string device = "lo";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--rounds=", 0) == 0) {
      rounds = std::atoi(argument.c_str() + 9);
    } else if (argument.rfind("--mib=", 0) == 0) {
      messages = std::atol(argument.c_str() + 6);
    } else if (argument.rfind("--staging-mib=", 0) == 0) {
      staging_mib = std::atol(argument.c_str() + 14);
    } else if (argument.rfind("--device=", 0) == 0) {
      device = argument.substr(9);
    } else {
      Die("usage: bench_ucx [--rounds=N] [--mib=M] [--staging-mib=S] [--device=lo]");
    }
  }
  spdlog::set_level(spdlog::level::err);
  Ours ours(device, staging_mib);
  const Perftest perftest(device);
  std::printf("UCX %s, %s, %ld messages of 1 MiB out of %ld MiB of pages of %s, %d rounds\n",
              ours.version().c_str(), device.c_str(), messages, staging_mib, ours.huge() ? "2 MiB" : "4 KiB",
              rounds);
  std::vector<Figure> theirs, fetch, checked;
  std::vector<double> fetch_ratios, checked_ratios;
  for (int round = 0; round < rounds; ++round) {
    theirs.push_back(perftest.Run(messages));
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
