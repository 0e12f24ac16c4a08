// What PageStore is made of: one lock over the catalog, the tiers' memory, and the steps of what takes time.
//
// A step runs on the executor of the device whose memory it moves, or, where the host has to read pages (for
// checksums), on the store's own thread. A step ends by queueing the next one or by committing. What is to
// move pages is queued with the lock held: so the devices do it in the order in which the catalog decided it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "server/device/executor.h"
#include "server/store/catalog.h"
#include "server/store/checksummer.h"
#include "server/store/page_store.h"
#include "server/store/tier_memory.h"

namespace kvsummary {

// Who wants to hear of new events. Thread-safe.
class EventListeners {
 public:
  // SESSION_LIMIT beyond kMaxListenersPerSession.
  absl::StatusOr<std::uint64_t> Add(std::uint64_t session, NamespaceId name_space,
                                    std::function<void()> listener);
  // Not while a listener is being called by another thread.
  void Remove(std::uint64_t id);
  void Call(const std::vector<NamespaceId>& changed);

 private:
  struct Listener {
    std::recursive_mutex mutex;  // a listener may remove itself
    std::uint64_t session = 0;
    NamespaceId name_space{};
    std::function<void()> call;  // null: removed
  };

  std::mutex mutex_;
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Listener>> listeners_;
  std::map<std::uint64_t, int> counts_;  // by session
};

struct PageStore::Impl {
  struct Publishing {
    PublishPlan plan;
    PublishDone done;
    absl::Status status;
  };
  struct Loading {
    LoadPlan plan;
    LoadDone done;
    absl::Status status;  // of the step that moves pages
    std::atomic<std::size_t> steps =
        0;  // on executors, to be done before pages of the host tier are looked at

    void Add(const TierMemory::Moved& moved) {
      status.Update(moved.status());
      if (moved.ok()) plan.result.device_time += *moved;
    }
  };
  // Units or blocks, one for one.
  struct Moves {
    std::vector<std::int64_t> from;
    std::vector<std::int64_t> to;
  };
  struct Demoting {
    std::vector<Demotion> pages;  // of one upper tier
    absl::Status status;
  };

  Impl(std::unique_ptr<TierMemory> tiers, const Options& o);

  // Calls call() with the lock held, queues what it has decided to copy down, and tells the listeners.
  template <typename Call>
  auto Locked(Call call) {
    std::unique_lock lock(mutex);
    if constexpr (std::is_void_v<std::invoke_result_t<Call>>) {
      call();
      Unlock(lock);
    } else {
      auto result = call();
      Unlock(lock);
      return result;
    }
  }
  void Unlock(std::unique_lock<std::mutex>& lock);

  // With the lock held.
  // A session's operation. QUEUE_FULL.
  absl::Status BeginOperation(std::uint64_t session);
  void AbandonOperation(std::uint64_t session);
  void QueueDemotions();
  void QueueTouches();
  // The last use of this by a session's operation, and by one of the store's own.
  void EndOperation(std::uint64_t session);
  void EndOwnOperation();

  // publish.cc
  void RunPublish(const std::shared_ptr<Publishing>& op);    // executor
  void SumPublished(const std::shared_ptr<Publishing>& op);  // store's thread
  void EndPublish(Publishing& op);

  // load.cc
  void QueueLoad(const std::shared_ptr<Loading>& op);   // with the lock held
  void VerifyLoad(const std::shared_ptr<Loading>& op);  // store's thread
  template <typename UnitOf>
  void MoveToCache(Loading& op, std::uint8_t tier, UnitOf unit_of);
  void CheckStillWanted(Loading& op);
  void MoveUpper(Loading& op);  // executor
  void MoveHost(Loading& op);   // executor
  void EndLoad(Loading& op);

  // demote.cc
  void RunDemotions(const std::shared_ptr<Demoting>& op);  // executor
  void EndDemotions(Demoting& op);                         // store's thread

  const Options options;
  const std::unique_ptr<TierMemory> memory;
  EventListeners listeners;
  std::mutex mutex;
  std::condition_variable idle;
  std::int64_t operations = 0;                      // under way: they use this
  std::map<std::uint64_t, int> session_operations;  // those of sessions
  bool touches_queued = false;
  Catalog catalog;
  Checksummer checksummer;   // for `thread`
  Executor thread{"store"};  // last: it ends first
};

}  // namespace kvsummary
