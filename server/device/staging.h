// Pinned memory that bytes pass through on their way to and from a device: two halves, so that one is filled
// or emptied while the device works on the other. Not thread-safe: the executor's.
//
// Invariant: a half is handed out only when no work that was queued while it was out can still touch it. That
// is so whatever happens between, a failure included: a Half that is let go is fenced, and Next waits for the
// fence.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

class Staging {
 public:
  // How the device's queue tells where it is.
  class Fences {
   public:
    virtual ~Fences() = default;
    // Marks the end of what has been queued so far as the fence of `half` (0 or 1).
    virtual absl::Status Set(int half) = 0;
    // Returns when the device has passed the half's fence.
    virtual absl::Status Await(int half) = 0;
  };

  // A half in use. Movable; at most one of each at a time.
  class Half {
   public:
    Half(Half&& other) noexcept : staging_(std::exchange(other.staging_, nullptr)), index_(other.index_) {}
    Half& operator=(Half&& other) noexcept {
      std::swap(staging_, other.staging_);
      std::swap(index_, other.index_);
      return *this;
    }
    ~Half() {
      if (staging_ != nullptr) staging_->LetGo(index_);
    }

    char* data() const { return staging_->data_ + index_ * staging_->half_bytes_; }
    // Says that all work on this half is queued, for an Await that shall not wait for what comes later.
    absl::Status Queued() { return staging_->Fence(index_); }
    // Returns when the device has done what was queued before Queued, or else before this call. No work on
    // the half may be queued any more.
    absl::Status Await();

   private:
    friend class Staging;
    Half(Staging* staging, int index) : staging_(staging), index_(index) {}
    Staging* staging_;
    int index_;
  };

  // `data`: two times `half_bytes`, which with `fences` must outlive this.
  Staging(char* data, std::int64_t half_bytes, Fences& fences)
      : data_(data), half_bytes_(half_bytes), fences_(fences) {}

  std::int64_t half_bytes() const { return half_bytes_; }
  // The half that has not been used for longer. INTERNAL when it is still out; what its fence failed with,
  // then and for ever.
  absl::StatusOr<Half> Next();

 private:
  enum class State { kFree, kOut, kOutFenced, kOutAwaited, kFenced };

  absl::Status Fence(int half);
  void LetGo(int half);

  char* const data_;
  const std::int64_t half_bytes_;
  Fences& fences_;
  State states_[2] = {State::kFree, State::kFree};
  absl::Status broken_;
  int next_ = 0;
};

}  // namespace kvsummary
