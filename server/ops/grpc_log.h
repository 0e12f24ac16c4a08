// What gRPC has to say goes into the daemon's log: its errors as warnings, some of them a minute, since
// whoever reaches a TCP port can cause as many as he likes (a port scan, a client without TLS).
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

namespace kvsummary {

// Before gRPC is used.
void TakeGrpcLog();

// Lets kBurst through a minute, and counts the rest. Thread-safe.
class LogLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr int kBurst = 10;

  // How many have been left out before this one, which is to be logged; nothing: it is left out.
  std::optional<std::int64_t> Take(Time now);

 private:
  std::mutex mutex_;
  Time since_;
  int taken_ = 0;
  std::int64_t left_out_ = 0;
};

}  // namespace kvsummary
