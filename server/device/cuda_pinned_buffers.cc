#include "server/device/cuda_pinned_buffers.h"

#include <algorithm>

namespace kvsummary {
namespace {

constexpr std::int64_t kMaxBuffer = 256 << 20;
constexpr std::int64_t kMaxBytes = 1 << 30;

cudaError_t Copy2D(char* to, const std::uint16_t* from, std::int64_t stride, std::int64_t width,
                   std::int64_t height, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, kRowBytes, from, static_cast<std::size_t>(stride) * sizeof(*from),
                           static_cast<std::size_t>(width), static_cast<std::size_t>(height),
                           cudaMemcpyHostToDevice, stream);
}

}  // namespace

void CudaPinnedBuffers::Pin(char* data, std::int64_t bytes) {
  if (bytes > kMaxBuffer || bytes_ + bytes > kMaxBytes) return;
  if (cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterDefault) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  void* seen = nullptr;
  if (cudaHostGetDevicePointer(&seen, data, 0) != cudaSuccess || seen != data) {
    cudaGetLastError();
    cudaHostUnregister(data);
    return;
  }
  bytes_at_[Address(data)] = bytes;
  bytes_ += bytes;
}

void CudaPinnedBuffers::Unpin(char* data) {
  const auto it = bytes_at_.find(Address(data));
  if (it == bytes_at_.end()) return;
  cudaHostUnregister(data);
  bytes_ -= it->second;
  bytes_at_.erase(it);
}

bool CudaPinnedBuffers::Hold(const RowsView& in, std::int64_t layers, std::int64_t rows) const {
  const auto extent = [&](std::int64_t layer_stride, std::int64_t stride) {
    return static_cast<std::uintptr_t>(((layers - 1) * layer_stride + (rows - 1) * stride) * 2 +
                                       kRowBytes / 2);
  };
  auto it = bytes_at_.upper_bound(std::min(Address(in.key), Address(in.z)));
  if (it == bytes_at_.begin()) return false;
  --it;
  const std::uintptr_t end = it->first + static_cast<std::uintptr_t>(it->second);
  return Address(in.key) + extent(in.key_layer_stride, in.key_stride) <= end &&
         Address(in.z) + extent(in.z_layer_stride, in.z_stride) <= end;
}

cudaError_t CopyPinnedRows(char* to, const RowsView& in, std::int64_t layers, std::int64_t rows,
                           cudaStream_t stream) {
  if (in.key_layer_stride == rows * in.key_stride && in.z_layer_stride == rows * in.z_stride) {
    rows *= layers;
    layers = 1;
  }
  const bool whole = in.z == in.key + kChannels && in.key_stride == in.z_stride &&
                     in.key_layer_stride == in.z_layer_stride && in.key_stride >= kRowElements;
  for (std::int64_t layer = 0; layer < layers; ++layer, to += rows * kRowBytes) {
    if (whole && in.key_stride == kRowElements) {
      const auto bytes = static_cast<std::size_t>(rows * kRowBytes);
      const cudaError_t error =
          cudaMemcpyAsync(to, in.key + layer * in.key_layer_stride, bytes, cudaMemcpyHostToDevice, stream);
      if (error != cudaSuccess) return error;
      continue;
    }
    const std::uint16_t* key = in.key + layer * in.key_layer_stride;
    const std::uint16_t* z = in.z + layer * in.z_layer_stride;
    cudaError_t error = Copy2D(to, key, in.key_stride, whole ? kRowBytes : kRowBytes / 2, rows, stream);
    if (error == cudaSuccess && !whole)
      error = Copy2D(to + kRowBytes / 2, z, in.z_stride, kRowBytes / 2, rows, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kvsummary
