#include "server/store/checksummer.h"

#include <pthread.h>

#include <algorithm>

#include "server/checksum.h"

namespace kvsummary {
namespace {

constexpr std::size_t kPartBytes = std::size_t{128} << 10;  // taken at a time
constexpr std::size_t kWorthHelp = std::size_t{1} << 20;    // less is done before the others are awake

void SumEach(std::span<Checksummer::Page> pages) {
  for (Checksummer::Page& page : pages) page.sum = Checksum(page.data, page.bytes);
}

}  // namespace

Checksummer::Checksummer(int helpers) {
  for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { Help(); });
}

Checksummer::~Checksummer() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Checksummer::Sum(std::span<Page> pages) {
  std::size_t bytes = 0;
  for (const Page& page : pages) bytes += page.bytes;
  if (helpers_.empty() || bytes < kWorthHelp) return SumEach(pages);
  const std::size_t part = std::max<std::size_t>(1, kPartBytes / (bytes / pages.size() + 1));
  {
    std::lock_guard lock(mutex_);
    pages_ = pages;
    part_ = part;
    next_ = 0;
    ++calls_;
  }
  wake_.notify_all();
  Work(pages, part);
  // Who has not come by now is not waited for.
  std::unique_lock lock(mutex_);
  pages_ = {};
  idle_.wait(lock, [this] { return helping_ == 0; });
}

void Checksummer::Work(std::span<Page> pages, std::size_t part) {
  while (true) {
    const std::size_t first = next_.fetch_add(part);
    if (first >= pages.size()) return;
    SumEach(pages.subspan(first, std::min(part, pages.size() - first)));
  }
}

void Checksummer::Help() {
  pthread_setname_np(pthread_self(), "store-sums");
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || (calls_ != seen && !pages_.empty()); });
    if (stopping_) return;
    seen = calls_;
    const std::span<Page> pages = pages_;
    const std::size_t part = part_;
    ++helping_;
    lock.unlock();
    Work(pages, part);
    lock.lock();
    if (--helping_ == 0) idle_.notify_all();
  }
}

}  // namespace kvsummary
