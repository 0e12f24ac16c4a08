// Checksums of pages in host memory, by several threads where there is much to read: one thread reads slower
// than a device copies.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace kvsummary {

class Checksummer {
 public:
  struct Page {
    const char* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t sum = 0;  // the answer
  };

  // With so many threads beside the caller's.
  explicit Checksummer(int helpers);
  ~Checksummer();

  // Fills in the sums. One call at a time.
  void Sum(std::span<Page> pages);

 private:
  void Help();
  // Sums parts of the pages until all are taken.
  void Work(std::span<Page> pages, std::size_t part);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  // Of the call under way; none: no pages.
  std::span<Page> pages_;
  std::size_t part_ = 0;               // pages taken at a time
  std::atomic<std::size_t> next_ = 0;  // page to be taken
  std::uint64_t calls_ = 0;
  int helping_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace kvsummary
