// The summary arithmetic on the GPU: eight rows of packed bf16 pairs in, e4m3 bytes out. Every float
// operation is rounded by itself (explicit _rn intrinsics) and exp is CUDA's expf, so the bytes equal
// those of kernels/summary_math.h on the host.
//
// A region's 256 channels lie on T threads, V = 256 / T channels each, as V / 2 words of two channels
// (the lower half-word is the even channel).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/layout.h"

namespace kvsummary::cuda {

static_assert(kRegionTokens == 8, "row maxima are kept as four pairs of bf16");
static_assert(kChannels == 256 && kRowElements == 512 && kSummaryBytes == 256);

inline constexpr unsigned kFullWarp = 0xffffffffu;

// max() that gives NaN when either side is NaN, as the arithmetic asks; fmaxf does not.
__device__ __forceinline__ float NanMax(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ std::uint32_t NanMaxPair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Channel i of a run of bf16 pairs, widened.
template <int N>
__device__ __forceinline__ float Widen(const std::uint32_t (&pairs)[N], int i) {
  const std::uint32_t pair = pairs[i / 2];
  return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}

// Maxima of the eight rows of a region, two rows a word.
struct RowMaxima {
  std::uint32_t pair[4];

  __device__ __forceinline__ float row(int t) const { return Widen(pair, t); }
  __device__ __forceinline__ void Merge(const RowMaxima& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = NanMaxPair(pair[i], other.pair[i]);
  }
  // Afterwards every lane of the warp holds the maxima over all its lanes.
  __device__ __forceinline__ void ReduceWarp() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = NanMaxPair(pair[i], __shfl_xor_sync(kFullWarp, pair[i], offset));
    }
  }
};

// The maxima over one thread's channels.
template <int N>
__device__ __forceinline__ RowMaxima ThreadMaxima(const std::uint32_t (&z)[kRegionTokens][N]) {
  RowMaxima m;
#pragma unroll
  for (int t = 0; t < kRegionTokens; t += 2) {
    std::uint32_t a = z[t][0], b = z[t + 1][0];
#pragma unroll
    for (int i = 1; i < N; ++i) {
      a = NanMaxPair(a, z[t][i]);
      b = NanMaxPair(b, z[t + 1][i]);
    }
    // Even and odd channels of both rows side by side: row t in the lower half, t + 1 in the upper.
    m.pair[t / 2] = NanMaxPair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
  return m;
}

// num / max(den, 1e-20) through bf16 to e4m3.
__device__ __forceinline__ std::uint8_t Quantize(float num, float den) {
  const float q = __fdiv_rn(num, NanMax(den, 1e-20f));
  return __nv_cvt_float_to_fp8(__bfloat162float(__float2bfloat16_rn(q)), __NV_SATFINITE, __NV_E4M3);
}

// Summary bytes of one thread's channels. Throughput form: few registers; rescaling is skipped, for the
// whole warp alike, where a row does not raise the maximum.
template <int N>
__device__ __forceinline__ void Summarize(const std::uint32_t (&k)[kRegionTokens][N],
                                          const std::uint32_t (&z)[kRegionTokens][N], const RowMaxima& maxima,
                                          std::uint8_t (&out)[2 * N]) {
  float num[2 * N], den[2 * N];
  float m = -INFINITY;
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) num[i] = den[i] = 0.0f;
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const float raised = NanMax(m, maxima.row(t));
    if (raised != m) {  // NaN comes this way too
      const float scale = expf(__fsub_rn(m, raised));
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        const float s = den[i] > 0.0f ? scale : 0.0f;
        num[i] = __fmul_rn(num[i], s);
        den[i] = __fmul_rn(den[i], s);
      }
    } else {
      // s is exp(0) = 1 where den > 0 and 0 elsewhere: that keeps a zero's sign and makes NaN of infinity.
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        if (den[i] > 0.0f) continue;
        num[i] = __fmul_rn(num[i], 0.0f);
        den[i] = __fmul_rn(den[i], 0.0f);
      }
    }
    m = raised;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      const float w = expf(__fsub_rn(Widen(z[t], i), m));
      num[i] = __fadd_rn(num[i], __fmul_rn(w, Widen(k[t], i)));
      den[i] = __fadd_rn(den[i], w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) out[i] = Quantize(num[i], den[i]);
}

// The same bytes. Latency form: all exponentials first, side by side and without a branch; only the
// chain of eight multiply-adds is sequential.
template <int N>
__device__ __forceinline__ void SummarizeFlat(const std::uint32_t (&k)[kRegionTokens][N],
                                              const std::uint32_t (&z)[kRegionTokens][N],
                                              const RowMaxima& maxima, std::uint8_t (&out)[2 * N]) {
  float m[kRegionTokens], scale[kRegionTokens], w[kRegionTokens][2 * N];
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    m[t] = NanMax(t ? m[t - 1] : -INFINITY, maxima.row(t));
    scale[t] = t ? expf(__fsub_rn(m[t - 1], m[t])) : 0.0f;
  }
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) w[t][i] = expf(__fsub_rn(Widen(z[t], i), m[t]));
  }
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    float num = 0.0f, den = 0.0f;
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
      const float s = den > 0.0f ? scale[t] : 0.0f;
      num = __fadd_rn(__fmul_rn(num, s), __fmul_rn(w[t][i], Widen(k[t], i)));
      den = __fadd_rn(__fmul_rn(den, s), w[t][i]);
    }
    out[i] = Quantize(num, den);
  }
}

}  // namespace kvsummary::cuda
