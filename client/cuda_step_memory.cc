// Step memory of a CUDA device. The calling thread's device becomes this one.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/status.h"
#include "client/step_memory.h"

namespace kvsummary {
namespace {

absl::Status Check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return FromPlain({kPlainInternal, "DEVICE_FAILED", absl::StrCat(call, ": ", cudaGetErrorString(error))});
}

std::string UuidText(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

// A function of the driver, by its name and signature of CUDA 12.
template <typename Function>
absl::StatusOr<Function> FindInDriver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (auto s = Check(name, error); !s.ok()) return s;
  if (result != cudaDriverEntryPointSuccess || found == nullptr) return Check(name, cudaErrorNotSupported);
  return reinterpret_cast<Function>(found);
}

class CudaStepMemory final : public StepMemory {
 public:
  ~CudaStepMemory() override {
    for (char* host : registered_) cudaHostUnregister(host);
    if (data_ != nullptr) cudaFree(data_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Open(int ordinal) {
    if (auto s = Check("cudaSetDevice", cudaSetDevice(ordinal)); !s.ok()) return s;
    return Check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  void* stream() const override { return stream_; }
  absl::StatusOr<char*> Reserve(std::int64_t bytes) override {
    if (bytes > bytes_) {
      if (auto s = Check("cudaFree", cudaFree(data_)); !s.ok()) return s;
      data_ = nullptr;
      bytes_ = 0;
      void* data = nullptr;
      if (auto s = Check("cudaMalloc", cudaMalloc(&data, static_cast<std::size_t>(bytes))); !s.ok()) return s;
      data_ = static_cast<char*>(data);
      bytes_ = bytes;
    }
    return data_;
  }
  absl::Status Write(char* to, const void* host, std::int64_t bytes) override {
    return Copy(to, host, bytes, cudaMemcpyHostToDevice);
  }
  absl::Status Read(void* host, const char* from, std::int64_t bytes) override {
    return Copy(host, from, bytes, cudaMemcpyDeviceToHost);
  }
  absl::StatusOr<std::string> IpcHandle() const override {
    cudaIpcMemHandle_t handle;
    if (auto s = Check("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, data_)); !s.ok()) return s;
    return std::string(handle.reserved, sizeof(handle.reserved));
  }
  absl::Status Synchronize() override {
    return Check("cudaStreamSynchronize", cudaStreamSynchronize(stream_));
  }
  absl::Status Register(std::span<char> host) override {
    if (auto s =
            Check("cudaHostRegister", cudaHostRegister(host.data(), host.size(), cudaHostRegisterMapped));
        !s.ok()) {
      return s;
    }
    registered_.push_back(host.data());
    return absl::OkStatus();
  }
  absl::Status Signal(std::uint64_t* counter, std::uint64_t value) override {
    static const auto write = FindInDriver<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64");
    if (!write.ok()) return write.status();
    const auto at = DeviceAddress(counter);
    if (!at.ok()) return at.status();
    return CheckDriver("cuStreamWriteValue64", (*write)(stream_, *at, value, CU_STREAM_WRITE_VALUE_DEFAULT));
  }
  absl::Status Await(const std::uint64_t* counter, std::uint64_t value) override {
    static const auto wait = FindInDriver<decltype(&cuStreamWaitValue64)>("cuStreamWaitValue64");
    if (!wait.ok()) return wait.status();
    const auto at = DeviceAddress(counter);
    if (!at.ok()) return at.status();
    return CheckDriver("cuStreamWaitValue64", (*wait)(stream_, *at, value, CU_STREAM_WAIT_VALUE_GEQ));
  }

 private:
  static absl::StatusOr<CUdeviceptr> DeviceAddress(const std::uint64_t* host) {
    void* device = nullptr;
    if (auto s = Check("cudaHostGetDevicePointer",
                       cudaHostGetDevicePointer(&device, const_cast<std::uint64_t*>(host), 0));
        !s.ok()) {
      return s;
    }
    return reinterpret_cast<CUdeviceptr>(device);
  }
  static absl::Status CheckDriver(const char* call, CUresult result) {
    return result == CUDA_SUCCESS ? absl::OkStatus() : Check(call, cudaErrorUnknown);
  }
  absl::Status Copy(void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
    if (auto s = Check("cudaMemcpyAsync",
                       cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream_));
        !s.ok()) {
      return s;
    }
    return Synchronize();
  }

  cudaStream_t stream_ = nullptr;
  std::vector<char*> registered_;
  char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StepMemory>> MakeCudaStepMemory(const std::string& device_uuid) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess || UuidText(properties.uuid) != device_uuid)
      continue;
    auto memory = std::make_unique<CudaStepMemory>();
    if (auto s = memory->Open(i); !s.ok()) return s;
    return memory;
  }
  return FromPlain(
      {kPlainFailedPrecondition, "DEVICE_NOT_VISIBLE",
       absl::StrCat(device_uuid, " is not one of the ", count, " devices that this process sees")});
}

}  // namespace kvsummary
