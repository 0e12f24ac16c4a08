#include "server/device/nvml.h"

#include <dlfcn.h>

#include <type_traits>

namespace kvsummary {
namespace {

// Of nvml.h, whose ABI is stable; the library comes with the driver.
struct NvmlMemory {
  unsigned long long total, free, used;
};

struct Nvml {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_uuid)(const char*, void**) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;

  bool Load() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed
    if (library == nullptr) return false;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return find("nvmlInit_v2", init) && find("nvmlShutdown", shutdown) &&
           find("nvmlDeviceGetHandleByUUID", device_by_uuid) && find("nvmlDeviceGetMemoryInfo", memory);
  }
};

}  // namespace

std::optional<std::int64_t> NvmlUsedBytes(const std::string& uuid) {
  Nvml nvml;
  if (!nvml.Load() || nvml.init() != 0) return std::nullopt;
  void* device = nullptr;
  NvmlMemory memory{};
  const bool known = nvml.device_by_uuid(uuid.c_str(), &device) == 0 && nvml.memory(device, &memory) == 0;
  nvml.shutdown();
  if (!known) return std::nullopt;
  return static_cast<std::int64_t>(memory.used);
}

}  // namespace kvsummary
