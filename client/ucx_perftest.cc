#include "client/ucx_perftest.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
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
#include "client/exec_pointers.h"
#include "server/ucx/environment.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kProgram = "ucx_perftest";
constexpr milliseconds kPatience{60'000};
constexpr milliseconds kRetry{20};           // until the first process listens, which it says in no other way
constexpr double kPerftestMB = 1024 * 1024;  // bytes of what it calls MB

// In the child, before the program: only calls that a signal handler may make. An exec that fails says why to
// `failed`.
[[noreturn]] void BecomePerftest(pid_t parent, int output, int failed, char* const* arguments,
                                 char* const* environment) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // it would spin for ever
  if (getppid() != parent) _exit(1);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  constexpr int kFailed = STDERR_FILENO + 1;
  dup3(failed, kFailed, O_CLOEXEC);  // EINVAL where it has that number, and the flag
  closefrom(kFailed + 1);
  execvpe(kProgram, arguments, environment);
  const int error = errno;
  (void)!write(kFailed, &error, sizeof(error));
  _exit(127);
}

// A process that is killed, if need be, with this object, and with the thread that has made it.
class Child {
 public:
  // What it prints goes to `output`. Afterwards started() is the error, or 0.
  Child(std::vector<std::string> arguments, int output) {
    std::vector<std::string> environment = UcxEnvironment("lo");
    const std::vector<char*> argument_pointers = ExecPointers(arguments),
                             variables = ExecPointers(environment);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      started_ = errno;
      return;
    }
    const OwnedDescriptor ours(ends[0]);
    OwnedDescriptor failed(ends[1]);
    const pid_t self = getpid();
    pid_ = fork();
    if (pid_ == 0) BecomePerftest(self, output, failed.get(), argument_pointers.data(), variables.data());
    if (pid_ < 0) {
      started_ = errno;
      return;
    }
    failed = OwnedDescriptor();
    if (read(ours.get(), &started_, sizeof(started_)) > 0) End();
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
  int started_ = 0;
  pid_t pid_ = -1;
  rusage usage_{};
};

absl::Status Failed(const char* call, int error = errno) {
  return absl::UnavailableError(absl::StrCat(kProgram, ": ", call, ": ", std::strerror(error)));
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
  if (server.started() == ENOENT) {
    return absl::NotFoundError("ucx_perftest is not installed (Debian's package ucx-utils)");
  }
  if (server.started() != 0) return Failed("cannot be run", server.started());
  std::string said;
  while (Clock::now() < deadline && !server.HasEnded()) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return Failed("pipe");
    const OwnedDescriptor ours(ends[0]);
    OwnedDescriptor theirs(ends[1]);
    Child client({kProgram, "127.0.0.1", "-p", absl::StrCat(*port), "-t", "ucp_am_bw", "-s",
                  absl::StrCat(message_bytes), "-n", absl::StrCat(messages), "-w", "100", "-f", "-v"},
                 theirs.get());
    if (client.started() != 0) return Failed("cannot be run", client.started());
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
