// What the three CUDA updates share: the order of work inside a CTA, row loads, ring addresses and the
// count of bad rows. Layers lie on blockIdx.y in every kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/layout.h"
#include "kernels/summary_math.cuh"
#include "kernels/update.h"

namespace kvsummary::cuda {

// The words of one thread: `Words` pairs of channels, from channel 2 * Words * thread on.
template <int Words>
struct alignas(4 * Words) Chunk {
  std::uint32_t word[Words];
};

template <int Words>
__device__ __forceinline__ const std::uint16_t* ThreadPart(const std::uint16_t* row, int thread) {
  return row + thread * 2 * Words;
}

template <int Words>
__device__ __forceinline__ void Load(std::uint32_t (&out)[Words], const std::uint16_t* row, int thread) {
  const auto c = *reinterpret_cast<const Chunk<Words>*>(ThreadPart<Words>(row, thread));
#pragma unroll
  for (int i = 0; i < Words; ++i) out[i] = c.word[i];
}

template <int Words>
__device__ __forceinline__ void Store(std::uint16_t* row, const std::uint32_t (&in)[Words], int thread) {
  Chunk<Words> c;
#pragma unroll
  for (int i = 0; i < Words; ++i) c.word[i] = in[i];
  *reinterpret_cast<Chunk<Words>*>(row + thread * 2 * Words) = c;
}

// The summary bytes of one thread's channels.
template <int Words>
__device__ __forceinline__ void StoreSummary(std::uint8_t* summary, const std::uint16_t (&pairs)[Words],
                                             int thread) {
  struct alignas(2 * Words) Bytes {
    std::uint16_t pair[Words];
  } b;
#pragma unroll
  for (int i = 0; i < Words; ++i) b.pair[i] = pairs[i];
  *reinterpret_cast<Bytes*>(summary + thread * 2 * Words) = b;
}

// Rows of one layer.
struct LayerRows {
  const std::uint16_t* key;
  const std::uint16_t* z;
  std::int64_t key_stride;
  std::int64_t z_stride;

  __device__ __forceinline__ LayerRows(const RowsView& in, std::int64_t layer)
      : key(in.key + layer * in.key_layer_stride),
        z(in.z + layer * in.z_layer_stride),
        key_stride(in.key_stride),
        z_stride(in.z_stride) {}
  __device__ __forceinline__ const std::uint16_t* key_row(std::int64_t row) const {
    return key + row * key_stride;
  }
  __device__ __forceinline__ const std::uint16_t* z_row(std::int64_t row) const { return z + row * z_stride; }
};

// The ring of one request in one layer, around one position: a modulo once, then steps.
class RingWindow {
 public:
  // Rows are addressed by `row(offset)`, that of `position + offset`, -7 <= offset <= 7; any capacity from
  // 7 on, which holds for every cache.
  __device__ __forceinline__ RingWindow(const CacheView& v, std::int64_t layer, std::int64_t base,
                                        std::int64_t position)
      : ring_(v.ring + (layer * v.ring_layer_stride + base) * kRowElements),
        capacity_(v.capacity),
        at_(static_cast<int>(static_cast<std::uint32_t>(position) % static_cast<std::uint32_t>(v.capacity))) {
  }
  __device__ __forceinline__ std::uint16_t* row(int offset) const {
    int at = at_ + offset;
    if (at < 0) at += capacity_;
    if (at >= capacity_) at -= capacity_;
    return ring_ + static_cast<std::int64_t>(at) * kRowElements;
  }

 private:
  std::uint16_t* ring_;
  int capacity_;
  int at_;
};

// One thread a bad row (or a bad request) calls this, in every layer.
__device__ __forceinline__ void CountSkipped(unsigned long long* skipped) {
  if (skipped) atomicAdd(skipped, 1ull);
}

// Whether [start, end) is a run of the step's rows.
__device__ __forceinline__ bool GoodRange(int start, int end, int rows) {
  return 0 <= start && start <= end && end <= rows;
}

// The maxima over all threads of a CTA of `Warps` warps. Every thread must call it; `shared` may be used
// again after the next barrier.
template <int Warps>
__device__ __forceinline__ void ReduceCta(RowMaxima& m, uint4 (&shared)[Warps]) {
  m.ReduceWarp();
  if constexpr (Warps > 1) {
    if (threadIdx.x % 32 == 0)
      shared[threadIdx.x / 32] = make_uint4(m.pair[0], m.pair[1], m.pair[2], m.pair[3]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Warps; ++i) {
      const uint4 o = shared[i];
      m.Merge(RowMaxima{{o.x, o.y, o.z, o.w}});
    }
  }
}

// Queues kernel(args...) on a grid of `width` CTAs a layer.
template <typename... Params, typename... Args>
int LaunchGrid(void (*kernel)(Params...), std::int64_t width, int layers, int threads, void* stream,
               const Args&... args) {
  if (width <= 0 || layers <= 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(width), static_cast<unsigned>(layers));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvsummary::cuda
