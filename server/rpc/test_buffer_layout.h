// Where the tests of the shared planes put things in a worker's buffer.
#pragma once

#include <cstdint>

namespace kvsummary {

inline constexpr std::int64_t kBufferBytes = 1 << 20;

// Bytes from the buffer's beginning.
inline constexpr std::int64_t kReady = 0;
inline constexpr std::int64_t kDone = 64;
inline constexpr std::int64_t kSlots = 4096;
inline constexpr std::int64_t kPositions = 8192;
inline constexpr std::int64_t kStarts = 12288;
inline constexpr std::int64_t kLens = 16384;
inline constexpr std::int64_t kBases = 20480;
inline constexpr std::int64_t kRows = 65536;

}  // namespace kvsummary
