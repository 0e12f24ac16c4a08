// Checks of a running daemon, with worker processes.
//
//   used   [--device=cuda:N]                                      prints the bytes in use of the GPU
//
//   memory [--device=cuda:N] --before-bytes=N                     N as `used` has printed before the daemon
//                                                                 started
//
//   kills  [--device=cuda:N] --daemon-pid=N [--kills=N] [--goal-ms=N]
//
//   hold   NAME=DEVICE...                                         until its input ends
//
// The daemon: $SUMMARYD_ADDRESS. Exit status 0 passed, 1 failed, 2 wrong usage.
#include "tests/gpu/daemon_check.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "client/status.h"
#include "server/device/nvml.h"

namespace kvsummary::gpu {

int Fail(const char* what, const absl::Status& status) {
  std::printf("FAIL %s: %s\n", what, Describe(status).c_str());
  return 1;
}

long long UsedGpuBytes(Client& client, const std::string& device) {
  const auto info = client.GetServerInfo();
  if (!info.ok()) return -1;
  for (const DeviceInfo& d : info->devices) {
    if (d.name == device && !d.uuid.empty()) return NvmlUsedBytes(d.uuid).value_or(-1);
  }
  return -1;
}

namespace {

int Usage() {
  std::fprintf(stderr,
               "usage: daemon_check used|memory|kills|hold [--device=cuda:N] ... (see daemon_check.cc)\n");
  return 2;
}

// nvidia-smi's word, for a daemon is not needed then.
int PrintUsed() {
  std::FILE* smi = popen("nvidia-smi --query-gpu=uuid --format=csv,noheader", "r");
  char uuid[128] = "";
  if (smi == nullptr || std::fgets(uuid, sizeof(uuid), smi) == nullptr) {
    std::fprintf(stderr, "daemon_check: nvidia-smi names no GPU\n");
    return 1;
  }
  pclose(smi);
  const std::string_view line(uuid);
  const auto used = NvmlUsedBytes(std::string(line.substr(0, line.find('\n'))));
  if (!used) {
    std::fprintf(stderr, "daemon_check: libnvidia-ml does not tell the memory of %s\n", uuid);
    return 1;
  }
  std::printf("%lld\n", static_cast<long long>(*used));
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 2) return Usage();
  const std::string command = argv[1];
  CheckOptions options;
  options.program = "/proc/self/exe";
  if (const char* address = std::getenv("SUMMARYD_ADDRESS")) options.address = address;
  std::vector<std::string> words;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](std::string_view flag) {
      return argument.rfind(flag, 0) == 0 ? argument.c_str() + flag.size() : nullptr;
    };
    if (const char* v = value("--device=")) {
      options.device = v;
    } else if (const char* v = value("--daemon-pid=")) {
      options.daemon_pid = std::atoi(v);
    } else if (const char* v = value("--kills=")) {
      options.kills = std::atoi(v);
    } else if (const char* v = value("--goal-ms=")) {
      options.goal_ms = std::atof(v);
    } else if (const char* v = value("--before-bytes=")) {
      options.before_bytes = std::atoll(v);
    } else {
      words.push_back(argument);
    }
  }
  if (command == "used") return PrintUsed();
  if (command == "memory" && words.empty()) return CheckMemory(options);
  if (command == "kills" && words.empty() && options.daemon_pid > 0) return CheckKills(options);
  if (command == "worker" && words.size() == 2)
    return RunWorker(options, words[0], std::atoi(words[1].c_str()));
  if (command == "hold" && !words.empty()) return HoldSession(options, words);
  return Usage();
}

}  // namespace
}  // namespace kvsummary::gpu

int main(int argc, char** argv) { return kvsummary::gpu::Main(argc, argv); }
