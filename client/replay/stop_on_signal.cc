#include "client/replay/stop_on_signal.h"

namespace kvsummary {
namespace {

std::atomic<bool> g_stop = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

}  // namespace

StopOnSignal::StopOnSignal() {
  g_stop = false;
  struct sigaction action = {};
  action.sa_handler = [](int) { g_stop = true; };
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &interrupt_);
  sigaction(SIGTERM, &action, &terminate_);
}

StopOnSignal::~StopOnSignal() {
  sigaction(SIGINT, &interrupt_, nullptr);
  sigaction(SIGTERM, &terminate_, nullptr);
}

const std::atomic<bool>& StopOnSignal::stopped() const { return g_stop; }

}  // namespace kvsummary
