// Checks of what a client asks for when it makes a cache. Pure.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/layout.h"

namespace kvsummary {

inline constexpr std::int32_t kMaxBlockSize = 32768;  // a page is then 1 MiB: it fits a message
inline constexpr std::int32_t kMaxCapacity = 1024;    // and so is a tail
inline constexpr std::int32_t kMaxLayers = 1024;      // a cache's layout fits a message

// The geometry with its defaults filled in (block_stride and rows_per_layer of 0), or a refusal that names
// a field of kvsummary.v1.CacheGeometry. total_bytes() of the result does not overflow.
absl::StatusOr<CacheGeometry> CheckGeometry(CacheGeometry geometry);

}  // namespace kvsummary
