// Names of caches and sessions.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace kvsummary {

inline constexpr std::size_t kMaxNameBytes = 128;

// OK for 1 to 128 letters, digits, '.', '_', ':', '/' and '-'; else NAME_INVALID.
absl::Status CheckName(const std::string& name);

}  // namespace kvsummary
