#include "server/store/page_store_impl.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kPagesToTouch = 16384;  // what lookups leave to the store's thread

#ifndef NDEBUG
constexpr std::int64_t kMaxCheckedPages = 2048;  // beyond it a check after every call would take too long
#endif

}  // namespace

absl::StatusOr<std::uint64_t> EventListeners::Add(std::uint64_t session, NamespaceId name_space,
                                                  std::function<void()> listener) {
  auto added = std::make_shared<Listener>();
  added->session = session;
  added->name_space = name_space;
  added->call = std::move(listener);
  std::lock_guard lock(mutex_);
  int& count = counts_[session];
  if (count >= kMaxListenersPerSession) {
    return Refuse(Reason::SESSION_LIMIT, "session_id",
                  absl::StrFormat("the session watches the events of namespaces %d times already", count));
  }
  ++count;
  listeners_.emplace(next_, std::move(added));
  return next_++;
}

void EventListeners::Remove(std::uint64_t id) {
  std::shared_ptr<Listener> removed;
  {
    std::lock_guard lock(mutex_);
    const auto found = listeners_.find(id);
    if (found == listeners_.end()) return;
    removed = std::move(found->second);
    listeners_.erase(found);
    const auto count = counts_.find(removed->session);
    if (--count->second == 0) counts_.erase(count);
  }
  std::lock_guard lock(removed->mutex);
  removed->call = nullptr;
}

void EventListeners::Call(const std::vector<NamespaceId>& changed) {
  if (changed.empty()) return;
  std::vector<std::shared_ptr<Listener>> called;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, listener] : listeners_) {
      if (std::binary_search(changed.begin(), changed.end(), listener->name_space))
        called.push_back(listener);
    }
  }
  for (const auto& listener : called) {
    std::lock_guard lock(listener->mutex);
    if (const auto call = listener->call) call();  // a copy: it may remove itself
  }
}

void PageStore::Impl::Unlock(std::unique_lock<std::mutex>& lock) {
  QueueDemotions();
#ifndef NDEBUG
  if (const StoreStats stats = catalog.stats(); stats.pages <= kMaxCheckedPages) {
    const std::vector<std::string> problems = catalog.Check();
    for (const std::string& problem : problems) std::fprintf(stderr, "page store: %s\n", problem.c_str());
    if (!problems.empty()) std::abort();
  }
#endif
  const std::vector<NamespaceId> changed = catalog.TakeChanged();
  lock.unlock();
  listeners.Call(changed);
}

void PageStore::Impl::QueueTouches() {
  if (touches_queued || catalog.pages_to_touch() < kPagesToTouch) return;
  touches_queued = true;
  ++operations;
  thread.SubmitFree([this] {
    bool more = true;
    while (more) {
      std::lock_guard lock(mutex);
      more = catalog.ApplySomeTouches();
      touches_queued = more;
    }
    EndOwnOperation();
  });
}

absl::Status PageStore::Impl::BeginOperation(std::uint64_t session) {
  if (operations >= kMaxStoreOperations) {
    return Refuse(Reason::QUEUE_FULL, "",
                  absl::StrFormat("the store has %d operations under way", operations));
  }
  const auto of_session = session_operations.try_emplace(session).first;
  if (of_session->second >= kMaxStoreOperationsPerSession) {
    return Refuse(
        Reason::QUEUE_FULL, "session_id",
        absl::StrFormat("the session has %d operations of the store under way", of_session->second));
  }
  ++of_session->second;
  ++operations;
  return absl::OkStatus();
}

void PageStore::Impl::AbandonOperation(std::uint64_t session) {
  const auto of_session = session_operations.find(session);
  if (--of_session->second == 0) session_operations.erase(of_session);
  --operations;
  idle.notify_all();
}

void PageStore::Impl::EndOperation(std::uint64_t session) {
  std::lock_guard lock(mutex);
  AbandonOperation(session);
}

void PageStore::Impl::EndOwnOperation() {
  std::lock_guard lock(mutex);
  --operations;
  idle.notify_all();
}

}  // namespace kvsummary
