#include "client/ucx_perftest.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/descriptor_client.h"
#include "server/ucx/environment.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kProgram = "ucx_perftest";
constexpr milliseconds kPatience{60'000};
constexpr milliseconds kRetry{20};           // until the first process listens, which it says in no other way
constexpr double kPerftestMB = 1024 * 1024;  // bytes of what it calls MB

// A process that is killed, if need be, with this object.
class Child {
 public:
  // What it prints goes to `output`. Afterwards started() is the error, or 0.
  Child(std::vector<std::string> arguments, int output) {
    std::vector<std::string> environment = UcxEnvironment("lo");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
    started_ = posix_spawnp(&pid_, kProgram, &actions, nullptr, Pointers(arguments).data(),
                            Pointers(environment).data());
    posix_spawn_file_actions_destroy(&actions);
    if (started_ != 0) pid_ = -1;
  }
  ~Child() { End(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int started() const { return started_; }
  bool HasEnded() {
    if (pid_ > 0 && wait4(pid_, nullptr, WNOHANG, &usage_) == pid_) pid_ = -1;
    return pid_ < 0;
  }
  void End() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    while (wait4(pid_, nullptr, 0, &usage_) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  // When it has ended.
  double cpu_seconds() const {
    const auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
    };
    return seconds(usage_.ru_utime) + seconds(usage_.ru_stime);
  }

 private:
  static std::vector<char*> Pointers(std::vector<std::string>& strings) {
    std::vector<char*> pointers;
    pointers.reserve(strings.size() + 1);
    for (std::string& s : strings) pointers.push_back(s.data());
    pointers.push_back(nullptr);
    return pointers;
  }

  int started_ = 0;
  pid_t pid_ = -1;
  rusage usage_{};
};

absl::Status Failed(const char* call) {
  return absl::UnavailableError(absl::StrCat(kProgram, ": ", call, ": ", std::strerror(errno)));
}

absl::StatusOr<int> FreePort() {
  const OwnedDescriptor socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  if (bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Failed("no port");
  }
  return ntohs(address.sin_port);
}

// All that is printed until `deadline`.
std::string ReadAll(int fd, Clock::time_point deadline) {
  std::string text;
  char buffer[4096];
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    pollfd readable{.fd = fd, .events = POLLIN, .revents = 0};
    if (left <= 0 || poll(&readable, 1, static_cast<int>(left)) <= 0) return text;
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got <= 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
  }
}

// The last line of figures: iterations, three latencies, average and overall MB/s, two message rates. 0 when
// there is none.
double ParseRate(const std::string& text) {
  double rate = 0;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    double iterations = 0, average = 0, overall = 0;
    if (std::sscanf(line.c_str(), "%lf,%*[^,],%*[^,],%*[^,],%lf,%lf", &iterations, &average, &overall) == 3) {
      rate = overall * kPerftestMB;
    }
  }
  return rate;
}

}  // namespace

absl::StatusOr<UcxPerftestResult> RunUcxPerftest(std::int64_t message_bytes, std::int64_t messages) {
  const Clock::time_point deadline = Clock::now() + kPatience;
  const auto port = FreePort();
  if (!port.ok()) return port.status();
  const OwnedDescriptor nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
  Child server({kProgram, "-p", absl::StrCat(*port)}, nowhere.get());
  if (server.started() != 0) {
    return absl::NotFoundError("ucx_perftest is not installed (Debian's package ucx-utils)");
  }
  std::string said;
  while (Clock::now() < deadline && !server.HasEnded()) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return Failed("pipe");
    const OwnedDescriptor ours(ends[0]);
    OwnedDescriptor theirs(ends[1]);
    Child client({kProgram, "127.0.0.1", "-p", absl::StrCat(*port), "-t", "ucp_am_bw", "-s",
                  absl::StrCat(message_bytes), "-n", absl::StrCat(messages), "-w", "100", "-f", "-v"},
                 theirs.get());
    theirs = OwnedDescriptor();
    said = ReadAll(ours.get(), deadline);
    client.End();
    if (const double rate = ParseRate(said); rate > 0) {
      server.End();
      return UcxPerftestResult{rate, client.cpu_seconds() + server.cpu_seconds()};
    }
    std::this_thread::sleep_for(kRetry);
  }
  return absl::UnavailableError(absl::StrCat("ucx_perftest gave no figure; it said: ", said));
}

}  // namespace kvsummary
