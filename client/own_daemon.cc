#include "client/own_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "client/descriptor_client.h"
#include "client/exec_pointers.h"

namespace kvsummary {
namespace {

constexpr int kStartAttempts = 50;  // ten seconds of attempts to connect
constexpr auto kStartAttempt = std::chrono::milliseconds(200);
constexpr int kEndMilliseconds = 10'000;  // from SIGTERM to SIGKILL
constexpr std::size_t kLogTailBytes = 2000;

bool IsProgram(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

absl::StatusOr<std::string> FindBinary(const std::string& given) {
  if (!given.empty()) {
    if (IsProgram(given)) return given;
    return absl::NotFoundError(absl::StrCat("cannot run ", given, ": ", std::strerror(errno)));
  }
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (const std::string beside = self.parent_path() / "summaryd"; IsProgram(beside)) return beside;
  const char* path = std::getenv("PATH");
  const std::vector<std::string> folders = absl::StrSplit(path == nullptr ? "" : path, ':');
  for (const std::string& folder : folders) {
    if (std::string candidate = folder + "/summaryd"; IsProgram(candidate)) return candidate;
  }
  return absl::NotFoundError(
      absl::StrCat("there is no summaryd in ", self.parent_path().string(), " or in $PATH"));
}

// In the child, before the program: only calls that a signal handler may make.
void BecomeDaemon(pid_t parent, int log, char* const* arguments) {
  setpgid(0, 0);                     // its own signals, not the terminal's
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // also when the parent is killed
  if (getppid() != parent) _exit(1);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execv(arguments[0], arguments);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<OwnDaemon>> OwnDaemon::Start(const std::string& binary,
                                                            const std::vector<std::string>& flags) {
  const auto found = FindBinary(binary);
  if (!found.ok()) return found.status();
  char folder[] = "/tmp/kvs-XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot make ", folder, ": ", std::strerror(errno)));
  }
  std::unique_ptr<OwnDaemon> daemon(new OwnDaemon(folder));
  if (auto status = daemon->Run(*found, flags); !status.ok()) return status;
  absl::Status status;
  for (int i = 0; i < kStartAttempts && !daemon->HasEnded(); ++i) {
    status = Client::Connect(daemon->address(), {.connect_timeout = kStartAttempt}).status();
    if (status.ok()) return daemon;
  }
  return absl::UnavailableError(
      absl::StrCat(*found, ": ", status.message(), "; the end of its log: ", daemon->LogTail()));
}

bool OwnDaemon::HasEnded() {
  if (waitpid(process_, nullptr, WNOHANG) != process_) return false;
  process_ = -1;
  return true;
}

absl::Status OwnDaemon::Run(const std::string& binary, const std::vector<std::string>& flags) {
  std::vector<std::string> arguments{binary, "--listen=" + address()};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  const std::vector<char*> pointers = ExecPointers(arguments);
  const OwnedDescriptor file(open(log().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!file.valid()) {
    return absl::UnavailableError(absl::StrCat("cannot write ", log(), ": ", std::strerror(errno)));
  }
  const pid_t self = getpid();
  process_ = fork();
  if (process_ == 0) BecomeDaemon(self, file.get(), pointers.data());
  if (process_ > 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot start ", binary, ": ", std::strerror(errno)));
}

OwnDaemon::~OwnDaemon() {
  if (process_ > 0) {
    kill(process_, SIGTERM);
    const OwnedDescriptor end(static_cast<int>(syscall(SYS_pidfd_open, process_, 0)));
    pollfd ended{.fd = end.get(), .events = POLLIN, .revents = 0};
    if (poll(&ended, 1, kEndMilliseconds) <= 0) kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string OwnDaemon::LogTail() const {
  std::ifstream file(log(), std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() > kLogTailBytes) text.erase(0, text.size() - kLogTailBytes);
  return text;
}

}  // namespace kvsummary
