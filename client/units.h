// Byte counts as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvsummary {

// "8GiB", "64 KiB", "10MB" or plain bytes ("4096", "4096B"). KiB to TiB count by 1024, KB to TB by 1000;
// case does not matter. INVALID_ARGUMENT for anything else, and for more than 2^63 - 1 bytes.
absl::StatusOr<std::int64_t> ParseBytes(std::string_view text);

// "512 B", "1.5 KiB", "8.0 GiB": the largest binary unit that leaves at least 1, one decimal.
std::string FormatBytes(std::int64_t bytes);

}  // namespace kvsummary
