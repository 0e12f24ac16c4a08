#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda_probe.h"

namespace kvsummary {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCtas = 4096;

__device__ __forceinline__ std::int64_t GlobalThread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ __forceinline__ std::int64_t GridThreads() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void __launch_bounds__(kThreads) Probe(float* out, std::int64_t n) {
  for (std::int64_t i = GlobalThread(); i < n; i += GridThreads())
    out[i] = expf(__uint_as_float(ProbeArgument(i, n)));
}

__global__ void __launch_bounds__(kThreads)
    Digest(std::uint32_t first, std::uint32_t last, unsigned long long* digest) {
  std::uint64_t sum = 0;
  for (std::int64_t bits = first + GlobalThread(); bits <= last; bits += GridThreads()) {
    const auto argument = static_cast<std::uint32_t>(bits);
    sum += ExpfDigestShare(argument, __float_as_uint(expf(__uint_as_float(argument))));
  }
  atomicAdd(digest, sum);
}

template <typename... Params, typename... Args>
int LaunchOver(void (*kernel)(Params...), std::int64_t n, void* stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::clamp<std::int64_t>(n / kThreads, 1, kMaxCtas)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

int LaunchExpfProbe(float* out, std::int64_t n, void* stream) { return LaunchOver(Probe, n, stream, out, n); }

int LaunchExpfDigest(std::uint32_t first, std::uint32_t last, unsigned long long* digest, void* stream) {
  return LaunchOver(Digest, std::int64_t{last} - first + 1, stream, first, last, digest);
}

}  // namespace kvsummary
