// Frees what a CacheManager keeps for a time only: caches whose grace is over, memory whose mappers have
// ended.
#pragma once

#include <thread>

#include "server/cache/cache.h"
#include "server/memory/descriptor.h"

namespace kvsummary {

// One thread, which sleeps until there is something to do.
class Reaper {
 public:
  // `caches` must outlive it.
  explicit Reaper(CacheManager& caches);
  ~Reaper();
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

 private:
  void Run();

  CacheManager& caches_;
  const Descriptor stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace kvsummary
