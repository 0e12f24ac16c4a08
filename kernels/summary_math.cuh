// The summary arithmetic on the GPU: eight rows of packed bf16 pairs in, e4m3 bytes out. Every float
// operation is rounded by itself (explicit _rn intrinsics) and exp has the bits of CUDA's expf, so the
// bytes equal those of kernels/summary_math.h on the host.
//
// A region's 256 channels lie on T threads, 2 * N = 256 / T channels each, as N words of two channels (the
// lower half-word is the even channel).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/layout.h"

namespace kvsummary::cuda {

static_assert(kRegionTokens == 8, "row maxima are kept as four pairs of bf16");
static_assert(kChannels == 256 && kRowElements == 512 && kSummaryBytes == 256);

inline constexpr unsigned kFullWarp = 0xffffffffu;

// One thread's part of a region, in position order.
template <int N>
struct RegionPart {
  std::uint32_t k[kRegionTokens][N];
  std::uint32_t z[kRegionTokens][N];
};

// max() that gives NaN when either side is NaN, as the arithmetic asks; fmaxf does not.
__device__ __forceinline__ float NanMax(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// A NaN comes out as 0x7fff.
__device__ __forceinline__ std::uint32_t NanMaxPair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ std::uint32_t MinPair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// The halves of a pair, widened.
__device__ __forceinline__ float Lower(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float Upper(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// Channel i of a run of pairs.
template <int N>
__device__ __forceinline__ float Channel(const std::uint32_t (&pairs)[N], int i) {
  return i % 2 ? Upper(pairs[i / 2]) : Lower(pairs[i / 2]);
}

// Sign bits of both halves, spread over the halves.
__device__ __forceinline__ std::uint32_t SpreadSigns(std::uint32_t pair) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(r) : "r"(pair));
  return r;
}

// Maxima of the eight rows of a region, two rows a word.
struct RowMaxima {
  std::uint32_t pair[4];

  __device__ __forceinline__ float row(int t) const { return Channel(pair, t); }
  __device__ __forceinline__ float all() const {
    const std::uint32_t m = NanMaxPair(NanMaxPair(pair[0], pair[1]), NanMaxPair(pair[2], pair[3]));
    return NanMax(Lower(m), Upper(m));
  }
  __device__ __forceinline__ void Merge(const RowMaxima& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = NanMaxPair(pair[i], other.pair[i]);
  }
  // Afterwards every lane of the warp holds the maxima over all its lanes. bf16 are compared as unsigned
  // halves in which negative values are complemented and others have the top bit set; NaN, which is 0x7fff
  // here, is the largest.
  __device__ __forceinline__ void ReduceWarp() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t ordered = pair[i] ^ (SpreadSigns(pair[i]) | 0x80008000u);
      const std::uint32_t upper = __reduce_max_sync(kFullWarp, ordered);
      const std::uint32_t lower = __reduce_max_sync(kFullWarp, ordered << 16);
      const std::uint32_t both = __byte_perm(lower, upper, 0x7632);
      pair[i] = both ^ (~SpreadSigns(both) | 0x80008000u);
    }
  }
};

// The row maxima over one thread's channels.
template <int N>
__device__ __forceinline__ RowMaxima ThreadMaxima(const RegionPart<N>& rows) {
  RowMaxima m;
#pragma unroll
  for (int t = 0; t < kRegionTokens; t += 2) {
    std::uint32_t a = rows.z[t][0], b = rows.z[t + 1][0];
#pragma unroll
    for (int i = 1; i < N; ++i) {
      a = NanMaxPair(a, rows.z[t][i]);
      b = NanMaxPair(b, rows.z[t + 1][i]);
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

// The arithmetic as it is written down, for any values.
template <int N>
__device__ __forceinline__ void SummarizeAny(const RegionPart<N>& rows, const RowMaxima& maxima,
                                             std::uint16_t (&out)[N]) {
  float num[2 * N] = {}, den[2 * N] = {};
  float m = -INFINITY;
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const float raised = NanMax(m, maxima.row(t));
    const float scale = expf(__fsub_rn(m, raised));
    m = raised;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      const float s = den[i] > 0.0f ? scale : 0.0f;
      const float w = expf(__fsub_rn(Channel(rows.z[t], i), m));
      num[i] = __fadd_rn(__fmul_rn(num[i], s), __fmul_rn(w, Channel(rows.k[t], i)));
      den[i] = __fadd_rn(__fmul_rn(den[i], s), w);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = QuantizePair(num[2 * i], den[2 * i], num[2 * i + 1], den[2 * i + 1]);
}

// A region is tame on a thread when all its z are finite and none is 87 or more below the region's maximum.
// Then every exponential of it is a normal float, every den stays above 0, and s is the exponential alone.
template <int N>
__device__ __forceinline__ bool Tame(const RegionPart<N>& rows, const RowMaxima& maxima) {
  std::uint32_t least = rows.z[0][0];
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
#pragma unroll
    for (int i = 0; i < N; ++i) least = MinPair(least, rows.z[t][i]);
  }
  return __fsub_rn(maxima.all(), fminf(Lower(least), Upper(least))) < 87.0f;  // not where it is NaN
}

// expf(a) for -87 < a <= 0: CUDA's own steps, but for the last. There the result is a power of two times
// ex2; here the power goes to the exponent by an addition. Its biased integer sits in the low bits of
// `shifted`, so that what is shifted out is just the bias.
__device__ __forceinline__ float ExpTame(float a) {
  constexpr float kShift = 12582912.0f + 512.0f - 126.0f;
  float t, r;
  asm("fma.rn.sat.f32 %0, %1, %2, 0f3F000000;" : "=f"(t) : "f"(a), "f"(0.0057249800302088261f));
  const float shifted = __fmaf_rd(t, 252.0f, kShift);
  const float whole = __fsub_rn(shifted, kShift + 126.0f);
  float f = __fmaf_rn(a, 1.4426950216293335f, -whole);
  f = __fmaf_rn(a, 1.9259629911266175e-8f, f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(f));
  return __uint_as_float((__float_as_uint(shifted) << 23) + __float_as_uint(r));
}

// Summary bytes of one thread's channels, two a half-word. Throughput form: few registers, and a row that
// does not raise the maximum rescales nothing (s is 1).
template <int N>
__device__ __forceinline__ void Summarize(const RegionPart<N>& rows, const RowMaxima& maxima,
                                          std::uint16_t (&out)[N]) {
  if (!__all_sync(kFullWarp, Tame(rows, maxima))) {
    SummarizeAny(rows, maxima, out);
    return;
  }
  float num[2 * N], den[2 * N];
  float m = maxima.row(0);
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    den[i] = ExpTame(__fsub_rn(Channel(rows.z[0], i), m));
    num[i] = __fadd_rn(0.0f, __fmul_rn(den[i], Channel(rows.k[0], i)));
  }
#pragma unroll
  for (int t = 1; t < kRegionTokens; ++t) {
    const float raised = fmaxf(m, maxima.row(t));
    float w[2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) w[i] = ExpTame(__fsub_rn(Channel(rows.z[t], i), raised));
    if (raised != m) {  // alike in all threads
      const float s = ExpTame(__fsub_rn(m, raised));
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) {
        num[i] = __fmul_rn(num[i], s);
        den[i] = __fmul_rn(den[i], s);
      }
      m = raised;
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      num[i] = __fadd_rn(num[i], __fmul_rn(w[i], Channel(rows.k[t], i)));
      den[i] = __fadd_rn(den[i], w[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = QuantizePair(num[2 * i], den[2 * i], num[2 * i + 1], den[2 * i + 1]);
}

// The same bytes. Latency form: all exponentials first, side by side and without a branch; only the
// chain of eight multiply-adds is sequential.
template <int N>
__device__ __forceinline__ void SummarizeFlat(const RegionPart<N>& rows, const RowMaxima& maxima,
                                              std::uint16_t (&out)[N]) {
  if (!Tame(rows, maxima)) {
    SummarizeAny(rows, maxima, out);
    return;
  }
  float s[kRegionTokens], w[kRegionTokens][2 * N];
  float m = maxima.row(0);
#pragma unroll
  for (int t = 0; t < kRegionTokens; ++t) {
    const float raised = fmaxf(m, maxima.row(t));
    s[t] = ExpTame(__fsub_rn(m, raised));
    m = raised;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) w[t][i] = ExpTame(__fsub_rn(Channel(rows.z[t], i), m));
  }
  float num[2 * N], den[2 * N];
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    num[i] = __fadd_rn(0.0f, __fmul_rn(w[0][i], Channel(rows.k[0], i)));
    den[i] = w[0][i];
#pragma unroll
    for (int t = 1; t < kRegionTokens; ++t) {
      num[i] = __fadd_rn(__fmul_rn(num[i], s[t]), __fmul_rn(w[t][i], Channel(rows.k[t], i)));
      den[i] = __fadd_rn(__fmul_rn(den[i], s[t]), w[t][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = QuantizePair(num[2 * i], den[2 * i], num[2 * i + 1], den[2 * i + 1]);
}

}  // namespace kvsummary::cuda
