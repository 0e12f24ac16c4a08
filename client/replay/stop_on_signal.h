// How a command that runs long is ended early: by SIGINT or SIGTERM.
#pragma once

#include <atomic>
#include <csignal>

namespace kvsummary {

inline constexpr int kInterrupted = 130;  // exit code, as shells say it of a program that SIGINT ended

// While it lives, the signals set `stopped`, at first false. One at a time.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  const std::atomic<bool>& stopped() const;

 private:
  struct sigaction interrupt_ = {};
  struct sigaction terminate_ = {};
};

}  // namespace kvsummary
