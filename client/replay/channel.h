// A bounded channel of reused items between two threads: the producer fills an item in place while the
// consumer uses another one, so large buffers are allocated once.
//
// Capacity items exist; at most one is being filled and one being used. Either side ends it with Close.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace kvsummary {

template <typename Item, std::size_t kItems>
class Channel {
 public:
  // The producer's next item to fill; null once closed. Blocks while all others wait to be used.
  Item* BeginPut() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || put_ - taken_ < kItems; });
    return closed_ ? nullptr : &items_[put_ % kItems];
  }
  void EndPut() { Advance(put_); }

  // Waits until all that was put is taken and done with; false when the channel is closed.
  bool AwaitTaken() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || taken_ == put_; });
    return !closed_;
  }

  // The consumer's next item, valid until EndTake; null once the channel is closed and empty.
  Item* BeginTake() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || taken_ < put_; });
    return taken_ < put_ ? &items_[taken_ % kItems] : nullptr;
  }
  void EndTake() { Advance(taken_); }

  // Nothing more is put. What was put can still be taken.
  void Close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  void Advance(std::size_t& count) {
    const std::lock_guard lock(mutex_);
    ++count;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Item, kItems> items_;
  std::size_t put_ = 0;    // guarded by mutex_
  std::size_t taken_ = 0;  // guarded by mutex_
  bool closed_ = false;    // guarded by mutex_
};

}  // namespace kvsummary
