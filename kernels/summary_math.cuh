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

// num / max(den, 1e-20) through bf16 to e4m3, of two channels: the lower byte is the first one's.
__device__ __forceinline__ std::uint16_t QuantizePair(float num0, float den0, float num1, float den1) {
  const float q0 = __fdiv_rn(num0, NanMax(den0, 1e-20f));
  const float q1 = __fdiv_rn(num1, NanMax(den1, 1e-20f));
  const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(q0, q1));
  return __nv_cvt_float2_to_fp8x2(rounded, __NV_SATFINITE, __NV_E4M3);
}

// Summary bytes of one thread's channels, two a half-word. Throughput form: few registers, and a row that
// does not raise the maximum rescales nothing. That is exact. Where den > 0 the factor is exp(0) = 1. Where
// den is 0 or NaN the factor is 0, and num stays what it is if it is a zero or NaN, which holds as soon as
// it has been multiplied by 0 once: done right after the only rows that can bring den to 0 under another
// num, those that raise the maximum. (The first row cannot: there num is w * k with w = den.)
template <int N>
__device__ __forceinline__ void Summarize(const std::uint32_t (&k)[kRegionTokens][N],
                                          const std::uint32_t (&z)[kRegionTokens][N], const RowMaxima& maxima,
                                          std::uint16_t (&out)[N]) {
  float num[2 * N], den[2 * N];
  float m = NanMax(-INFINITY, maxima.row(0));
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    den[i] = expf(__fsub_rn(Widen(z[0], i), m));
    num[i] = __fadd_rn(0.0f, __fmul_rn(den[i], Widen(k[0], i)));
  }
#pragma unroll
  for (int t = 1; t < kRegionTokens; ++t) {
    const float raised = NanMax(m, maxima.row(t));
    const bool rescale = raised != m;  // alike in all threads; NaN comes this way too
    if (rescale) {
      const float scale = expf(__fsub_rn(m, raised));
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        const float s = den[i] > 0.0f ? scale : 0.0f;
        num[i] = __fmul_rn(num[i], s);
        den[i] = __fmul_rn(den[i], s);
      }
      m = raised;
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      const float w = expf(__fsub_rn(Widen(z[t], i), m));
      num[i] = __fadd_rn(num[i], __fmul_rn(w, Widen(k[t], i)));
      den[i] = __fadd_rn(den[i], w);
    }
    if (rescale && t < kRegionTokens - 1) {
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) num[i] = den[i] > 0.0f ? num[i] : __fmul_rn(num[i], 0.0f);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = QuantizePair(num[2 * i], den[2 * i], num[2 * i + 1], den[2 * i + 1]);
}

// The same bytes. Latency form: all exponentials first, side by side and without a branch; only the
// chain of eight multiply-adds is sequential.
template <int N>
__device__ __forceinline__ void SummarizeFlat(const std::uint32_t (&k)[kRegionTokens][N],
                                              const std::uint32_t (&z)[kRegionTokens][N],
                                              const RowMaxima& maxima, std::uint16_t (&out)[N]) {
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
  for (int i = 0; i < N; ++i) {
    float num[2] = {}, den[2] = {};
#pragma unroll
    for (int t = 0; t < kRegionTokens; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float s = den[c] > 0.0f ? scale[t] : 0.0f;
        const float weight = w[t][2 * i + c];
        num[c] = __fadd_rn(__fmul_rn(num[c], s), __fmul_rn(weight, Widen(k[t], 2 * i + c)));
        den[c] = __fadd_rn(__fmul_rn(den[c], s), weight);
      }
    }
    out[i] = QuantizePair(num[0], den[0], num[1], den[1]);
  }
}

}  // namespace kvsummary::cuda
