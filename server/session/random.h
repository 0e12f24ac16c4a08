// Secrets.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvsummary {

// Bytes of the kernel's generator.
absl::StatusOr<std::string> RandomBytes(std::size_t count);

}  // namespace kvsummary
