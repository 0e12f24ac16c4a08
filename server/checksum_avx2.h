// XXH3 in AVX2. Call it only on a CPU that has that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvsummary {

// XXH3_64bits_withSeed.
std::uint64_t ChecksumAvx2(const void* bytes, std::size_t count, std::uint64_t seed);

}  // namespace kvsummary
