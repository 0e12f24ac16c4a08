// summaryd-ucx NET_DEVICE DEADLINE_MS: the process that UCX runs in. Started by summaryd (ucx_helper.h), of
// no use by itself. Ends when the daemon closes the socket: status 0; 1 when it could not start, 3 when UCX
// left no way to go on.
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "server/ucx/control.h"
#include "server/ucx/memories.h"
#include "server/ucx/source.h"
#include "server/ucx/target.h"
#include "server/ucx/worker.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kWorkBound = 64;  // then the daemon's commands have their turn
// Time without anything to do before it sleeps: waking up costs more, in rate and in CPU time.
constexpr std::chrono::microseconds kAwake{50};

class Helper {
 public:
  Helper(UcxControl& control, milliseconds deadline)
      : control_(control), source_(staging_, control, deadline), target_(landing_, control, deadline) {}

  absl::Status Start(const std::string& net_device) {
    auto worker = UcxWorker::Create(net_device, source_.ConnectionHandler());
    if (!worker.ok()) return worker.status();
    worker_ = *std::move(worker);
    if (absl::Status status = source_.Serve(*worker_); !status.ok()) return status;
    if (absl::Status status = target_.Serve(*worker_); !status.ok()) return status;
    unsigned major = 0, minor = 0, release = 0;
    ucp_get_version(&major, &minor, &release);
    control_.Say(UcxEventKind::kVersion, absl::StrFormat("%d.%d.%d", major, minor, release));
    control_.Say(UcxEventKind::kListening, worker_->address());
    return absl::OkStatus();
  }

  void Run() {
    Clock::time_point awake_until{};
    while (true) {
      bool did = false;
      while (auto received = control_.Receive()) {
        Obey(*std::move(received));
        did = true;
      }
      if (control_.closed()) break;
      control_.SendUnsent();
      if (Work() || did) {
        awake_until = Clock::now() + kAwake;
      } else if (Clock::now() >= awake_until && worker_->Arm()) {
        Wait();
      }
    }
    target_.CloseAll();
    source_.CloseAll();
  }

 private:
  void Obey(UcxControl::Received received) {
    const UcxCommand& command = received.command;
    switch (command.kind) {
      case UcxCommandKind::kAddStaging:
        control_.Answer(command.id, Add(staging_, received));
        break;
      case UcxCommandKind::kAddLanding:
        control_.Answer(command.id, Add(landing_, received));
        break;
      case UcxCommandKind::kLend:
        source_.Lend(command);
        break;
      case UcxCommandKind::kRevoke:
        source_.Revoke(command, Clock::now());
        break;
      case UcxCommandKind::kFetch:
        target_.Fetch(command);
        break;
    }
  }

  // What UCX has to do, up to a bound; whether there was anything. What comes makes room for more requests:
  // they are sent at once, so that the peer does not wait for them.
  bool Work() {
    for (int i = 0; i < kWorkBound; ++i) {
      const bool did = worker_->Progress();
      const Clock::time_point now = Clock::now();
      source_.Pump(now);
      target_.Pump(now);  // may send, so UCX is armed after it
      if (!did) return i > 0;
    }
    return true;
  }

  static absl::Status Add(UcxMemories& memories, UcxControl::Received& received) {
    absl::Status status = memories.Add(received.descriptor.get(), received.command.bytes);
    received.descriptor = Descriptor();  // before the daemon has its answer
    return status;
  }

  void Wait() {
    int timeout = -1;
    if (const auto next = std::min(source_.NextDeadline(), target_.NextDeadline());
        next != Clock::time_point::max()) {
      timeout = static_cast<int>(
          std::max<std::int64_t>(0, std::chrono::ceil<milliseconds>(next - Clock::now()).count()));
    }
    pollfd polled[2] = {
        {worker_->event_fd(), POLLIN, 0},
        {control_.fd(), static_cast<short>(control_.has_unsent() ? POLLIN | POLLOUT : POLLIN), 0}};
    (void)poll(polled, 2, timeout);
  }

  UcxControl& control_;
  UcxMemories staging_{PROT_READ};
  UcxMemories landing_{PROT_READ | PROT_WRITE};
  UcxSource source_;
  UcxTarget target_;
  std::unique_ptr<UcxWorker> worker_;  // goes first: its callbacks are the others'
};

int Main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: summaryd starts summaryd-ucx; it does nothing by itself\n");
    return 2;
  }
  // A terminal's and a service manager's signals are the daemon's: it drains first, and then closes the
  // socket.
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  UcxControl control(kUcxControlFd);
  Helper helper(control, milliseconds(std::atoi(argv[2])));
  if (absl::Status started = helper.Start(argv[1]); !started.ok()) {
    control.Refuse(started);
    return 1;
  }
  helper.Run();
  return 0;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) { return kvsummary::Main(argc, argv); }
