#include "server/rpc/prefix_sessions.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

// Keeps a binding's memory while something uses it.
struct Hold {
  std::shared_ptr<const BoundCache> views;
  std::shared_ptr<Cache> cache;
  std::vector<std::shared_ptr<Buffer>> buffers;
};

}  // namespace

void PrefixSessions::Declare(std::uint64_t session, NamespaceId name_space, std::vector<GroupSpec> groups) {
  std::lock_guard lock(mutex_);
  sessions_[session].namespaces[name_space] = std::move(groups);
}

absl::Status PrefixSessions::CheckLocked(std::uint64_t session, NamespaceId name_space) const {
  const auto it = sessions_.find(session);
  if (it != sessions_.end() && it->second.namespaces.contains(name_space)) return absl::OkStatus();
  return Refuse(
      Reason::NAMESPACE_NOT_FOUND, "namespace_id",
      absl::StrFormat("the session has declared no namespace %d", static_cast<std::uint64_t>(name_space)));
}

absl::StatusOr<std::vector<GroupSpec>> PrefixSessions::Groups(std::uint64_t session,
                                                              NamespaceId name_space) const {
  std::lock_guard lock(mutex_);
  if (auto s = CheckLocked(session, name_space); !s.ok()) return s;
  return sessions_.at(session).namespaces.at(name_space);
}

void PrefixSessions::EndSession(std::uint64_t session) {
  std::lock_guard lock(mutex_);
  sessions_.erase(session);
}

absl::Status PrefixSessions::Bind(std::uint64_t session, NamespaceId name_space, Binding binding) {
  const auto cache = binding.cache.lock();
  if (cache == nullptr) return absl::OkStatus();  // deleted meanwhile: as if it had been so after the call
  std::lock_guard lock(mutex_);
  if (auto s = CheckLocked(session, name_space); !s.ok()) return s;
  auto& bindings = sessions_.at(session).bindings;
  std::erase_if(bindings, [](const auto& bound) { return bound.second.cache.expired(); });
  bindings[{name_space, cache->name(), cache->generation()}] = std::move(binding);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const BoundCache>> PrefixSessions::FindBound(
    std::uint64_t session, NamespaceId name_space, const std::shared_ptr<Cache>& cache) const {
  std::lock_guard lock(mutex_);
  if (auto s = CheckLocked(session, name_space); !s.ok()) return s;
  const auto& bindings = sessions_.at(session).bindings;
  const auto bound = bindings.find({name_space, cache->name(), cache->generation()});
  if (bound == bindings.end()) {
    return Refuse(
        Reason::CACHE_NOT_BOUND, "cache",
        absl::StrFormat("the session has not bound cache \"%s\", in generation %d, to namespace %d",
                        cache->name(), cache->generation(), static_cast<std::uint64_t>(name_space)));
  }
  auto hold = std::make_shared<Hold>(Hold{bound->second.views, cache, {}});
  for (const auto& buffer : bound->second.buffers) {
    hold->buffers.push_back(buffer.lock());
    if (hold->buffers.back() == nullptr) {
      return Refuse(Reason::BUFFER_NOT_FOUND, "cache",
                    absl::StrFormat("a buffer that cache \"%s\" is bound with is not registered any more",
                                    cache->name()));
    }
  }
  const BoundCache* views = hold->views.get();
  return std::shared_ptr<const BoundCache>(std::move(hold), views);
}

std::optional<PublishResult> PrefixSessions::FindPublished(std::uint64_t session, NamespaceId name_space,
                                                           std::uint64_t request_id) const {
  std::lock_guard lock(mutex_);
  if (!CheckLocked(session, name_space).ok()) return std::nullopt;
  return publishes_.Find(session, request_id);
}

absl::StatusOr<std::optional<PublishResult>> PrefixSessions::BeginPublish(std::uint64_t session,
                                                                          NamespaceId name_space,
                                                                          std::uint64_t request_id) {
  if (request_id == 0) return std::nullopt;
  std::lock_guard lock(mutex_);
  if (auto s = CheckLocked(session, name_space); !s.ok()) return s;
  return publishes_.Begin(session, request_id);
}

void PrefixSessions::EndPublish(std::uint64_t session, std::uint64_t request_id,
                                const absl::StatusOr<PublishResult>& result) {
  publishes_.End(session, request_id, result);
}

}  // namespace kvsummary
