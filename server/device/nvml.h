// What of a GPU's memory is in use, asked without a context on it: of NVIDIA's management library where there
// is one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvsummary {

// Bytes in use of the GPU "GPU-...", by all processes; nothing where nobody can tell. Takes milliseconds.
std::optional<std::int64_t> NvmlUsedBytes(const std::string& uuid);

}  // namespace kvsummary
