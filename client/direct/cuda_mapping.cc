// CUDA memory of another process, in the device's primary context: the one that PyTorch and every other user
// of the runtime API are in.
//
// The driver API does all but the launches, for it leaves the caller's thread as it was: a context is pushed
// and popped, and no other device gets one.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/stat.h>

#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "client/direct/mapping.h"

namespace kvsummary::direct {
namespace {

// The driver's functions, found at run time: the library loads where there is no driver.
struct Driver {
#define KVS_DRIVER_FUNCTIONS(F)        \
  F(cuInit)                            \
  F(cuDeviceGetCount)                  \
  F(cuDeviceGet)                       \
  F(cuDeviceGetUuid)                   \
  F(cuDevicePrimaryCtxRetain)          \
  F(cuDevicePrimaryCtxRelease)         \
  F(cuCtxGetCurrent)                   \
  F(cuCtxPushCurrent)                  \
  F(cuCtxPopCurrent)                   \
  F(cuThreadExchangeStreamCaptureMode) \
  F(cuGetErrorString)                  \
  F(cuMemAlloc)                        \
  F(cuMemFree)                         \
  F(cuMemcpyHtoDAsync)                 \
  F(cuStreamCreate)                    \
  F(cuStreamSynchronize)               \
  F(cuStreamDestroy)                   \
  F(cuMemGetAddressRange)              \
  F(cuIpcOpenMemHandle)                \
  F(cuIpcCloseMemHandle)               \
  F(cuMemImportFromShareableHandle)    \
  F(cuMemGetAllocationGranularity)     \
  F(cuMemAddressReserve)               \
  F(cuMemAddressFree)                  \
  F(cuMemMap)                          \
  F(cuMemUnmap)                        \
  F(cuMemSetAccess)                    \
  F(cuMemRelease)
#define KVS_DECLARE(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses)
  KVS_DRIVER_FUNCTIONS(KVS_DECLARE)
#undef KVS_DECLARE

  // What is missing; null when all is there.
  const char* Load() {
    bool complete = true;
    const auto find = [&complete](const char* name, auto& function) {
      void* address = nullptr;
      cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
      if (error != cudaSuccess) cudaGetLastError();
      complete =
          complete && error == cudaSuccess && found == cudaDriverEntryPointSuccess && address != nullptr;
      std::memcpy(&function, &address, sizeof(address));
    };
#define KVS_FIND(name) find(#name, name);
    KVS_DRIVER_FUNCTIONS(KVS_FIND)
#undef KVS_FIND
    if (!complete) return "no CUDA driver, or one before CUDA 12";
    return cuInit(0) == CUDA_SUCCESS ? nullptr : "the CUDA driver does not start";
  }
};

Driver driver;

PlainStatus LoadDriver() {
  static const char* const missing = driver.Load();
  if (missing == nullptr) return {};
  return {kPlainFailedPrecondition, "DEVICE_NOT_VISIBLE", missing};
}

PlainStatus Failed(const char* call, CUresult result, int code, const char* reason) {
  const char* text = nullptr;
  driver.cuGetErrorString(result, &text);
  return {code, reason, std::string(call) + ": " + (text == nullptr ? std::to_string(result) : text)};
}

PlainStatus Check(const char* call, CUresult result) {
  if (result == CUDA_SUCCESS) return {};
  const bool memory = result == CUDA_ERROR_OUT_OF_MEMORY;
  return Failed(call, result, memory ? kPlainResourceExhausted : kPlainInternal,
                memory ? "OUT_OF_MEMORY" : "DEVICE_FAILED");
}

std::string UuidText(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits;
  }
  return text;
}

PlainStatus FindDevice(const std::string& uuid, CUdevice* device) {
  int count = 0;
  if (auto s = Check("cuDeviceGetCount", driver.cuDeviceGetCount(&count)); !s.ok()) return s;
  for (int i = 0; i < count; ++i) {
    CUuuid id;
    if (driver.cuDeviceGet(device, i) == CUDA_SUCCESS &&
        driver.cuDeviceGetUuid(&id, *device) == CUDA_SUCCESS && UuidText(id) == uuid) {
      return {};
    }
  }
  return {kPlainFailedPrecondition, "DEVICE_NOT_VISIBLE",
          uuid + " is not one of the " + std::to_string(count) + " devices that this process sees"};
}

// Keeps the device's primary context alive.
class PrimaryContext {
 public:
  PrimaryContext() = default;
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  ~PrimaryContext() {
    if (context_ != nullptr) driver.cuDevicePrimaryCtxRelease(device_);
  }

  PlainStatus Retain(CUdevice device) {
    device_ = device;
    CUcontext context = nullptr;
    if (auto s = Check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(&context, device));
        !s.ok())
      return s;
    context_ = context;
    return {};
  }
  CUdevice device() const { return device_; }
  CUcontext get() const { return context_; }

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// Makes a context the thread's for a scope, and memory calls harmless to captures of other threads.
class ContextScope {
 public:
  explicit ContextScope(CUcontext context) {
    CUcontext current = nullptr;
    pushed_ = driver.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != context;
    if (pushed_) driver.cuCtxPushCurrent(context);
  }
  ~ContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) driver.cuCtxPopCurrent(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_;
};

class RelaxedCapture {
 public:
  RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// CudaKernels() in a context.
class KernelsInContext final : public UpdateKernels {
 public:
  explicit KernelsInContext(CUcontext context) : context_(context) {}
  const char* name() const override { return kernels_.name(); }
  int Decode(const CacheView& view, const DecodeStep& step, const Launch& launch) const override {
    return Run([&] { return kernels_.Decode(view, step, launch); });
  }
  int Verify(const CacheView& view, const VerifyStep& step, const Launch& launch) const override {
    return Run([&] { return kernels_.Verify(view, step, launch); });
  }
  int Prefill(const CacheView& view, const PrefillStep& step, const Launch& launch) const override {
    return Run([&] { return kernels_.Prefill(view, step, launch); });
  }

 private:
  template <typename Body>
  int Run(Body body) const {
    const ContextScope scope(context_);
    const int error = body();
    if (error != 0) cudaGetLastError();  // told; not the next caller's
    return error;
  }

  const CUcontext context_;
  const UpdateKernels& kernels_ = *CudaKernels();
};

// A step of one padding row.
struct Nothing {
  std::int64_t index[1] = {-1};
  std::int64_t position[1] = {0};
  std::int32_t query_start_loc[2] = {0, 1};
  std::int32_t seq_lens[2] = {1, 0};
  std::uint16_t row[kRowElements] = {};
};
static_assert(offsetof(Nothing, row) % 16 == 0, "CUDA loads rows by 16 bytes");

// Runs each kernel once, on nothing: a kernel's first launch loads it, which a capture does not allow.
PlainStatus RunOnNothing(const UpdateKernels& kernels, CUdeviceptr memory, CUstream stream) {
  const Nothing host;
  if (auto s = Check("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(memory, &host, sizeof(host), stream));
      !s.ok()) {
    return s;
  }
  const auto* nothing = std::bit_cast<const Nothing*>(memory);
  const CacheGeometry g{.layers = 1,
                        .blocks = 2,
                        .block_size = kRegionTokens,
                        .block_stride = kSummaryBytes,
                        .ring_blocks = 2,
                        .capacity = kMinVerifyCapacity,
                        .rows_per_layer = kMinVerifyCapacity};
  const CacheView view = MakeView(g, std::bit_cast<void*>(memory), {0, 1});
  const RowsView in = PackedRows(nothing->row, 1);
  const Launch launch{.stream = stream};
  const std::int64_t* index = nothing->index;
  int error = kernels.Decode(view, {1, in, index, nothing->position, index}, launch);
  if (error == 0) {
    error =
        kernels.Verify(view, {1, 1, in, index, nothing->query_start_loc, nothing->seq_lens, index}, launch);
  }
  if (error == 0) {
    error =
        kernels.Prefill(view, {1, 1, in, index, nothing->position, nothing->query_start_loc, index}, launch);
  }
  if (error != 0) {
    return {kPlainInternal, "DEVICE_FAILED",
            std::string("loading the kernels: ") + cudaGetErrorString(static_cast<cudaError_t>(error))};
  }
  return Check("loading the kernels", driver.cuStreamSynchronize(stream));
}

// Once a context. Its scope must be current.
PlainStatus LoadKernels(CUcontext context, const UpdateKernels& kernels) {
  static std::mutex& mutex = *new std::mutex();
  static std::set<CUcontext>& loaded = *new std::set<CUcontext>();
  const std::lock_guard lock(mutex);
  if (loaded.contains(context)) return {};
  CUdeviceptr memory = 0;
  if (auto s = Check("cuMemAlloc", driver.cuMemAlloc(&memory, sizeof(Nothing))); !s.ok()) return s;
  CUstream stream = nullptr;
  auto status = Check("cuStreamCreate", driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  if (status.ok()) {
    status = RunOnNothing(kernels, memory, stream);
    driver.cuStreamDestroy(stream);
  }
  driver.cuMemFree(memory);
  if (status.ok()) loaded.insert(context);
  return status;
}

class CudaMapping : public Mapping {
 public:
  CudaMapping(void* data, std::unique_ptr<PrimaryContext> context)
      : Mapping(data), context_(std::move(context)), kernels_(context_->get()) {}
  const UpdateKernels& kernels() const final { return kernels_; }
  std::int64_t alignment() const final { return 16; }
  std::string ErrorText(int error) const final { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

 protected:
  CUcontext context() const { return context_->get(); }

 private:
  const std::unique_ptr<PrimaryContext> context_;
  const KernelsInContext kernels_;
};

class IpcMapping final : public CudaMapping {
 public:
  IpcMapping(CUdeviceptr base, std::int64_t offset, std::unique_ptr<PrimaryContext> context)
      : CudaMapping(std::bit_cast<void*>(base + static_cast<CUdeviceptr>(offset)), std::move(context)),
        base_(base) {}
  ~IpcMapping() override {
    const ContextScope scope(context());
    const RelaxedCapture relaxed;
    driver.cuIpcCloseMemHandle(base_);
  }

 private:
  const CUdeviceptr base_;
};

class VmmMapping final : public CudaMapping {
 public:
  VmmMapping(CUdeviceptr base, std::size_t bytes, std::unique_ptr<PrimaryContext> context)
      : CudaMapping(std::bit_cast<void*>(base), std::move(context)), base_(base), bytes_(bytes) {}
  ~VmmMapping() override {
    const ContextScope scope(context());
    const RelaxedCapture relaxed;
    driver.cuMemUnmap(base_, bytes_);
    driver.cuMemAddressFree(base_, bytes_);
  }

 private:
  const CUdeviceptr base_;
  const std::size_t bytes_;
};

// Opens the driver, the device and its context, then calls open(context).
template <typename Open>
OpenResult InDevice(const std::string& uuid, Open open) {
  if (auto s = LoadDriver(); !s.ok()) return {std::move(s), nullptr};
  CUdevice device = 0;
  if (auto s = FindDevice(uuid, &device); !s.ok()) return {std::move(s), nullptr};
  auto context = std::make_unique<PrimaryContext>();
  if (auto s = context->Retain(device); !s.ok()) return {std::move(s), nullptr};
  const ContextScope scope(context->get());
  const RelaxedCapture relaxed;
  const CUcontext raw = context->get();
  OpenResult result = open(std::move(context));
  if (!result.status.ok()) return result;
  if (auto s = LoadKernels(raw, result.mapping->kernels()); !s.ok()) return {std::move(s), nullptr};
  return result;
}

// Maps `handle` at a new range of `bytes`, readable and writable by the device.
PlainStatus MapAt(CUmemGenericAllocationHandle handle, std::size_t bytes, CUdevice device,
                  CUdeviceptr* base) {
  if (auto s = Check("cuMemAddressReserve", driver.cuMemAddressReserve(base, bytes, 0, 0, 0)); !s.ok())
    return s;
  auto status = Check("cuMemMap", driver.cuMemMap(*base, bytes, 0, handle, 0));
  if (status.ok()) {
    const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    status = Check("cuMemSetAccess", driver.cuMemSetAccess(*base, bytes, &access, 1));
    if (!status.ok()) driver.cuMemUnmap(*base, bytes);
  }
  if (!status.ok()) driver.cuMemAddressFree(*base, bytes);
  return status;
}

// What a failed opening of an IPC handle means.
PlainStatus IpcFailed(CUresult result, const kvs_map_args& args) {
  struct stat own = {};
  if (args.pid_namespace != 0 && stat("/proc/self/ns/pid", &own) == 0 && own.st_ino != args.pid_namespace) {
    return Failed("cuIpcOpenMemHandle, in another PID namespace than the daemon's", result,
                  kPlainFailedPrecondition, "HANDLE_INVALID");
  }
  const bool same_process = result == CUDA_ERROR_INVALID_CONTEXT;
  return Failed("cuIpcOpenMemHandle", result, kPlainFailedPrecondition,
                same_process ? "CUDA_IPC_SAME_PROCESS" : "HANDLE_INVALID");
}

}  // namespace

OpenResult OpenCudaVmm(int descriptor, std::uint64_t segment_bytes, const std::string& device_uuid) {
  return InDevice(device_uuid, [&](std::unique_ptr<PrimaryContext> context) -> OpenResult {
    const CUdevice device = context->device();
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    kind.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    std::size_t unit = 0;
    auto status = Check("cuMemGetAllocationGranularity",
                        driver.cuMemGetAllocationGranularity(&unit, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (!status.ok()) return {std::move(status), nullptr};
    const std::size_t bytes = (segment_bytes + unit - 1) / unit * unit;
    CUmemGenericAllocationHandle handle = 0;
    const CUresult imported = driver.cuMemImportFromShareableHandle(
        &handle, std::bit_cast<void*>(static_cast<std::intptr_t>(descriptor)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (imported != CUDA_SUCCESS) {
      return {Failed("cuMemImportFromShareableHandle", imported, kPlainFailedPrecondition, "HANDLE_INVALID"),
              nullptr};
    }
    CUdeviceptr base = 0;
    status = MapAt(handle, bytes, device, &base);
    driver.cuMemRelease(handle);  // the mapping holds the memory
    if (!status.ok()) return {std::move(status), nullptr};
    return {{}, std::make_unique<VmmMapping>(base, bytes, std::move(context))};
  });
}

OpenResult OpenCudaIpc(const kvs_map_args& args) {
  return InDevice(args.device_uuid, [&](std::unique_ptr<PrimaryContext> context) -> OpenResult {
    CUipcMemHandle handle;
    static_assert(sizeof(handle) == 64);
    std::memcpy(&handle, args.handle, sizeof(handle));
    CUdeviceptr base = 0;
    const CUresult opened = driver.cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (opened != CUDA_SUCCESS) return {IpcFailed(opened, args), nullptr};
    auto mapping = std::make_unique<IpcMapping>(base, args.offset_bytes, std::move(context));
    std::size_t bytes = 0;
    if (auto s = Check("cuMemGetAddressRange", driver.cuMemGetAddressRange(nullptr, &bytes, base)); !s.ok()) {
      return {std::move(s), nullptr};
    }
    const auto offset = static_cast<std::uint64_t>(args.offset_bytes);
    if (offset > bytes || static_cast<std::uint64_t>(args.size_bytes) > bytes - offset) {
      return {{kPlainInternal, "HANDLE_INVALID",
               "the allocation has " + std::to_string(bytes) + " bytes, the cache needs " +
                   std::to_string(args.size_bytes) + " from byte " + std::to_string(args.offset_bytes)},
              nullptr};
    }
    return {{}, std::move(mapping)};
  });
}

}  // namespace kvsummary::direct
