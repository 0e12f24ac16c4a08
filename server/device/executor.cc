#include "server/device/executor.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {

Executor::Executor(std::string name, const Limits& limits)
    : name_(std::move(name)), limits_(limits), thread_([this] { Run(); }) {}

void Executor::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

absl::Status Executor::Submit(Work work, std::size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() >= limits_.works || bytes > limits_.bytes - bytes_) {
      return Refuse(
          Reason::QUEUE_FULL, "",
          absl::StrFormat("%d calls of %d bytes wait for device %s already", queue_.size(), bytes_, name_));
    }
    bytes_ += bytes;
    queue_.push_back({std::move(work), bytes});
    ++submitted_;
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void Executor::SubmitFree(Work work) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), 0});
    ++submitted_;
  }
  wake_.notify_one();
}

void Executor::Run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const size_t bytes = queue_.front().bytes;
    {
      Work work = std::move(queue_.front().work);
      queue_.pop_front();
      ++taken_;
      lock.unlock();
      std::move(work)();
    }  // what it held is freed before the next, and without the lock
    Poll();
    lock.lock();
    bytes_ -= bytes;
  }
}

void Executor::Poll() const {
  if (limits_.poll.count() == 0) return;
  const auto end = std::chrono::steady_clock::now() + limits_.poll;
  while (submitted_.load(std::memory_order_relaxed) == taken_ && std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace kvsummary
