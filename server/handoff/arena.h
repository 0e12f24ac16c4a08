// Staging memory of one device: where offers lie until they have been pulled.
//
// It is taken of the device, and counted against its budget, when the first offer is made there, and kept
// from then on. Thread-safe but for what is marked (executor).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device.h"

namespace kvsummary {

class Arena {
 public:
  static constexpr std::int64_t kGranule = 4096;  // bytes; extents begin and end at multiples of it

  // A range of the arena, given back when destroyed. Movable; the arena must outlive it.
  class Extent {
   public:
    Extent() = default;
    Extent(Extent&& other) noexcept { *this = std::move(other); }
    Extent& operator=(Extent&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(offset_, other.offset_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Extent();
    Arena* arena() const { return arena_; }
    std::int64_t offset() const { return offset_; }
    std::int64_t bytes() const { return bytes_; }

   private:
    friend class Arena;
    Extent(Arena* arena, std::int64_t offset, std::int64_t bytes)
        : arena_(arena), offset_(offset), bytes_(bytes) {}
    Arena* arena_ = nullptr;
    std::int64_t offset_ = 0;
    std::int64_t bytes_ = 0;  // a multiple of kGranule
  };

  // Of at most `capacity_bytes`.
  Arena(Device& device, std::int64_t capacity_bytes);
  // Waits until every extent has come back, then frees the memory on the executor, behind what is queued
  // there.
  ~Arena();

  Device& device() const { return device_; }
  std::int64_t capacity_bytes() const { return capacity_; }
  std::int64_t used_bytes() const;

  // HANDOFF_BUDGET_EXCEEDED when no range of so many bytes is free.
  absl::StatusOr<Extent> Reserve(std::int64_t bytes);

  // (executor) Takes the memory, unless it has. MEMORY_BUDGET_EXCEEDED, OUT_OF_MEMORY, or what the device
  // fails with: the next call tries again.
  absl::Status Prepare();
  // Null before Prepare has succeeded; the same from then on.
  const Memory* memory() const;

 private:
  void Free(std::int64_t offset, std::int64_t bytes);

  Device& device_;
  const std::int64_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable all_free_;
  std::map<std::int64_t, std::int64_t> free_;  // offset, bytes; no two touch
  std::int64_t used_ = 0;
  Budget::Reservation reservation_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace kvsummary
