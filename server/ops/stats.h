// Counters of what the daemon has done, since its start. Thread-safe; read one by one, so a reader may see
// one counter a step ahead of another.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvsummary {

struct Stats {
  using Counter = std::atomic<std::int64_t>;

  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  Counter decode_steps{0};
  Counter verify_steps{0};
  Counter prefill_steps{0};
  Counter refused_steps{0};
  Counter token_layers{0};       // live rows times layers
  Counter summaries_written{0};  // closed regions times layers
  Counter bytes_read{0};
  Counter bytes_written{0};
  // Hand-offs that came here, and what was sent of those that went.
  Counter handoffs_accepted{0};
  Counter handoffs_failed{0};
  Counter handoff_same_daemon_bytes{0};
  Counter handoff_same_host_bytes{0};
  Counter handoff_ucx_bytes{0};
  Counter handoff_grpc_bytes{0};
  Counter handoff_sent_bytes{0};
  Counter handoff_damaged_chunks{0};
  Counter handoff_reconnects{0};
};

}  // namespace kvsummary
