// Ranges of memory: those that hold caches, and those of clients that the daemon has mapped.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"

namespace kvsummary {

// What memory is, and how another process gets at it. Values as in kvsummary.v1.MemoryKind.
enum class MemoryKind {
  kDefault = 0,  // of the device; no Memory is of this kind
  kMemfd = 1,    // host memory: a descriptor
  kCudaVmm = 2,  // a CUDA VMM allocation: a descriptor
  kCudaIpc = 3,  // a cudaMalloc allocation: a CUDA IPC handle
};

// Owns its range; frees (or unmaps) it when destroyed. data() is an address of the device that made it.
class Memory {
 public:
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }
  // The way in for another process: a descriptor, which stays the Memory's (duplicate it to keep it), or -1
  // (also for clients' memory);
  // and the 64 bytes of a CUDA IPC handle, or none.
  int descriptor() const { return descriptor_.get(); }
  const std::string& ipc_handle() const { return ipc_handle_; }

 protected:
  Memory(void* data, std::int64_t bytes, MemoryKind kind, Descriptor descriptor, std::string ipc_handle = "")
      : data_(data),
        bytes_(bytes),
        kind_(kind),
        descriptor_(std::move(descriptor)),
        ipc_handle_(std::move(ipc_handle)) {}

 private:
  void* const data_;
  const std::int64_t bytes_;
  const MemoryKind kind_;
  const Descriptor descriptor_;
  const std::string ipc_handle_;
};

// Zeroed host memory behind a memfd that can neither shrink nor grow, every page of it present on return:
// the kernel will not find later that there is none. OUT_OF_MEMORY when there is none now.
absl::StatusOr<std::unique_ptr<Memory>> AllocateHostMemory(std::int64_t bytes);

// The kernel's calls by which staging memory gets its pages, for tests to fail. As the system's, but for the
// error that they return: 0 when there is none.
struct PageCalls {
  std::function<int(unsigned flags)> create;  // a memfd; -1 when there is none
  std::function<int(int fd, std::int64_t bytes)> allocate;
  std::function<int(void* data, std::int64_t bytes, int advice)> advise;
};
PageCalls SystemPageCalls();

// As AllocateHostMemory, for memory that several processes move long runs of bytes through: of huge pages
// that the machine has set aside (vm.nr_hugepages, or nr_overcommit_hugepages) when they suffice, else of
// transparent ones where they are allowed for shared memory, else of ordinary ones. It is mapped to the last
// page on return. The first two need bytes that are whole huge pages. Nobody but this process writes to it:
// its descriptor, and whatever is opened through it, is good for reading alone.
absl::StatusOr<std::unique_ptr<Memory>> AllocateStagingMemory(std::int64_t bytes,
                                                              const PageCalls& calls = SystemPageCalls());
// The same, for memory that who gets its descriptor is to write to.
absl::StatusOr<std::unique_ptr<Memory>> AllocateLandingMemory(std::int64_t bytes);

// A client's memory behind a memfd, mapped.
struct ClientMemfd {
  std::unique_ptr<Memory> memory;
  std::string identity;  // the same for every descriptor of the memfd
};

// Maps the first `bytes` bytes (above 0) of a memfd. MEMFD_NOT_SEALED unless it is one of ordinary pages,
// sealed against shrinking and growing: then no access faults. MEMFD_TOO_SMALL also when pages are missing:
// they would be made, and counted, here (as they are when the client takes them away later), and address
// space would cost a client nothing. HANDLE_INVALID when it cannot be mapped for writing.
absl::StatusOr<ClientMemfd> MapClientMemfd(Descriptor descriptor, std::int64_t bytes);

// Bytes that a process may still take: what the kernel calls available, or less where a control group
// limits this process.
std::int64_t AvailableHostBytes();

}  // namespace kvsummary
