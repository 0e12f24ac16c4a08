// A limit on the bytes that caches may take of one memory, and what is taken of it.
//
// Invariant: 0 <= used <= limit at every moment; a Reservation that was granted is part of `used` until it
// is destroyed. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvsummary {

class Budget {
 public:
  // Gives its bytes back when destroyed. Movable; the Budget must outlive it.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation();

   private:
    friend class Budget;
    Reservation(Budget* budget, std::int64_t bytes) : budget_(budget), bytes_(bytes) {}
    Budget* budget_ = nullptr;
    std::int64_t bytes_ = 0;
  };

  // `owner` names the memory in errors, as "host".
  Budget(std::string owner, std::int64_t limit_bytes) : owner_(std::move(owner)), limit_(limit_bytes) {}

  // MEMORY_BUDGET_EXCEEDED when the bytes do not fit; nothing is taken then.
  absl::StatusOr<Reservation> Reserve(std::int64_t bytes);

  std::int64_t limit_bytes() const;
  std::int64_t used_bytes() const;
  // For a limit that is known only once a device has been opened. Never below what is used.
  void set_limit_bytes(std::int64_t bytes);

 private:
  const std::string owner_;
  mutable std::mutex mutex_;
  std::int64_t limit_;
  std::int64_t used_ = 0;
};

}  // namespace kvsummary
