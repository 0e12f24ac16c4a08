// XXH3 of bytes that are kept or sent: 64 bits, seed 0.
#pragma once

#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvsummary {

inline std::uint64_t Checksum(const void* bytes, std::size_t count) { return XXH3_64bits(bytes, count); }

}  // namespace kvsummary
