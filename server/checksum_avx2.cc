// All of xxhash.h is static here: no function compiled for AVX2 can be taken by callers on a CPU without it.
#include "server/checksum_avx2.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(XXH_VECTOR == XXH_AVX2);

namespace kvsummary {

std::uint64_t ChecksumAvx2(const void* bytes, std::size_t count, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, count, seed);
}

}  // namespace kvsummary
