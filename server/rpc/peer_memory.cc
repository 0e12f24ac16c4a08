#include "server/rpc/peer_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <future>

#include "client/descriptor_client.h"
#include "proto/descriptor_socket.h"

namespace kvsummary {
namespace {

// Whether the first `bytes` bytes cannot go away, whatever who has made them does: the size is sealed, and
// the seals against writing forbid holes too, also to who has a mapping for writing.
bool StaysThere(int fd, std::int64_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);  // -1 for what is no memfd
  struct stat info {};
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0 &&
         fstat(fd, &info) == 0 && info.st_size >= bytes;
}

// Whether no access to a mapping fails: where a hole has been left, ordinary pages come from the memory at
// large, huge ones only from those set aside. So they have to be there now.
bool IsThere(int fd, void* data, std::size_t bytes) {
  struct statfs file_system {};
  if (fstatfs(fd, &file_system) != 0) return false;
  return file_system.f_type == TMPFS_MAGIC || madvise(data, bytes, MADV_POPULATE_READ) == 0;
}

std::shared_ptr<MappedStaging> Redeem(const std::string& socket, const v1::MemoryHandle& memory) {
  if (memory.handle().size() != kTicketBytes || memory.size_bytes() <= 0) return nullptr;
  const OwnedDescriptor pidfd = OpenSelfPidfd();
  Redeemed redeemed;
  const PlainStatus status = RedeemTicket(
      socket, reinterpret_cast<const std::uint8_t*>(memory.handle().data()), pidfd.get(), &redeemed);
  const auto bytes = static_cast<std::size_t>(memory.size_bytes());
  if (!status.ok() || !redeemed.descriptor.valid() || redeemed.size_bytes != bytes) return nullptr;
  if (!StaysThere(redeemed.descriptor.get(), memory.size_bytes())) return nullptr;
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, redeemed.descriptor.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  auto mapping = std::make_shared<MappedStaging>(data, bytes);
  return IsThere(redeemed.descriptor.get(), data, bytes) ? mapping : nullptr;
}

}  // namespace

MappedStaging::~MappedStaging() { munmap(data_, bytes_); }

PeerMemory::View PeerMemory::Open(const v1::PullAccepted& accepted, Device& device) {
  const v1::MemoryHandle& memory = accepted.memory();
  const std::lock_guard lock(mutex_);
  if (memory.kind() == v1::MEMORY_KIND_CUDA_IPC) return OpenIpcLocked(memory, device);
  if (memory.kind() != v1::MEMORY_KIND_MEMFD || !local_) return {};
  if (!memory.handle().empty()) mapping_ = Redeem(accepted.descriptor_socket(), memory);
  if (mapping_ == nullptr) return {};
  return {.mapping = mapping_, .bytes = mapping_->bytes()};
}

PeerMemory::View PeerMemory::OpenIpcLocked(const v1::MemoryHandle& memory, Device& device) {
  if (memory.size_bytes() <= 0) return {};
  auto& known = opened_[{memory.handle(), device.name()}];
  if (known == nullptr || known->bytes() != memory.size_bytes()) {
    std::promise<absl::StatusOr<std::unique_ptr<Memory>>> opened;
    device.executor().SubmitFree(
        [&] { opened.set_value(device.OpenIpc(memory.handle(), 0, memory.size_bytes())); });
    auto result = opened.get_future().get();
    if (!result.ok()) return {};
    known = std::shared_ptr<const Memory>(
        (*result).release(), [&device](const Memory* m) { device.executor().SubmitFree([m] { delete m; }); });
  }
  return {.memory = known, .bytes = memory.size_bytes()};
}

void PeerMemory::Forget() {
  const std::lock_guard lock(mutex_);
  mapping_ = nullptr;
  opened_.clear();
}

}  // namespace kvsummary
