// A replayed engine's prefixes in the page store of the daemon.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "client/replay/engine.h"
#include "client/replay/prefix_store.h"
#include "client/replay/trace.h"
#include "client/session.h"

namespace kvsummary {

// What all engines of a replay have ever published: a store without bounds. Thread-safe.
class SeenBlocks {
 public:
  void Add(std::span<const std::uint64_t> keys);
  // How many of them, from the first on, have been added.
  std::int64_t Leading(std::span<const std::uint64_t> keys) const;

 private:
  mutable std::mutex mutex_;
  absl::flat_hash_set<std::uint64_t> keys_;
};

// The namespace of replays with these rows: only they have the same bytes.
Namespace ReplayNamespace(const CacheGeometry& geometry, std::uint64_t seed);

class SessionPrefixes final : public PrefixStore {
 public:
  // Declares the namespace and binds the cache. All arguments must outlive it.
  static absl::StatusOr<SessionPrefixes> Open(ClientSession& session, const Cache& cache,
                                              std::span<const TraceRequest> requests, std::uint64_t seed,
                                              SeenBlocks& seen);

  absl::StatusOr<FoundPrefix> Find(std::int64_t request) override;
  absl::StatusOr<std::int64_t> Load(std::span<const std::int64_t> blocks) override;
  absl::Status Drop() override;
  absl::Status Publish(const PublishedBlocks& published) override;

  // Once the engine has stopped.
  const PrefixReport& report() const { return report_; }

 private:
  SessionPrefixes(ClientSession& session, const Cache& cache, std::span<const TraceRequest> requests,
                  SeenBlocks& seen, std::uint64_t namespace_id)
      : session_(&session), cache_(&cache), requests_(requests), seen_(&seen), namespace_(namespace_id) {}

  // Keys of blocks [first, first + count) of a request, and their hashes.
  std::vector<std::uint64_t> Keys(std::int64_t request, std::int64_t first, std::int64_t count) const;
  static std::string Hashes(std::span<const std::uint64_t> keys);

  ClientSession* session_;
  const Cache* cache_;
  std::span<const TraceRequest> requests_;
  SeenBlocks* seen_;
  std::uint64_t namespace_;
  std::uint64_t lease_ = 0;
  PrefixReport report_{.engines = 1};
};

}  // namespace kvsummary
