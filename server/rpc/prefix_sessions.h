// What PrefixService remembers of sessions: the namespaces that they use, where their caches keep pages, and
// the publishes that they may repeat. All of it ends with the session. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cache/cache.h"
#include "server/rpc/remembered_calls.h"
#include "server/session/buffer.h"
#include "server/store/types.h"

namespace kvsummary {

class PrefixSessions {
 public:
  // A cache's views. It does not keep the memory: what uses it does.
  struct Binding {
    std::shared_ptr<const BoundCache> views;
    std::weak_ptr<Cache> cache;
    std::vector<std::weak_ptr<Buffer>> buffers;
  };

  // A session's first use of a namespace creates what is remembered of it: whoever calls this calls
  // EndSession when, or after, the session ends. Without it all other calls answer NAMESPACE_NOT_FOUND.
  void Declare(std::uint64_t session, NamespaceId name_space, std::vector<GroupSpec> groups);
  absl::StatusOr<std::vector<GroupSpec>> Groups(std::uint64_t session, NamespaceId name_space) const;
  void EndSession(std::uint64_t session);

  // Replaces what was bound of this cache before, and forgets caches that are no more.
  absl::Status Bind(std::uint64_t session, NamespaceId name_space, Binding binding);
  // The views, with a hold on the memory. CACHE_NOT_BOUND; BUFFER_NOT_FOUND when a buffer of theirs is no
  // longer registered.
  absl::StatusOr<std::shared_ptr<const BoundCache>> FindBound(std::uint64_t session, NamespaceId name_space,
                                                              const std::shared_ptr<Cache>& cache) const;

  // The result of the publish that had this id, if it is remembered and has ended.
  std::optional<PublishResult> FindPublished(std::uint64_t session, NamespaceId name_space,
                                             std::uint64_t request_id) const;
  // Begins the publish of an id: nothing, or the result of the one that had this id before.
  // REQUEST_UNDER_WAY. Id 0 is never remembered.
  absl::StatusOr<std::optional<PublishResult>> BeginPublish(std::uint64_t session, NamespaceId name_space,
                                                            std::uint64_t request_id);
  // One that failed is forgotten: it has changed nothing and may be tried again.
  void EndPublish(std::uint64_t session, std::uint64_t request_id,
                  const absl::StatusOr<PublishResult>& result);

 private:
  struct Entry {
    std::map<NamespaceId, std::vector<GroupSpec>> namespaces;
    std::map<std::tuple<NamespaceId, std::string, std::uint64_t>, Binding> bindings;  // by cache, generation
  };

  // Whether the session has declared the namespace. With mutex_ held.
  absl::Status CheckLocked(std::uint64_t session, NamespaceId name_space) const;

  mutable std::mutex mutex_;
  std::map<std::uint64_t, Entry> sessions_;
  RememberedCalls<PublishResult>
      publishes_;  // begun and forgotten with mutex_ held: of declared sessions alone
};

}  // namespace kvsummary
