// Caches by name: an engine's pages and rings in the memory of one device, and the work done on them.
//
// A cache lives from Create to Delete under one generation. Work on it is queued on its device's executor
// and done in the order in which it was queued; whoever holds the shared pointer keeps the memory, so only
// queued work holds it for longer than a moment. Whoever lets go of a cache last, its memory is freed on
// the executor. Generations rise, also over restarts of the daemon
// (they start at the clock's microseconds), so a late call of an earlier life never meets a later one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layout.h"
#include "server/device/device.h"

namespace kvsummary {

class Cache {
 public:
  Cache(std::string name, std::uint64_t generation, CacheGeometry geometry, Device& device,
        Budget::Reservation reservation, std::unique_ptr<Memory> memory);

  const std::string& name() const { return name_; }
  std::uint64_t generation() const { return generation_; }
  const CacheGeometry& geometry() const { return geometry_; }
  Device& device() const { return device_; }

  // (executor) Applies a validated step to layers.
  absl::Status Apply(LayerSpan layers, const Step& step);
  // (executor) Pages and tails, as `pieces` of PagePieces or TailPieces.
  absl::Status CopyOut(std::span<const Piece> pieces, char* host);
  absl::Status CopyIn(std::span<const Piece> pieces, const char* host);

 private:
  friend class CacheManager;
  struct OnFreed {
    absl::AnyInvocable<void()> call;
    ~OnFreed() {
      if (call) call();
    }
  };

  OnFreed on_freed_;  // destroyed last; written by Delete, once
  const std::string name_;
  const std::uint64_t generation_;
  const CacheGeometry geometry_;
  Device& device_;
  const Budget::Reservation reservation_;  // outlives memory_
  const std::unique_ptr<Memory> memory_;
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

  // `devices`: at least the host. The first usable CUDA device, or else the host, is the default.
  explicit CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation);
  // Finishes what is queued. No call may come any more.
  ~CacheManager();

  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  Device& default_device() const { return *default_device_; }

  // Makes a cache and calls `done` with it, or with a refusal and nothing kept. `device` empty: the default.
  // Nothing is made when `cancelled` says that nobody waits any more. `done` may run before Create returns.
  void Create(const std::string& name, const std::string& device, const CacheGeometry& geometry,
              absl::AnyInvocable<bool()> cancelled, absl::AnyInvocable<void(CacheOr)> done);
  CacheOr Find(const std::string& name) const;
  // As Find; GENERATION_STALE when the cache has another generation.
  CacheOr Find(const std::string& name, std::uint64_t generation) const;
  // By name.
  std::vector<std::shared_ptr<Cache>> List() const;
  // Forgets a cache at once, and calls `done` when the work that was queued on it is done and its memory is
  // free.
  void Delete(const std::string& name, std::uint64_t generation, absl::AnyInvocable<void(absl::Status)> done);

 private:
  absl::StatusOr<Device*> FindDevice(const std::string& name) const;
  CacheOr MakeOnExecutor(const std::string& name, Device& device, const CacheGeometry& geometry,
                         absl::AnyInvocable<bool()>& cancelled);
  void Forget(const std::string& name);

  const std::vector<std::unique_ptr<Device>> devices_;
  Device* default_device_;
  mutable std::mutex mutex_;
  std::uint64_t next_generation_;
  // A null pointer holds the name of a cache that is being made.
  std::map<std::string, std::shared_ptr<Cache>> caches_;
};

}  // namespace kvsummary
