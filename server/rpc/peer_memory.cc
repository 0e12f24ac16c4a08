#include "server/rpc/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <future>

#include "client/descriptor_client.h"
#include "proto/descriptor_socket.h"

namespace kvsummary {
namespace {

std::shared_ptr<MappedStaging> Redeem(const std::string& socket, const v1::MemoryHandle& memory) {
  if (memory.handle().size() != kTicketBytes || memory.size_bytes() <= 0) return nullptr;
  const OwnedDescriptor pidfd = OpenSelfPidfd();
  Redeemed redeemed;
  const PlainStatus status = RedeemTicket(
      socket, reinterpret_cast<const std::uint8_t*>(memory.handle().data()), pidfd.get(), &redeemed);
  const auto bytes = static_cast<std::size_t>(memory.size_bytes());
  if (!status.ok() || !redeemed.descriptor.valid() || redeemed.size_bytes != bytes) return nullptr;
  // Of a size that cannot shrink: no access faults.
  struct stat info {};
  if ((fcntl(redeemed.descriptor.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0 ||
      fstat(redeemed.descriptor.get(), &info) != 0 || info.st_size < memory.size_bytes()) {
    return nullptr;
  }
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, redeemed.descriptor.get(), 0);
  return data == MAP_FAILED ? nullptr : std::make_shared<MappedStaging>(data, bytes);
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
