#include "server/checksum.h"

#include "server/checksum_avx2.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvsummary {

std::uint64_t Checksum(const void* bytes, std::size_t count, std::uint64_t seed) {
  static const bool avx2 = __builtin_cpu_supports("avx2");
  return avx2 ? ChecksumAvx2(bytes, count, seed) : XXH3_64bits_withSeed(bytes, count, seed);
}

}  // namespace kvsummary
