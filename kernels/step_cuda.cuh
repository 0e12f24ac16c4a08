// What the three CUDA updates share: the view as the GPU reads it, row loads, ring addresses, the region
// that a CTA closes, the count of bad rows. Layers lie on blockIdx.y in every kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/layout.h"
#include "kernels/summary_math.cuh"
#include "kernels/update.h"

namespace kvsummary::cuda {

// Division by a number that the host knows: two multiplications instead of a hundred cycles.
class Divider {
 public:
  // 1 <= divisor < 2^31.
  explicit Divider(std::int64_t divisor) : divisor_(static_cast<std::uint32_t>(divisor)) {
    while ((std::int64_t{1} << shift_) < divisor) ++shift_;
    const std::uint64_t scaled = std::uint64_t{1} << (31 + shift_);
    multiplier_ = static_cast<std::uint32_t>((scaled + divisor_ - 1) / divisor_);
  }
  // Exact for n < 2^31: the multiplier exceeds 2^(31 + shift) / divisor by less than 2^shift / divisor.
  __device__ __forceinline__ std::uint32_t Quotient(std::uint32_t n) const {
    return __umulhi(n << 1, multiplier_) >> shift_;
  }
  __device__ __forceinline__ std::uint32_t Remainder(std::uint32_t n) const {
    return n - Quotient(n) * divisor_;
  }
  __device__ __forceinline__ std::uint32_t divisor() const { return divisor_; }

 private:
  std::uint32_t divisor_, multiplier_, shift_ = 0;
};

// A CacheView in 32-bit arithmetic. Needs what every cache keeps to: at most kMaxIndex slots and ring rows,
// capacity <= rows_per_block.
struct DeviceView {
  std::uint8_t* summaries;
  std::int64_t block_stride, layer_stride;
  std::uint16_t* ring;
  std::int64_t ring_layer_stride;
  std::uint32_t slots, ring_rows;  // outside the null blocks
  Divider block_size, rows_per_block, capacity;

  explicit DeviceView(const CacheView& v)
      : summaries(v.summaries),
        block_stride(v.block_stride),
        layer_stride(v.layer_stride),
        ring(v.ring),
        ring_layer_stride(v.ring_layer_stride),
        slots(static_cast<std::uint32_t>(std::max<std::int64_t>(v.blocks - 1, 0) * v.block_size)),
        ring_rows(
            static_cast<std::uint32_t>(std::max<std::int64_t>(v.ring_blocks - 1, 0) * v.rows_per_block)),
        block_size(v.block_size),
        rows_per_block(v.rows_per_block),
        capacity(v.capacity) {}

  // The rule of ClassifyRow.
  __device__ __forceinline__ RowState Classify(std::int64_t slot, std::int64_t position,
                                               std::int64_t base) const {
    if ((slot | base) < 0) return RowState::kPadding;
    const auto s = static_cast<std::uint32_t>(slot);
    const auto p = static_cast<std::uint32_t>(position);
    const auto b = static_cast<std::uint32_t>(base);
    const bool narrow = static_cast<std::uint64_t>(slot | position | base) <= kMaxIndex;
    const bool good = narrow && s - block_size.divisor() < slots &&
                      b - rows_per_block.divisor() < ring_rows && (s - p) % kRegionTokens == 0 &&
                      rows_per_block.Remainder(b) == 0;
    return good ? RowState::kLive : RowState::kBad;
  }
  __device__ __forceinline__ bool Live(std::int64_t slot, std::int64_t position, std::int64_t base) const {
    return Classify(slot, position, base) == RowState::kLive;
  }
  // Of a live row's slot.
  __device__ __forceinline__ std::uint8_t* summary(std::int64_t layer, std::int64_t slot) const {
    const auto s = static_cast<std::uint32_t>(slot);
    const std::uint32_t block = block_size.Quotient(s);
    return summaries + layer * layer_stride + block * block_stride +
           (s - block * block_size.divisor()) / kRegionTokens * kSummaryBytes;
  }
};

// Whether kernels can run on this view without harm to anything beside it.
inline bool Usable(const CacheView& v, int least_capacity) {
  return v.block_size > 0 && v.capacity >= least_capacity && v.rows_per_block >= v.capacity;
}

// The ring rows of eight positions in a row, of one request in one layer: a modulo once, then steps.
class RingRows {
 public:
  __device__ __forceinline__ RingRows(const DeviceView& v, std::int64_t layer, std::int64_t base,
                                      std::int64_t first_position)
      : ring_(v.ring + (layer * v.ring_layer_stride + base) * kRowElements),
        capacity_(v.capacity.divisor()),
        at_(v.capacity.Remainder(static_cast<std::uint32_t>(first_position))) {}
  // Of first_position + t, 0 <= t < 8; for capacities from 7 on.
  __device__ __forceinline__ std::uint16_t* row(int t) const {
    return ring_ + static_cast<std::int64_t>(Wrap(at_ + t)) * kRowElements;
  }
  // Of the eight positions that follow; for capacities from 8 on.
  __device__ __forceinline__ RingRows Next() const {
    RingRows next = *this;
    next.at_ = Wrap(at_ + kRegionTokens);
    return next;
  }

 private:
  __device__ __forceinline__ std::uint32_t Wrap(std::uint32_t at) const { return min(at, at - capacity_); }

  std::uint16_t* ring_;
  std::uint32_t capacity_, at_;
};

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

// Thread `thread` of those that share a row holds its channels 2 * N * thread and on.
template <int N>
__device__ __forceinline__ void Load(std::uint32_t (&out)[N], const std::uint16_t* row, int thread) {
  struct alignas(4 * N) Words {
    std::uint32_t word[N];
  };
  const Words w = reinterpret_cast<const Words*>(row)[thread];
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = w.word[i];
}
template <int N>
__device__ __forceinline__ void Store(std::uint16_t* row, const std::uint32_t (&in)[N], int thread) {
  struct alignas(4 * N) Words {
    std::uint32_t word[N];
  } w;
#pragma unroll
  for (int i = 0; i < N; ++i) w.word[i] = in[i];
  reinterpret_cast<Words*>(row)[thread] = w;
}
template <int N>
__device__ __forceinline__ void StoreSummary(std::uint8_t* summary, const std::uint16_t (&pairs)[N],
                                             int thread) {
  struct alignas(2 * N) Bytes {
    std::uint16_t pair[N];
  } b;
#pragma unroll
  for (int i = 0; i < N; ++i) b.pair[i] = pairs[i];
  reinterpret_cast<Bytes*>(summary)[thread] = b;
}

// The least capacity that holds an open region.
inline constexpr int kMinCapacity = kRegionTokens - 1;

// Where a whole CTA works on one row or region, a team of 128 / N threads with 2 * N channels each: the way
// to little latency. N = 1 has the least, N = 2 the least work in all.
template <int N>
inline constexpr int kTeamThreads = kChannels / (2 * N);

// Writes the region's summary. All threads of the CTA call it; before another call, a barrier.
template <int N>
__device__ __forceinline__ void CloseRegion(std::uint8_t* summary, const RegionPart<N>& rows) {
  constexpr int kWarps = kTeamThreads<N> / 32;
  static_assert(kWarps > 1 && kWarps * 32 * 2 * N == kChannels);
  __shared__ uint4 shared[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  RowMaxima maxima = ThreadMaxima(rows);
  maxima.ReduceWarp();
  const auto& p = maxima.pair;
  if (thread % 32 == 0) shared[thread / 32] = make_uint4(p[0], p[1], p[2], p[3]);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const uint4 o = shared[i];
    maxima.Merge(RowMaxima{{o.x, o.y, o.z, o.w}});
  }
  std::uint16_t out[N];
  SummarizeFlat(rows, maxima, out);
  StoreSummary(summary, out, thread);
}

__device__ __forceinline__ bool Closes(std::int64_t position) {
  return position % kRegionTokens == kRegionTokens - 1;
}

// One thread a bad row (or a bad request) calls this, in every layer.
__device__ __forceinline__ void CountSkipped(unsigned long long* skipped) {
  if (skipped) atomicAdd(skipped, 1ull);
}

// Whether [start, end) is a run of the step's rows.
__device__ __forceinline__ bool GoodRange(int start, int end, int rows) {
  return 0 <= start && start <= end && end <= rows;
}

// The first statement of every kernel. LaunchGrid lets a kernel's CTAs be set up while the stream's earlier
// work still ends; here they wait until it has ended and its writes are visible.
__device__ __forceinline__ void AwaitStream() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Queues kernel(args...) on a grid of `width` CTAs a layer.
template <typename... Params, typename... Args>
int LaunchGrid(void (*kernel)(Params...), std::int64_t width, int layers, int threads, void* stream,
               const Args&... args) {
  if (width <= 0 || layers <= 0) return cudaSuccess;
  int device = 0, major = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      e != cudaSuccess) {
    return e;
  }
  cudaLaunchAttribute set_up_early = {};
  set_up_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  set_up_early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(width), static_cast<unsigned>(layers));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &set_up_early;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvsummary::cuda
