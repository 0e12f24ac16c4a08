#include "server/device/executor.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {

Executor::Executor(std::string name, std::size_t max_queued)
    : name_(std::move(name)), max_queued_(max_queued), thread_([this] { Run(); }) {}

void Executor::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

absl::Status Executor::Submit(Work work) {
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() >= max_queued_) {
      return Refuse(Reason::QUEUE_FULL, "",
                    absl::StrFormat("%d calls wait for device %s already", queue_.size(), name_));
    }
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void Executor::SubmitFree(Work work) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void Executor::Run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::move(work)();
    work = nullptr;  // what it held is freed before the next, and without the lock
    lock.lock();
  }
}

}  // namespace kvsummary
