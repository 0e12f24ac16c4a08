// Who has mapped which cache's memory. A generation stops calls, not writes to mapped memory: these records
// tell when the last writer has gone for certain.
//
// A record begins when memory is handed out. It ends when its session releases the memory, or when the
// process whose pidfd came with the request has ended; one without a pidfd (a CUDA IPC handle) ends with its
// session, for nothing better can be known. It keeps the segment, so deleted memory counts against the
// budget until nobody can write to it any more. Not thread-safe: guarded by its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/cache/segment.h"
#include "server/memory/descriptor.h"

namespace kvsummary {

inline constexpr std::size_t kMaxSessionMappings = 256;
// Of all sessions, those that have ended among them: a process that lives on keeps their records.
inline constexpr std::size_t kMaxMappings = 4096;

struct Mapping {
  std::uint64_t session = 0;  // its number
  std::string cache;
  std::uint64_t generation = 0;
  std::shared_ptr<Segment> segment;
  Descriptor pidfd;  // or none
};

class Mappings {
 public:
  Mappings();

  // SESSION_LIMIT beyond the limit of a session or of all; DESCRIPTOR_MISSING when mapping.pidfd is a
  // descriptor but not one of a living process.
  absl::Status Add(Mapping mapping);
  // The session has unmapped what it got of a cache in one generation.
  void Release(std::uint64_t session, const std::string& cache, std::uint64_t generation);
  void EndSession(std::uint64_t session);
  void Clear();
  // Drops the records of processes that have ended.
  void Collect();
  bool IsMapped(const Segment& segment) const;
  // Names of caches, each once.
  std::vector<std::string> CachesOf(std::uint64_t session) const;

  // Is readable while a process with a record has ended and Collect has not been called since. Or after Wake.
  int poll_descriptor() const { return epoll_.get(); }
  void Wake();

 private:
  template <typename Predicate>
  void RemoveIf(Predicate predicate);

  const Descriptor epoll_;
  const Descriptor wake_;  // an eventfd
  std::list<Mapping> mappings_;
};

}  // namespace kvsummary
