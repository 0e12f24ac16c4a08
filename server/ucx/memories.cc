#include "server/ucx/memories.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"

namespace kvsummary {

UcxMemories::~UcxMemories() {
  for (const Mapping& m : mappings_) munmap(m.data, static_cast<std::size_t>(m.bytes));
}

absl::Status UcxMemories::Add(int fd, std::int64_t bytes) {
  struct stat info {};
  // What a file lacks could be mapped, and would end the process when it is touched.
  if (fstat(fd, &info) != 0 || bytes <= 0 || info.st_size < bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the memory has %d bytes, not the %d announced", info.st_size, bytes));
  }
  // What will be written is mapped to its last page now: no page is missing when its bytes come. What is read
  // is mapped many pages at a time, and may be too large to wait for here.
  const int populate = (protection_ & PROT_WRITE) != 0 ? MAP_POPULATE : 0;
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), protection_, MAP_SHARED | populate, fd, 0);
  if (data == MAP_FAILED) {
    return absl::InvalidArgumentError(absl::StrFormat("mmap of %d bytes: %s", bytes, std::strerror(errno)));
  }
  mappings_.push_back({static_cast<std::byte*>(data), bytes});
  return absl::OkStatus();
}

std::byte* UcxMemories::Find(std::uint32_t memory, std::int64_t offset, std::int64_t bytes) const {
  if (memory >= mappings_.size()) return nullptr;
  const Mapping& m = mappings_[memory];
  if (offset < 0 || bytes <= 0 || bytes > m.bytes || offset > m.bytes - bytes) return nullptr;
  return m.data + offset;
}

}  // namespace kvsummary
