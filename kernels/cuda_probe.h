// Proof that a CUDA device's expf is the exp of the summary arithmetic (kernels/exp.h). The model was
// measured on one architecture; a daemon probes every device before it trusts it, and the GPU test walks
// all negative floats. Arguments of the arithmetic are never positive.
//
// Everything here is queued on a stream, allocates nothing and returns 0 or a cudaError_t.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace kvsummary {

inline constexpr std::uint32_t kFirstNegativeFloat = 0x80000000;  // -0
inline constexpr std::uint32_t kLastNegativeFloat = 0xff800000;   // -infinity

// Bits of argument i of a probe of n > 1: spread evenly over the negative floats' bit patterns, from -0
// over the subnormals to -infinity.
KVSUMMARY_HOST_DEVICE inline std::uint32_t ProbeArgument(std::int64_t i, std::int64_t n) {
  constexpr std::int64_t kSpan = kLastNegativeFloat - kFirstNegativeFloat;
  return kFirstNegativeFloat + static_cast<std::uint32_t>(i * kSpan / (n - 1));
}

// out[i] = expf of ProbeArgument(i, n), for n values of device memory.
int LaunchExpfProbe(float* out, std::int64_t n, void* stream);

// The share of one argument in a digest; shares are summed modulo 2^64, in any order.
KVSUMMARY_HOST_DEVICE inline std::uint64_t ExpfDigestShare(std::uint32_t argument, std::uint32_t result) {
  std::uint64_t x = argument * 0x9E3779B97F4A7C15u ^ result * 0xC2B2AE3D27D4EB4Fu;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ x >> 32;
}

// The digest over all negative floats on the architecture that was measured (sm_90).
inline constexpr std::uint64_t kExpfDigest = 0x42590d1b86aeea08;

// Adds the digest of arguments [first, last] to *digest in device memory.
int LaunchExpfDigest(std::uint32_t first, std::uint32_t last, unsigned long long* digest, void* stream);

}  // namespace kvsummary
