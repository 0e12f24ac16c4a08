// Movement of pages by the host, for every device that has no better way.
#include <chrono>

#include "absl/strings/str_format.h"
#include "server/device/device.h"

namespace kvsummary {

absl::StatusOr<std::shared_ptr<void>> Device::MapHost(void* /*data*/, std::int64_t /*bytes*/) {
  return std::shared_ptr<void>();
}

bool Device::Reaches(const Device& other) { return &other == this || !other.pins_host_memory(); }

absl::StatusOr<std::chrono::nanoseconds> Device::MovePages(const PageSet& from,
                                                           std::span<const std::int64_t> from_blocks,
                                                           const PageSet& to,
                                                           std::span<const std::int64_t> to_blocks) {
  const auto start = std::chrono::steady_clock::now();
  unsigned long long skipped = 0;
  const int error = HostPages().Copy(from, from_blocks.data(), to, to_blocks.data(),
                                     static_cast<std::int64_t>(from_blocks.size()), {.skipped = &skipped});
  if (error != 0 || skipped != 0) {
    return absl::InternalError(absl::StrFormat("%d of %d pages of %d bytes could not be moved (%d)", skipped,
                                               from_blocks.size(), from.page_bytes, error));
  }
  return std::chrono::steady_clock::now() - start;
}

}  // namespace kvsummary
