#include "server/device/cuda_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

// cudaMalloc cuts smaller allocations from blocks of this size, and an IPC handle opens the whole block.
constexpr std::int64_t kMallocGranularity = 2 << 20;

// The driver's functions, found through the runtime: nothing links with libcuda.
struct Driver {
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
  bool complete = false;
};

template <typename Function>
bool Find(const char* name, Function& function) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  function = reinterpret_cast<Function>(found);
  return result == cudaDriverEntryPointSuccess && found != nullptr;
}

const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver d;
    d.complete = Find("cuDeviceGetAttribute", d.device_attribute) &&
                 Find("cuMemGetAllocationGranularity", d.granularity) && Find("cuMemCreate", d.create) &&
                 Find("cuMemRelease", d.release) && Find("cuMemAddressReserve", d.reserve) &&
                 Find("cuMemAddressFree", d.free) && Find("cuMemMap", d.map) && Find("cuMemUnmap", d.unmap) &&
                 Find("cuMemSetAccess", d.set_access) &&
                 Find("cuMemExportToShareableHandle", d.export_handle) &&
                 Find("cuMemGetAddressRange", d.address_range) && Find("cuGetErrorString", d.error_string);
    return d;
  }();
  return driver;
}

// Whoever calls the driver below has seen `complete` in CudaAllocationBytes, which the analyzer cannot; and
// CUdeviceptr is an integer by NVIDIA's choice.
// NOLINTBEGIN(clang-analyzer-core.CallAndMessage,performance-no-int-to-ptr)

CUmemAllocationProp VmmProperties(int ordinal) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

absl::Status DriverFailed(const CudaDeviceId& device, const char* call, CUresult error) {
  const char* text = nullptr;
  TheDriver().error_string(error, &text);
  const bool full = error == CUDA_ERROR_OUT_OF_MEMORY;
  return Refuse(full ? Reason::OUT_OF_MEMORY : Reason::DEVICE_FAILED, full ? "geometry" : "",
                absl::StrFormat("%s: %s: %s", device.name, call, text != nullptr ? text : "unknown error"));
}

absl::Status MigRefused(const CudaDeviceId& device) {
  return Refuse(
      Reason::CUDA_IPC_MIG, "memory_kind",
      absl::StrFormat("%s is a MIG instance: CUDA IPC does not work there, use CUDA_VMM or inline rows",
                      device.name));
}

std::int64_t RoundedUp(std::int64_t bytes, std::int64_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

// Built up step by step: the destructor undoes what has been done. Nothing can be freed of a broken device,
// and there is no way to report that.
struct VmmMapping {
  CUmemGenericAllocationHandle allocation = 0;
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  bool mapped = false;
  bool created = false;

  VmmMapping() = default;
  VmmMapping(VmmMapping&& other) noexcept { *this = std::move(other); }
  VmmMapping& operator=(VmmMapping&& other) noexcept {
    std::swap(allocation, other.allocation);
    std::swap(address, other.address);
    std::swap(bytes, other.bytes);
    std::swap(mapped, other.mapped);
    std::swap(created, other.created);
    return *this;
  }
  ~VmmMapping() {
    const Driver& driver = TheDriver();
    if (mapped) driver.unmap(address, bytes);
    if (address != 0) driver.free(address, bytes);
    if (created) driver.release(allocation);
  }
};

class VmmMemory final : public Memory {
 public:
  VmmMemory(VmmMapping mapping, Descriptor descriptor)
      : Memory(reinterpret_cast<void*>(mapping.address), static_cast<std::int64_t>(mapping.bytes),
               MemoryKind::kCudaVmm, std::move(descriptor)),
        mapping_(std::move(mapping)) {}

 private:
  const VmmMapping mapping_;
};

class MallocMemory final : public Memory {
 public:
  MallocMemory(void* data, std::int64_t bytes, std::string handle)
      : Memory(data, bytes, MemoryKind::kCudaIpc, Descriptor(), std::move(handle)) {}
  ~MallocMemory() override { cudaFree(data()); }
};

class OpenedMemory final : public Memory {
 public:
  OpenedMemory(std::shared_ptr<CudaIpcHandles::Opening> opening, std::int64_t offset, std::int64_t bytes)
      : Memory(opening->base() + offset, bytes, MemoryKind::kCudaIpc, Descriptor()),
        opening_(std::move(opening)) {}

 private:
  const std::shared_ptr<CudaIpcHandles::Opening> opening_;
};

}  // namespace

absl::StatusOr<std::int64_t> CudaAllocationBytes(const CudaDeviceId& device, std::int64_t bytes,
                                                 MemoryKind kind) {
  if (kind == MemoryKind::kCudaIpc) {
    if (device.mig) return MigRefused(device);
    return RoundedUp(bytes, kMallocGranularity);
  }
  const Driver& driver = TheDriver();
  int supported = 0;
  if (kind == MemoryKind::kCudaVmm && driver.complete) {
    driver.device_attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                            device.ordinal);
  }
  if (supported == 0) {
    return Refuse(Reason::MEMORY_KIND_UNSUPPORTED, "memory_kind",
                  absl::StrFormat("%s has no memory of kind %s", device.name,
                                  kind == MemoryKind::kCudaVmm ? "CUDA_VMM with descriptors: ask for CUDA_IPC"
                                                               : "MEMFD: ask for CUDA_VMM or CUDA_IPC"));
  }
  const CUmemAllocationProp properties = VmmProperties(device.ordinal);
  std::size_t granularity = 0;
  if (const CUresult error = driver.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
      error != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemGetAllocationGranularity", error);
  }
  return RoundedUp(bytes, static_cast<std::int64_t>(granularity));
}

absl::StatusOr<std::unique_ptr<Memory>> AllocateCudaVmm(const CudaDeviceId& device, std::int64_t bytes) {
  const Driver& driver = TheDriver();
  const CUmemAllocationProp properties = VmmProperties(device.ordinal);
  VmmMapping mapping;
  mapping.bytes = static_cast<std::size_t>(bytes);
  if (const CUresult e = driver.create(&mapping.allocation, mapping.bytes, &properties, 0);
      e != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemCreate", e);
  }
  mapping.created = true;
  if (const CUresult e = driver.reserve(&mapping.address, mapping.bytes, 0, 0, 0); e != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemAddressReserve", e);
  }
  if (const CUresult e = driver.map(mapping.address, mapping.bytes, 0, mapping.allocation, 0);
      e != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemMap", e);
  }
  mapping.mapped = true;
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (const CUresult e = driver.set_access(mapping.address, mapping.bytes, &access, 1); e != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemSetAccess", e);
  }
  int fd = -1;
  if (const CUresult e =
          driver.export_handle(&fd, mapping.allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      e != CUDA_SUCCESS) {
    return DriverFailed(device, "cuMemExportToShareableHandle", e);
  }
  return std::make_unique<VmmMemory>(std::move(mapping), Descriptor(fd));
}

absl::StatusOr<std::unique_ptr<Memory>> AllocateCudaIpc(const CudaDeviceId& device, std::int64_t bytes) {
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes)); error != cudaSuccess) {
    cudaGetLastError();  // an allocation that fails leaves the device sound
    const bool full = error == cudaErrorMemoryAllocation;
    return Refuse(full ? Reason::OUT_OF_MEMORY : Reason::DEVICE_FAILED, full ? "geometry" : "",
                  absl::StrFormat("%s has no %d bytes: %s", device.name, bytes, cudaGetErrorString(error)));
  }
  cudaIpcMemHandle_t handle{};
  if (const cudaError_t error = cudaIpcGetMemHandle(&handle, data); error != cudaSuccess) {
    cudaGetLastError();
    cudaFree(data);
    return Refuse(Reason::MEMORY_KIND_UNSUPPORTED, "memory_kind",
                  absl::StrFormat("%s gives no IPC handle: %s", device.name, cudaGetErrorString(error)));
  }
  return std::make_unique<MallocMemory>(data, bytes, std::string(handle.reserved, sizeof(handle.reserved)));
}

CudaIpcHandles::Opening::~Opening() { cudaIpcCloseMemHandle(base_); }

absl::StatusOr<std::unique_ptr<Memory>> CudaIpcHandles::Open(const std::string& handle, std::int64_t offset,
                                                             std::int64_t bytes) {
  auto opening = openings_.Get(handle, [&] { return OpenAnew(handle); });
  if (!opening.ok()) return opening.status();
  const std::int64_t available = (*opening)->bytes();
  if (offset > available || bytes > available - offset) {
    return Refuse(
        Reason::MEMFD_TOO_SMALL, "memory.size_bytes",
        absl::StrFormat("the allocation has %d bytes; %d at %d were announced", available, bytes, offset));
  }
  return std::make_unique<OpenedMemory>(*std::move(opening), offset, bytes);
}

absl::StatusOr<std::unique_ptr<CudaIpcHandles::Opening>> CudaIpcHandles::OpenAnew(
    const std::string& handle) const {
  if (device_.mig) return MigRefused(device_);
  cudaIpcMemHandle_t raw{};
  if (handle.size() != sizeof(raw.reserved)) {
    return Refuse(
        Reason::HANDLE_INVALID, "memory.handle",
        absl::StrFormat("a CUDA IPC handle has %d bytes, not %d", sizeof(raw.reserved), handle.size()));
  }
  std::memcpy(raw.reserved, handle.data(), handle.size());
  void* base = nullptr;
  if (const cudaError_t error = cudaIpcOpenMemHandle(&base, raw, cudaIpcMemLazyEnablePeerAccess);
      error != cudaSuccess) {
    cudaGetLastError();  // a handle that does not open leaves the device sound
    if (error == cudaErrorDeviceUninitialized) {
      return Refuse(Reason::CUDA_IPC_SAME_PROCESS, "memory.handle",
                    "a CUDA IPC handle does not open in the process that made it");
    }
    return Refuse(
        Reason::HANDLE_INVALID, "memory.handle",
        absl::StrFormat("%s does not open the handle: %s", device_.name, cudaGetErrorString(error)));
  }
  const auto address = reinterpret_cast<CUdeviceptr>(base);
  CUdeviceptr start = 0;
  std::size_t size = 0;
  const bool known =
      TheDriver().complete && TheDriver().address_range(&start, &size, address) == CUDA_SUCCESS;
  return std::make_unique<Opening>(base, known ? static_cast<std::int64_t>(size - (address - start)) : 0);
}

// NOLINTEND(clang-analyzer-core.CallAndMessage,performance-no-int-to-ptr)

}  // namespace kvsummary
