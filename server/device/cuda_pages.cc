#include "server/device/cuda_pages.h"

#include <cstring>
#include <string>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::size_t kMinStageBytes = std::size_t{1} << 18;
constexpr std::size_t kCounterBytes = 16;  // the skipped pages, first in the stage

std::size_t Bytes(std::size_t count, std::size_t size) {
  return (count * size + kCudaMoveAlignment - 1) / kCudaMoveAlignment * kCudaMoveAlignment;
}

}  // namespace

absl::StatusOr<std::shared_ptr<void>> MapCudaHost(const CudaDeviceId& device, void* data,
                                                  std::int64_t bytes) {
  const cudaError_t error = cudaHostRegister(data, static_cast<std::size_t>(bytes),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error ==
      cudaErrorHostMemoryAlreadyRegistered) {  // by another device: portable, so it is pinned here too
    cudaGetLastError();
    return std::shared_ptr<void>();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Refuse(error == cudaErrorMemoryAllocation ? Reason::OUT_OF_MEMORY : Reason::DEVICE_FAILED, "",
                  absl::StrFormat("%s cannot pin %d bytes of host memory: %s", device.name, bytes,
                                  cudaGetErrorString(error)));
  }
  return std::shared_ptr<void>(data, [](void* registered) { cudaHostUnregister(registered); });
}

bool EnableCudaPeer(const CudaDeviceId& device, const CudaDeviceId& other) {
  int can = 0;
  if (cudaDeviceCanAccessPeer(&can, device.ordinal, other.ordinal) != cudaSuccess || can == 0) return false;
  const cudaError_t error = cudaDeviceEnablePeerAccess(other.ordinal, 0);
  if (error != cudaSuccess) cudaGetLastError();  // enabled before, or refused
  return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
}

bool CudaPageStage::Did(cudaError_t error) {
  if (error != cudaSuccess && error_ == cudaSuccess) error_ = error;
  return error == cudaSuccess;
}

bool CudaPageStage::Reserve(std::size_t bytes) {
  // That there is no memory now is no fault of the device's: an engine may have taken all of it.
  const auto took = [this](cudaError_t error) {
    if (error != cudaErrorMemoryAllocation) return Did(error);
    cudaGetLastError();
    return false;
  };
  if (start_ == nullptr && !(Did(cudaEventCreate(&start_)) && Did(cudaEventCreate(&end_)))) return false;
  if (bytes <= bytes_) return true;
  std::size_t wanted = kMinStageBytes;
  while (wanted < bytes) wanted *= 2;
  if (device_ != nullptr) cudaFree(device_);
  if (host_ != nullptr) cudaFreeHost(host_);
  device_ = nullptr;
  host_ = nullptr;
  bytes_ = 0;
  void* device = nullptr;
  void* host = nullptr;
  if (!took(cudaMalloc(&device, wanted))) return false;
  device_ = static_cast<char*>(device);
  if (!took(cudaHostAlloc(&host, wanted, cudaHostAllocDefault))) return false;
  host_ = static_cast<char*>(host);
  bytes_ = wanted;
  return true;
}

void CudaPageStage::Free() {
  if (device_ != nullptr) cudaFree(device_);
  if (host_ != nullptr) cudaFreeHost(host_);
  if (start_ != nullptr) cudaEventDestroy(start_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

absl::StatusOr<std::chrono::nanoseconds> CudaPageStage::Move(cudaStream_t stream, const PageSet& from,
                                                             std::span<const std::int64_t> from_blocks,
                                                             const PageSet& to,
                                                             std::span<const std::int64_t> to_blocks) {
  const auto failed = [this] { return absl::InternalError(cudaGetErrorString(error_)); };
  if (from_blocks.empty()) return std::chrono::nanoseconds(0);
  const std::size_t views_bytes = Bytes(static_cast<std::size_t>(from.view_count), sizeof(PageView));
  const std::size_t ids_bytes = Bytes(from_blocks.size(), sizeof(std::int64_t));
  const std::size_t bytes = kCounterBytes + 2 * (views_bytes + ids_bytes);
  if (!Reserve(bytes)) {
    if (error_ != cudaSuccess) return failed();
    return Refuse(Reason::OUT_OF_MEMORY, "",
                  absl::StrFormat("no %d bytes for the views and ids of a movement", bytes));
  }

  std::size_t offset = kCounterBytes;
  const auto stage = [&](const auto* values, std::size_t count, std::size_t room) {
    std::memcpy(host_ + offset, values, count * sizeof(*values));
    const auto* staged = reinterpret_cast<decltype(values)>(device_ + offset);
    offset += room;
    return staged;
  };
  std::memset(host_, 0, kCounterBytes);
  PageSet staged_from = from;
  PageSet staged_to = to;
  staged_from.views = stage(from.views, static_cast<std::size_t>(from.view_count), views_bytes);
  staged_to.views = stage(to.views, static_cast<std::size_t>(to.view_count), views_bytes);
  const std::int64_t* from_ids = stage(from_blocks.data(), from_blocks.size(), ids_bytes);
  const std::int64_t* to_ids = stage(to_blocks.data(), to_blocks.size(), ids_bytes);
  auto* skipped = reinterpret_cast<unsigned long long*>(device_);

  if (!Did(cudaMemcpyAsync(device_, host_, bytes, cudaMemcpyHostToDevice, stream)) ||
      !Did(cudaEventRecord(start_, stream))) {
    return failed();
  }
  const int launched = CudaPages()->Copy(staged_from, from_ids, staged_to, to_ids,
                                         static_cast<std::int64_t>(from_blocks.size()),
                                         {.stream = stream, .skipped = skipped});
  if (launched == kInvalidMove) return absl::InternalError("no such movement of pages is possible");
  float milliseconds = 0;
  if (!Did(static_cast<cudaError_t>(launched)) || !Did(cudaEventRecord(end_, stream)) ||
      !Did(cudaMemcpyAsync(host_, skipped, kCounterBytes, cudaMemcpyDeviceToHost, stream)) ||
      !Did(cudaStreamSynchronize(stream)) || !Did(cudaEventElapsedTime(&milliseconds, start_, end_))) {
    return failed();
  }
  std::uint64_t skipped_pages = 0;
  std::memcpy(&skipped_pages, host_, sizeof(skipped_pages));
  if (skipped_pages != 0) {
    return absl::InternalError(absl::StrFormat("%d of %d pages of %d bytes could not be moved", skipped_pages,
                                               from_blocks.size(), from.page_bytes));
  }
  return std::chrono::nanoseconds(static_cast<std::int64_t>(milliseconds * 1e6F));
}

}  // namespace kvsummary
