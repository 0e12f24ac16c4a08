// What the services share.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "absl/status/status.h"
#include "server/cache/cache.h"
#include "server/ops/stats.h"

namespace kvsummary {

// Turns new work away while the daemon ends. Thread-safe.
class Drain {
 public:
  // OK, or DRAINING from Begin on.
  absl::Status Check() const;
  // From now on Check refuses, and every listener is told.
  void Begin();

  // Calls `listener` at Begin, at once when that has been; not any more once Forget has returned.
  void Listen(const void* key, std::function<void()> listener);
  void Forget(const void* key);

 private:
  mutable std::mutex mutex_;
  bool draining_ = false;
  std::map<const void*, std::function<void()>> listeners_;
};

struct ServiceContext {
  CacheManager& caches;
  Stats& stats;
  Drain& drain;
};

}  // namespace kvsummary
