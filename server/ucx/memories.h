// Memories that the daemon has given the helper, mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace kvsummary {

class UcxMemories {
 public:
  // `protection`: of mmap.
  explicit UcxMemories(int protection) : protection_(protection) {}
  ~UcxMemories();
  UcxMemories(const UcxMemories&) = delete;
  UcxMemories& operator=(const UcxMemories&) = delete;

  // Maps the first `bytes` of a file that has them.
  absl::Status Add(int fd, std::int64_t bytes);
  // The place of a range; null when it is not within the memory of that number, or is empty.
  std::byte* Find(std::uint32_t memory, std::int64_t offset, std::int64_t bytes) const;

 private:
  struct Mapping {
    std::byte* data;
    std::int64_t bytes;
  };
  const int protection_;
  std::vector<Mapping> mappings_;
};

}  // namespace kvsummary
