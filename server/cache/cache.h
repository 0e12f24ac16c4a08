// Caches by name: an engine's pages and rings in the memory of one device, and the work done on them.
//
// A cache lives from Create to Delete. Work on it is queued on its device's executor and done in the order in
// which it was queued; whoever holds the shared pointer keeps the memory, so only queued work holds it for
// longer than a moment. Whoever lets go last, the memory is freed on the executor.
//
// A cache belongs to the session that made or attached it, or to the operator (session 0). The end of its
// session detaches it: it is kept for the grace time, in which Attach gives it to another session as a new
// Cache of the same memory and a higher generation. Generations rise, also over restarts of the daemon (they
// start at the clock's microseconds), so a late call of an earlier life never meets a later one: work on it
// that was queued is done when Attach answers, and what comes later is refused.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layout.h"
#include "server/cache/mappings.h"
#include "server/cache/segment.h"
#include "server/device/device.h"

namespace kvsummary {

class Cache {
 public:
  Cache(std::string name, std::uint64_t generation, CacheGeometry geometry, Device& device,
        std::shared_ptr<Segment> segment, std::uint64_t session);

  const std::string& name() const { return name_; }
  std::uint64_t generation() const { return generation_; }
  const CacheGeometry& geometry() const { return geometry_; }
  Device& device() const { return device_; }
  const Memory& memory() const { return segment_->memory(); }
  // Number of the session that it belongs to; 0: the operator.
  std::uint64_t session() const { return session_; }
  // Whether that session lives. Always, for the operator's.
  bool attached() const { return attached_; }

  // For who holds it longer than a moment, and must let go then: calls `listener` when it is deleted; at once
  // when it has been. `key` is for Forget; a listener that is being called then may still be.
  void OnDeleted(const void* key, std::function<void()> listener);
  void Forget(const void* key);

  // (executor) Whether its memory may be read and written: of the device, and of this life of the cache.
  absl::Status health() const;
  // (executor) Applies a validated step to layers.
  absl::Status Apply(LayerSpan layers, const Step& step, RowsIn rows_in);
  // (executor) Pages and tails, as `pieces` of PagePieces or TailPieces.
  absl::Status CopyOut(std::span<const Piece> pieces, char* host);
  absl::Status CopyIn(std::span<const Piece> pieces, const char* host);

 private:
  friend class CacheManager;
  struct OnDropped {
    absl::AnyInvocable<void()> call;
    ~OnDropped() {
      if (call) call();
    }
  };

  void TellDeleted();

  OnDropped on_dropped_;  // destroyed last; written by Delete, once
  const std::string name_;
  const std::uint64_t generation_;
  const CacheGeometry geometry_;
  Device& device_;
  const std::shared_ptr<Segment> segment_;
  const std::uint64_t session_;
  std::atomic<bool> attached_ = true;
  std::atomic<bool> superseded_ = false;  // by a later life, which has the memory now
  std::mutex listeners_mutex_;
  bool deleted_ = false;
  std::map<const void*, std::function<void()>> listeners_;
};

// Where the pages of one block, or the `capacity` rows of one ring block, of some layers lie. One piece
// where they are contiguous.
void AppendPagePieces(const CacheGeometry& geometry, std::int64_t block, LayerSpan layers,
                      std::vector<Piece>& pieces);
void AppendTailPieces(const CacheGeometry& geometry, std::int64_t ring_block, LayerSpan layers,
                      std::vector<Piece>& pieces);

class CacheManager {
 public:
  using CacheOr = absl::StatusOr<std::shared_ptr<Cache>>;
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::chrono::seconds grace{600};  // how long a detached cache is kept
    std::function<Clock::time_point()> now = Clock::now;
  };

  // What Create makes.
  struct Wanted {
    std::string name;
    std::string device;  // empty: the default
    CacheGeometry geometry;
    MemoryKind kind = MemoryKind::kDefault;
    std::uint64_t session = 0;  // 0: the operator
  };

  // What MapMemory hands out.
  struct Mapped {
    Descriptor descriptor;   // of memory that has one; the caller's
    std::string ipc_handle;  // of other memory
    std::int64_t bytes = 0;
  };

  // `devices`: at least the host. The first usable CUDA device, or else the host, is the default.
  CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation, Options options);
  CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation);
  // Finishes what is queued. No call may come any more, and no shared pointer to a cache be left.
  ~CacheManager();

  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  Device& default_device() const { return *default_device_; }

  // Makes a cache and calls `done` with it, or with a refusal and nothing kept. Nothing is made when
  // `cancelled` says that nobody waits any more. `done` may run before Create returns.
  void Create(Wanted wanted, absl::AnyInvocable<bool()> cancelled, absl::AnyInvocable<void(CacheOr)> done);
  // Gives a detached cache to a session under a new generation, and calls `done` with it once no work of an
  // earlier life is under way: who maps the memory then has it to himself. CACHE_IN_USE, CACHE_STILL_MAPPED.
  void Attach(const std::string& name, std::uint64_t session, absl::AnyInvocable<void(CacheOr)> done);
  // Detaches the session's caches. Idempotent; whoever gives a session something calls it when (or after) the
  // session ends.
  void EndSession(std::uint64_t session);
  CacheOr Find(const std::string& name) const;
  // As Find; GENERATION_STALE when the cache has another generation.
  CacheOr Find(const std::string& name, std::uint64_t generation) const;
  // By name.
  std::vector<std::shared_ptr<Cache>> List() const;
  // Forgets a cache at once, and calls `done` when the work that was queued on it is done and its memory is
  // free (unless a process has it mapped: then as soon as that ends).
  void Delete(const std::string& name, std::uint64_t generation, absl::AnyInvocable<void(absl::Status)> done);

  // A cache that the session may map: its own or the operator's. CACHE_NOT_YOURS.
  CacheOr FindMappable(const std::string& name, std::uint64_t generation, std::uint64_t session) const;
  // Hands out the memory of one and records it. `pidfd` is of the process that maps it; none for an IPC
  // handle.
  absl::StatusOr<Mapped> MapMemory(const std::string& name, std::uint64_t generation, std::uint64_t session,
                                   Descriptor pidfd);
  void ReleaseMemory(const std::string& name, std::uint64_t generation, std::uint64_t session);
  // Names of caches that the session has mapped.
  std::vector<std::string> MappedBy(std::uint64_t session) const;
  // Whether the IPC handle is one that MapMemory gives out.
  bool IsOwnIpcHandle(const std::string& handle) const;

  // Called when a cache of a living session is deleted, with its last generation. At most one listener.
  using LostListener =
      std::function<void(std::uint64_t session, const std::string& name, std::uint64_t generation)>;
  void set_on_lost(LostListener listener);

  // Frees detached caches whose time is over and memory whose mappers have ended; answers how long until the
  // next cache's time is. To be called then, and when the descriptor is readable (see Reaper).
  std::optional<Clock::duration> Reap();
  int reap_descriptor() const { return mappings_.poll_descriptor(); }

 private:
  struct Entry {
    std::shared_ptr<Cache> cache;                          // null: being made
    Clock::time_point expires = Clock::time_point::max();  // earlier: detached
  };

  absl::StatusOr<Device*> FindDevice(const std::string& name) const;
  CacheOr MakeOnExecutor(const Wanted& wanted, Device& device, absl::AnyInvocable<bool()>& cancelled);
  void Forget(const std::string& name);
  // With mutex_ held.
  CacheOr AttachLocked(const std::string& name, std::uint64_t session);
  CacheOr FindLocked(const std::string& name) const;
  CacheOr FindLocked(const std::string& name, std::uint64_t generation) const;
  CacheOr FindMappableLocked(const std::string& name, std::uint64_t generation, std::uint64_t session) const;

  const std::vector<std::unique_ptr<Device>> devices_;
  const Options options_;
  Device* default_device_;
  mutable std::mutex mutex_;
  std::uint64_t next_generation_;
  std::map<std::string, Entry> caches_;
  Mappings mappings_;
  LostListener on_lost_;
};

}  // namespace kvsummary
