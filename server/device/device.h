// A device holds caches and runs updates on them: the host, or a CUDA device.
//
// Each device has one executor; the functions marked (executor) are called on its thread only. They block
// until the device has done the work. A device is opened at its first use: nothing is taken of a GPU, not
// even a context, before its first cache is made.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/copy.h"
#include "kernels/layout.h"
#include "kernels/update.h"
#include "server/device/executor.h"
#include "server/memory/budget.h"
#include "server/memory/memory.h"

namespace kvsummary {

// A validated update. Its arrays lie in host memory.
using Step = std::variant<DecodeStep, VerifyStep, PrefillStep>;

// Where a step's rows lie: in host memory with any strides up to 2^31 - 1 bytes, or in memory of the device
// that applies it, aligned as kernels/update.h asks.
enum class RowsIn { kHost, kDevice };

// A contiguous range of a Memory.
struct Piece {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

class Device {
 public:
  // What is taken for a device besides the caches that its budget counts.
  struct Overhead {
    std::int64_t device_bytes = 0;       // of its own memory, from Open on
    std::int64_t pinned_host_bytes = 0;  // of the host's, clients' buffers among them
  };

  virtual ~Device() = default;

  const std::string& name() const { return name_; }
  virtual std::string description() const = 0;
  virtual std::string uuid() const { return ""; }
  Budget& budget() { return budget_; }
  virtual Overhead overhead() const { return {}; }  // any thread
  Executor& executor() { return executor_; }

  // (executor) Makes the device ready; the answer of the first call is the answer of all later ones, with
  // EXPF_MISMATCH or DEVICE_FAILED for a device that cannot be used.
  absl::Status Open();
  // Why Open failed, or what has broken since; OK before Open. Any thread.
  absl::Status health() const;

  // Calls `listener` once when the device breaks, at once when it has (not for EXPF_MISMATCH: then it has
  // never worked). Replaces the listener before, which is not called any more on return; null: none.
  void set_on_broken(absl::AnyInvocable<void()> listener);

  // (executor) Bytes that Allocate will take for `bytes`, which the device may round up.
  // MEMORY_KIND_UNSUPPORTED, CUDA_IPC_MIG; unless a device overrides it, it has MEMFD only.
  virtual absl::StatusOr<std::int64_t> AllocationBytes(std::int64_t bytes, MemoryKind kind) const;
  // (executor) Zeroed memory of bytes that AllocationBytes answered for the kind. OUT_OF_MEMORY when the
  // device has none.
  virtual absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind kind) = 0;
  // (executor) Allocate, for memory that long runs of bytes pass through. Unless a device overrides it, the
  // same.
  virtual absl::StatusOr<std::unique_ptr<Memory>> AllocateStaging(std::int64_t bytes, MemoryKind kind) {
    return Allocate(bytes, kind);
  }
  // (executor) Another process's memory: bytes [offset, offset + bytes) of what a CUDA IPC handle opens, with
  // offset >= 0 and bytes > 0. HANDLE_INVALID and the reasons of CUDA IPC; MEMORY_KIND_UNSUPPORTED unless a
  // device overrides it.
  virtual absl::StatusOr<std::unique_ptr<Memory>> OpenIpc(const std::string& handle, std::int64_t offset,
                                                          std::int64_t bytes);
  // Whether PinHost does something. Any thread.
  virtual bool pins_host_memory() const { return false; }
  // (executor) Lets the device read host memory where it lies, until UnpinHost: for rows of many steps. It
  // does what it can: rows in memory that could not be pinned are copied first.
  virtual void PinHost(char* /*data*/, std::int64_t /*bytes*/) {}
  // (executor) Returns when the device has done all work on it. Also for memory that could not be pinned.
  virtual void UnpinHost(char* /*data*/) {}
  // (executor) Applies a step to a view of this device's memory.
  virtual absl::Status Apply(const CacheView& view, const Step& step, RowsIn rows_in) = 0;
  // (executor) Copies pieces of `memory` to or from contiguous host memory, in order. A CUDA device wants
  // their offsets and bytes to be multiples of 16.
  virtual absl::Status CopyOut(const Memory& memory, std::span<const Piece> pieces, char* host) = 0;
  virtual absl::Status CopyIn(Memory& memory, std::span<const Piece> pieces, const char* host) = 0;

  // What pointers, offsets, strides and bytes of MovePages must be multiples of.
  virtual std::int64_t page_alignment() const { return 1; }
  // (executor) Lets MovePages address host memory for as long as the answer lives (which ends on any thread);
  // may be asked for again. Unless a device overrides it, it addresses all host memory anyway.
  virtual absl::StatusOr<std::shared_ptr<void>> MapHost(void* data, std::int64_t bytes);
  // (executor) Whether MovePages can address memory of the other device's Allocate (of kind CUDA_IPC, where
  // it has that). Unless a device overrides it, its own and the host's.
  virtual bool Reaches(const Device& other);
  // (executor) As PageMover::Copy (kernels/copy.h), complete on return; sets, views and ids lie in host
  // memory, pages in memory that this device can address. Answers how long the movement itself took, as the
  // device measures it. INTERNAL when pages had to be skipped. Unless a device overrides it, the host moves
  // them.
  virtual absl::StatusOr<std::chrono::nanoseconds> MovePages(const PageSet& from,
                                                             std::span<const std::int64_t> from_blocks,
                                                             const PageSet& to,
                                                             std::span<const std::int64_t> to_blocks);

 protected:
  Device(std::string name, std::int64_t budget_bytes, const Executor::Limits& limits = {});
  virtual absl::Status DoOpen() = 0;
  // Records that the device has broken: health() says so from now on. Returns a DEVICE_FAILED.
  absl::Status Broken(std::string_view what);

 private:
  // Keeps the first failure.
  void Record(absl::Status status);

  const std::string name_;
  Budget budget_;
  bool opened_ = false;  // executor thread only
  std::mutex listener_mutex_;
  bool broken_ = false;
  absl::AnyInvocable<void()> on_broken_;
  mutable std::mutex mutex_;
  absl::Status health_;  // the first failure
  Executor executor_;    // last: its thread ends first
};

// The host. `kernels` as a rule HostKernels().
std::unique_ptr<Device> MakeHostDevice(const UpdateKernels& kernels, std::int64_t budget_bytes);

// Every visible CUDA device, named "cuda:0", "cuda:1", ...; none without a driver or in a build without
// CUDA. `budget_bytes` of 0: 80 % of what is free when the device is opened.
std::vector<std::unique_ptr<Device>> MakeCudaDevices(std::int64_t budget_bytes);

}  // namespace kvsummary
