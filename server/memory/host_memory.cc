#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/memory/memory.h"

namespace kvsummary {
namespace {

class HostMemory final : public Memory {
 public:
  HostMemory(void* data, std::int64_t bytes, Descriptor descriptor)
      : Memory(data, bytes, MemoryKind::kMemfd, std::move(descriptor)) {}
  ~HostMemory() override { munmap(data(), static_cast<std::size_t>(bytes())); }
};

constexpr std::int64_t kStatBlockBytes = 512;  // unit of st_blocks
constexpr unsigned kMemfdFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// The mode of a memfd lets whoever has a descriptor for reading open it anew for writing, through /proc: only
// the seal ends that. Mappings made before are not affected. Memfds of huge pages know it too.
constexpr int kReadOnlySeals = kSizeSeals | F_SEAL_FUTURE_WRITE;
constexpr int kHugePageShift = 21;
constexpr std::int64_t kHugePageBytes = std::int64_t{1} << kHugePageShift;
constexpr unsigned kHugeMemfdFlags = kMemfdFlags | MFD_HUGETLB | (kHugePageShift << 26);  // MFD_HUGE_SHIFT

void* Map(int fd, std::int64_t bytes) {
  return mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

absl::Status OutOfMemory(std::int64_t bytes, const char* call, int error) {
  return Refuse(Reason::OUT_OF_MEMORY, "geometry",
                absl::StrFormat("no %d bytes of host memory: %s: %s", bytes, call, std::strerror(error)));
}

// fallocate alone would not refuse: it takes pages until the kernel kills somebody for them.
absl::Status CheckAvailable(std::int64_t bytes) {
  const std::int64_t available = AvailableHostBytes();
  if (bytes <= available) return absl::OkStatus();
  return Refuse(Reason::OUT_OF_MEMORY, "geometry",
                absl::StrFormat("no %d bytes of host memory: %d are available", bytes, available));
}

int Allocate(int fd, std::int64_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(fd, 0, bytes);
  } while (error == EINTR);
  return error;
}

absl::StatusOr<std::unique_ptr<Memory>> MapAndSeal(Descriptor memfd, std::int64_t bytes, int seals) {
  void* data = Map(memfd.get(), bytes);
  if (data == MAP_FAILED) return OutOfMemory(bytes, "mmap", errno);
  const int fd = memfd.get();
  auto memory = std::make_unique<HostMemory>(data, bytes, std::move(memfd));
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) return OutOfMemory(bytes, "sealing", errno);
  return memory;
}

// Of huge pages, as far as the machine has them.
absl::StatusOr<std::unique_ptr<Memory>> AllocateMapped(std::int64_t bytes, int seals,
                                                       const PageCalls& calls) {
  if (bytes % kHugePageBytes == 0) {
    if (Descriptor memfd(calls.create(kHugeMemfdFlags)); memfd && calls.allocate(memfd.get(), bytes) == 0) {
      auto memory = MapAndSeal(std::move(memfd), bytes, seals);
      if (!memory.ok()) return memory.status();
      calls.advise((*memory)->data(), bytes, MADV_POPULATE_WRITE);
      return memory;
    }
  }
  if (auto s = CheckAvailable(bytes); !s.ok()) return s;
  Descriptor memfd(calls.create(kMemfdFlags));
  if (!memfd) return OutOfMemory(bytes, "memfd_create", errno);
  if (ftruncate(memfd.get(), bytes) != 0) return OutOfMemory(bytes, "ftruncate", errno);
  const int fd = memfd.get();
  auto memory = MapAndSeal(std::move(memfd), bytes, seals);
  if (!memory.ok()) return memory.status();
  // Transparent huge pages come by faults alone. Where a kernel cannot do this, the next call does.
  calls.advise((*memory)->data(), bytes, MADV_HUGEPAGE);
  calls.advise((*memory)->data(), bytes, MADV_POPULATE_WRITE);
  if (const int error = calls.allocate(fd, bytes); error != 0) {
    return OutOfMemory(bytes, "fallocate", error);
  }
  return memory;
}

// The number in a file, or `otherwise` where there is none ("max" among them).
std::int64_t ReadNumber(const std::string& path, std::int64_t otherwise) {
  std::ifstream in(path);
  std::int64_t value = 0;
  return in >> value ? value : otherwise;
}

std::int64_t AvailableFromMeminfo() {
  std::ifstream in("/proc/meminfo");
  std::string key;
  std::int64_t kilobytes = 0;
  std::string unit;
  while (in >> key >> kilobytes) {
    if (key == "MemAvailable:") return kilobytes * 1024;
    std::getline(in, unit);
  }
  return 0;
}

// What is left below the limits of this process's control group and the groups above it. `tail` is the
// path in the hierarchy mounted at `root`.
std::int64_t LeftInGroup(const std::string& root, std::string tail, const char* limit, const char* usage) {
  std::int64_t left = std::numeric_limits<std::int64_t>::max();
  while (true) {
    const std::int64_t max = ReadNumber(root + tail + "/" + limit, -1);
    if (max >= 0) left = std::min(left, max - ReadNumber(root + tail + "/" + usage, 0));
    if (tail.empty() || tail == "/") return left;
    tail.resize(tail.rfind('/'));
  }
}

std::int64_t LeftInControlGroups() {
  std::int64_t left = std::numeric_limits<std::int64_t>::max();
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string id, controllers, path;
    std::getline(fields, id, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    // Inside a container the path may be the host's while the group itself is mounted at the root.
    if (id == "0") {
      for (const std::string& tail : {path, std::string()}) {
        left = std::min(left, LeftInGroup("/sys/fs/cgroup", tail, "memory.max", "memory.current"));
      }
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      for (const std::string& tail : {path, std::string()}) {
        left = std::min(left, LeftInGroup("/sys/fs/cgroup/memory", tail, "memory.limit_in_bytes",
                                          "memory.usage_in_bytes"));
      }
    }
  }
  return std::max<std::int64_t>(left, 0);
}

}  // namespace

PageCalls SystemPageCalls() {
  return {.create = [](unsigned flags) { return memfd_create("kvsummary-cache", flags); },
          .allocate = Allocate,
          .advise =
              [](void* data, std::int64_t bytes, int advice) {
                return madvise(data, static_cast<std::size_t>(bytes), advice) == 0 ? 0 : errno;
              }};
}

absl::StatusOr<std::unique_ptr<Memory>> AllocateHostMemory(std::int64_t bytes) {
  if (auto s = CheckAvailable(bytes); !s.ok()) return s;
  Descriptor memfd(memfd_create("kvsummary-cache", kMemfdFlags));
  if (!memfd) return OutOfMemory(bytes, "memfd_create", errno);
  if (const int error = Allocate(memfd.get(), bytes); error != 0) {
    return OutOfMemory(bytes, "fallocate", error);
  }
  return MapAndSeal(std::move(memfd), bytes, kSizeSeals);
}

absl::StatusOr<std::unique_ptr<Memory>> AllocateStagingMemory(std::int64_t bytes, const PageCalls& calls) {
  return AllocateMapped(bytes, kReadOnlySeals, calls);
}

absl::StatusOr<std::unique_ptr<Memory>> AllocateLandingMemory(std::int64_t bytes) {
  return AllocateMapped(bytes, kSizeSeals, SystemPageCalls());
}

absl::StatusOr<ClientMemfd> MapClientMemfd(Descriptor descriptor, std::int64_t bytes) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);  // first: it asks no foreign file system
  struct statfs file_system {};
  struct stat info {};
  if (seals < 0 || (seals & kSeals) != kSeals || fstatfs(descriptor.get(), &file_system) != 0 ||
      file_system.f_type != TMPFS_MAGIC || fstat(descriptor.get(), &info) != 0) {
    return Refuse(Reason::MEMFD_NOT_SEALED, "memory",
                  "the descriptor is not a memfd of ordinary pages with F_SEAL_SHRINK and F_SEAL_GROW");
  }
  const std::int64_t present = std::min<std::int64_t>(info.st_size, info.st_blocks * kStatBlockBytes);
  if (present < bytes) {
    return Refuse(
        Reason::MEMFD_TOO_SMALL, "memory.size_bytes",
        absl::StrFormat("the memfd has %d bytes, %d of them present, not the %d announced: fallocate",
                        info.st_size, present, bytes));
  }
  void* data = Map(descriptor.get(), bytes);
  if (data == MAP_FAILED) {
    return Refuse(Reason::HANDLE_INVALID, "memory",
                  absl::StrFormat("the memfd cannot be mapped for writing: %s", std::strerror(errno)));
  }
  // The mapping keeps the memory. The descriptor is not kept: a client would use up those of this process.
  return ClientMemfd{.memory = std::make_unique<HostMemory>(data, bytes, Descriptor()),
                     .identity = absl::StrFormat("memfd:%d:%d", info.st_dev, info.st_ino)};
}

std::int64_t AvailableHostBytes() { return std::min(AvailableFromMeminfo(), LeftInControlGroups()); }

}  // namespace kvsummary
