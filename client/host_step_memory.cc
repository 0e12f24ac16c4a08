#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/step_memory.h"

namespace kvsummary {
namespace {

constexpr std::size_t kAlignment = 256;

class HostStepMemory final : public StepMemory {
 public:
  ~HostStepMemory() override { std::free(data_); }
  void* stream() const override { return nullptr; }
  absl::StatusOr<char*> Reserve(std::int64_t bytes) override {
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      const std::size_t size = (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
      data_ = static_cast<char*>(std::aligned_alloc(kAlignment, size));
      if (data_ == nullptr)
        return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes for a step"));
      bytes_ = bytes;
    }
    return data_;
  }
  absl::Status Write(char* to, const void* host, std::int64_t bytes) override {
    std::memcpy(to, host, static_cast<std::size_t>(bytes));
    return absl::OkStatus();
  }
  absl::Status Read(void* host, const char* from, std::int64_t bytes) override {
    std::memcpy(host, from, static_cast<std::size_t>(bytes));
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> IpcHandle() const override { return std::string(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status Register(std::span<char> /*host*/) override { return absl::OkStatus(); }
  absl::Status Signal(std::uint64_t* counter, std::uint64_t value) override {
    std::atomic_ref(*counter).store(value, std::memory_order_release);
    return absl::OkStatus();
  }
  absl::Status Await(const std::uint64_t* counter, std::uint64_t value) override {
    const std::atomic_ref at(*const_cast<std::uint64_t*>(counter));
    while (at.load(std::memory_order_acquire) < value) std::this_thread::yield();
    return absl::OkStatus();
  }

 private:
  char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::unique_ptr<StepMemory> MakeHostStepMemory() { return std::make_unique<HostStepMemory>(); }

}  // namespace kvsummary
