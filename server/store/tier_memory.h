// The memory of the store's tiers, and movement between it and caches.
//
// A tier is addressed as a set of pages (kernels/copy.h) whose block ids are units of 256 bytes: so pages of
// one size, anywhere in it, are one launch's source or destination, whatever the views on the other side.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/store/slot_allocator.h"
#include "server/store/types.h"

namespace kvsummary {

class TierMemory {
 public:
  using Moved = absl::StatusOr<std::chrono::nanoseconds>;  // as of Device::MovePages
  using Ids = std::span<const std::int64_t>;

  // Takes `host_bytes` for the host tier, tier 0. Tiers 1, 2, ... of device_bytes each, unless that is 0, are
  // for the CUDA devices, or for the host where there are none. `devices` must outlive the result.
  // COUNT_OUT_OF_RANGE beyond what movements can address, some 512 GiB a tier.
  static absl::StatusOr<std::unique_ptr<TierMemory>> Make(const std::vector<std::unique_ptr<Device>>& devices,
                                                          std::int64_t host_bytes, std::int64_t device_bytes);
  // Frees upper tiers on their devices' executors, behind what is queued there.
  ~TierMemory();

  std::size_t tier_count() const { return tiers_.size(); }
  std::int64_t capacity_bytes(std::size_t tier) const { return tiers_[tier].capacity_bytes; }
  Device& device(std::size_t tier) const { return *tiers_[tier].device; }
  bool Has(const Device* device) const;

  // (executor) Makes the device ready to move pages of its own tier and of the host's; does nothing once it
  // has succeeded. MEMORY_BUDGET_EXCEEDED, OUT_OF_MEMORY, or what the device fails with.
  absl::Status Prepare(Device& device);

  // (executor) Move pages between a group's blocks of a cache and a tier, or between tiers: the host's and
  // the device's own.
  Moved FromCache(const BoundCache& cache, int group, Ids blocks, std::size_t tier, Ids units) const;
  Moved ToCache(std::size_t tier, Ids units, const BoundCache& cache, int group, Ids blocks) const;
  Moved Between(Device& device, std::int64_t page_bytes, std::size_t from, Ids from_units, std::size_t to,
                Ids to_units) const;

  // A page of the host tier.
  char* HostPage(Unit unit) const { return tiers_[0].base + std::int64_t{unit} * kPageUnit; }

 private:
  struct Tier {
    Device* device = nullptr;
    std::int64_t capacity_bytes = 0;
    Budget::Reservation reservation = {};
    std::unique_ptr<Memory> memory = nullptr;
    char* base = nullptr;
  };
  // Used on its device's executor.
  struct User {
    Device* device = nullptr;
    std::size_t tier = 0;  // its own; 0: none
    bool ready = false;
    std::shared_ptr<void> pinned_host = nullptr;
  };

  TierMemory() = default;
  static absl::Status Take(Tier& tier);
  PageSet SetOf(std::size_t tier, std::int64_t page_bytes, const std::vector<PageView>& views) const;

  std::vector<Tier> tiers_;
  std::vector<User> users_;
};

}  // namespace kvsummary
