#include "client/direct/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "client/descriptor_client.h"
#include "proto/descriptor_socket.h"

namespace kvsummary::direct {
namespace {

constexpr std::size_t kIpcHandleBytes = 64;

PlainStatus Invalid(std::string reason, std::string message) {
  return {kPlainInvalidArgument, std::move(reason), std::move(message)};
}

class HostMapping final : public Mapping {
 public:
  HostMapping(void* data, std::size_t bytes) : Mapping(data), bytes_(bytes) {}
  ~HostMapping() override { munmap(data(), bytes_); }
  const UpdateKernels& kernels() const override { return HostKernels(); }
  std::int64_t alignment() const override { return sizeof(std::uint16_t); }
  std::string ErrorText(int error) const override { return std::to_string(error); }

 private:
  const std::size_t bytes_;
};

OpenResult OpenMemfd(int descriptor, std::size_t bytes) {
  struct stat file = {};
  if (fstat(descriptor, &file) != 0 || !S_ISREG(file.st_mode)) {
    return {{kPlainInternal, "", "the daemon's descriptor is not one of a memfd"}, nullptr};
  }
  if (static_cast<std::uint64_t>(file.st_size) < bytes) {
    return {{kPlainInternal, "MEMFD_TOO_SMALL",
             "the daemon's memfd has " + std::to_string(file.st_size) + " bytes, the cache has " +
                 std::to_string(bytes)},
            nullptr};
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    return {
        {kPlainResourceExhausted, "", "mmap of " + std::to_string(bytes) + " bytes: " + std::strerror(errno)},
        nullptr};
  }
  // The daemon takes the mapping for gone when this process has ended: no child may have it from then on.
  madvise(data, bytes, MADV_DONTFORK);
  return {{}, std::make_unique<HostMapping>(data, bytes)};
}

PlainStatus CheckArguments(const kvs_map_args& args) {
  const bool host = args.kind == KVS_MEMFD;
  if (!host && args.kind != KVS_CUDA_VMM && args.kind != KVS_CUDA_IPC) {
    return Invalid("MEMORY_KIND_UNSUPPORTED", "kind is " + std::to_string(args.kind) + ", expected 1 to 3");
  }
  const std::size_t expected = args.kind == KVS_CUDA_IPC ? kIpcHandleBytes : std::size_t{kTicketBytes};
  if (args.handle == nullptr || args.handle_bytes != expected) {
    return Invalid("HANDLE_INVALID", "handle has " + std::to_string(args.handle_bytes) + " bytes, expected " +
                                         std::to_string(expected));
  }
  if (args.kind != KVS_CUDA_IPC && args.socket_path == nullptr) {
    return Invalid("FIELD_MISSING", "socket_path is null");
  }
  if (args.offset_bytes < 0 || (args.kind != KVS_CUDA_IPC && args.offset_bytes != 0)) {
    return Invalid("HANDLE_INVALID", "offset_bytes is " + std::to_string(args.offset_bytes));
  }
  const bool named = args.device_uuid != nullptr && args.device_uuid[0] != '\0';
  if (host == named) {
    return Invalid("HANDLE_INVALID", host ? "device_uuid is set for memory of the host" : "no device_uuid");
  }
  return {};
}

OpenResult Open(const kvs_map_args& args) {
  if (args.kind == KVS_CUDA_IPC) return OpenCudaIpc(args);
  const OwnedDescriptor self = OpenSelfPidfd();
  if (!self.valid()) {
    return {{kPlainFailedPrecondition, "",
             std::string("no pidfd of this process (Linux 5.3 or later gives one): ") + std::strerror(errno)},
            nullptr};
  }
  Redeemed redeemed;
  auto status =
      RedeemTicket(args.socket_path, static_cast<const std::uint8_t*>(args.handle), self.get(), &redeemed);
  if (!status.ok()) return {std::move(status), nullptr};
  if (!redeemed.descriptor.valid()) {
    return {{kPlainInternal, "DESCRIPTOR_MISSING", "the daemon's answer brings no descriptor"}, nullptr};
  }
  if (redeemed.size_bytes < static_cast<std::uint64_t>(args.size_bytes)) {
    return {{kPlainInternal, "",
             "the daemon's segment has " + std::to_string(redeemed.size_bytes) + " bytes, the handle said " +
                 std::to_string(args.size_bytes)},
            nullptr};
  }
  if (args.kind == KVS_CUDA_VMM) {
    return OpenCudaVmm(redeemed.descriptor.get(), redeemed.size_bytes, args.device_uuid);
  }
  return OpenMemfd(redeemed.descriptor.get(), static_cast<std::size_t>(args.size_bytes));
}

// What tells one piece of memory from another: lengths are fixed, but for the path and the device, which
// hold no zero byte.
std::string KeyOf(const kvs_map_args& args) {
  std::string key;
  key.reserve(256);
  const auto add = [&key](const void* bytes, std::size_t size) {
    key.append(static_cast<const char*>(bytes), size);
  };
  add(&args.kind, sizeof(args.kind));
  add(&args.generation, sizeof(args.generation));
  add(&args.offset_bytes, sizeof(args.offset_bytes));
  add(&args.size_bytes, sizeof(args.size_bytes));
  add(args.handle, args.handle_bytes);
  if (args.device_uuid != nullptr) key += args.device_uuid;
  key += '\0';
  if (args.kind != KVS_CUDA_IPC) key += args.socket_path;
  return key;
}

class OpenMappings {
 public:
  PlainStatus FindOrOpen(const kvs_map_args& args, std::shared_ptr<const Mapping>* mapping) {
    const std::string key = KeyOf(args);
    if ((*mapping = Find(key)) != nullptr) return {};
    // One at a time, so that a ticket given to two threads is redeemed once.
    const std::lock_guard opening(opening_);
    if ((*mapping = Find(key)) != nullptr) return {};
    OpenResult result = Open(args);
    if (!result.status.ok()) return std::move(result.status);
    *mapping = std::move(result.mapping);
    const std::lock_guard lock(mutex_);
    std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
    mappings_[key] = *mapping;
    return {};
  }

 private:
  std::shared_ptr<const Mapping> Find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto it = mappings_.find(key);
    return it == mappings_.end() ? nullptr : it->second.lock();
  }

  std::mutex opening_;
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<const Mapping>> mappings_;
};

}  // namespace

PlainStatus FindOrOpen(const kvs_map_args& args, std::shared_ptr<const Mapping>* mapping) {
  if (auto status = CheckArguments(args); !status.ok()) return status;
  static auto& mappings = *new OpenMappings();  // never destroyed: threads may outlive main
  return mappings.FindOrOpen(args, mapping);
}

}  // namespace kvsummary::direct
