#include "client/session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/descriptor_client.h"
#include "client/shared_message.h"
#include "client/status.h"
#include "client/unary_call.h"
#include "client/update_queue.h"
#include "kvsummary/v1/session.grpc.pb.h"
#include "proto/descriptor_socket.h"

namespace kvsummary {
namespace {

using CacheStub = v1::CacheService::Stub;

static_assert(v1::MEMORY_KIND_MEMFD == static_cast<int>(HandleKind::kMemfd) &&
              v1::MEMORY_KIND_CUDA_VMM == static_cast<int>(HandleKind::kCudaVmm) &&
              v1::MEMORY_KIND_CUDA_IPC == static_cast<int>(HandleKind::kCudaIpc));

void FillRef(const Cache& cache, v1::CacheRef* ref) {
  ref->set_name(cache.name);
  ref->set_generation(cache.generation);
}

absl::Status MemoryError(const char* call, std::int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(call, " of ", bytes, " bytes for a buffer: ", std::strerror(errno)));
}

// A memfd as the daemon wants it: of fixed size, every page present.
absl::StatusOr<OwnedDescriptor> MakeSealedMemfd(std::int64_t bytes) {
  OwnedDescriptor fd(memfd_create("kvsummary-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return MemoryError("memfd_create", bytes);
  int error = 0;
  do {
    error = posix_fallocate(fd.get(), 0, bytes);
  } while (error == EINTR);
  if (error != 0) {
    errno = error;
    return MemoryError("fallocate", bytes);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return MemoryError("sealing", bytes);
  return fd;
}

}  // namespace

struct ClientSession::Impl {
  explicit Impl(Client::Impl& owner) : client(owner) {}
  ~Impl() {
    context.TryCancel();
    if (reader.joinable()) reader.join();
  }

  // On the thread `reader`.
  void Read(grpc::ClientReader<v1::OpenResponse>& stream) {
    v1::OpenResponse event;
    while (stream.Read(&event)) {
      const std::lock_guard lock(mutex);
      switch (event.event_case()) {
        case v1::OpenResponse::kOpened:
          id = event.opened().session_id();
          descriptor_socket = event.opened().descriptor_socket();
          opened = true;
          break;
        case v1::OpenResponse::kDraining:
          draining = true;
          break;
        case v1::OpenResponse::kCacheLost:
          lost_caches.emplace(event.cache_lost().cache().name(), event.cache_lost().cache().generation());
          break;
        case v1::OpenResponse::EVENT_NOT_SET:
          break;  // of a newer daemon
      }
      changed.notify_all();
    }
    const absl::Status status = FromGrpc(stream.Finish());
    const std::lock_guard lock(mutex);
    end = status.ok() ? absl::AbortedError("the daemon has ended the session") : status;
    lost = true;
    for (const auto& queue : queues) queue->End();
    changed.notify_all();
  }

  // Redeems a ticket of the daemon's with `descriptor`.
  absl::StatusOr<Redeemed> Redeem(const std::string& ticket, int descriptor) const {
    if (ticket.size() != kTicketBytes) {
      return absl::InternalError(absl::StrCat("the daemon's ticket has ", ticket.size(), " bytes"));
    }
    Redeemed redeemed;
    const auto status = FromPlain(RedeemTicket(
        descriptor_socket, reinterpret_cast<const std::uint8_t*>(ticket.data()), descriptor, &redeemed));
    if (!status.ok()) return status;
    return redeemed;
  }

  template <typename Request, typename Response>
  absl::Status CallCaches(grpc::Status (CacheStub::*method)(grpc::ClientContext*, const Request&, Response*),
                          const Request& request, Response* response) {
    return Call(client.options, client.caches, method, request, response);
  }

  template <typename Response, typename Request>
  absl::StatusOr<UpdateResult> Update(grpc::Status (v1::UpdateService::Stub::*method)(grpc::ClientContext*,
                                                                                      const Request&,
                                                                                      Response*),
                                      const Cache& cache, LayerSpan layers, const SharedUpdate& update) {
    Request request;
    FillShared(id, cache, layers, update, &request);
    Response response;
    const auto status = Call(client.options, *client.updates, method, request, &response);
    if (!status.ok()) return status;
    return UpdateResult{.rows = response.result().rows(),
                        .regions_closed = response.result().regions_closed()};
  }

  Client::Impl& client;
  grpc::ClientContext context;
  // Set before OpenSession returns, and constant from then on.
  std::string id;
  std::string descriptor_socket;

  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool opened = false;
  bool draining = false;
  bool lost = false;
  absl::Status end;
  std::set<std::pair<std::string, std::uint64_t>> lost_caches;
  std::vector<std::shared_ptr<QueueMapping>> queues;  // that end with the session
  std::thread reader;
};

absl::StatusOr<std::unique_ptr<ClientSession>> Client::OpenSession(const std::string& name) {
  auto impl = std::make_unique<ClientSession::Impl>(*impl_);
  v1::OpenRequest request;
  request.set_name(name);
  impl->reader = std::thread([impl = impl.get(), request] {
    const auto stream = impl->client.sessions.Open(&impl->context, request);
    impl->Read(*stream);
  });
  {
    std::unique_lock lock(impl->mutex);
    const bool answered =
        impl->changed.wait_for(lock, impl_->options.timeout, [&] { return impl->opened || impl->lost; });
    if (!answered) return absl::DeadlineExceededError("the daemon does not answer Open");
    if (!impl->opened) return impl->end;
  }
  return std::unique_ptr<ClientSession>(new ClientSession(std::move(impl)));
}

SharedBuffer::~SharedBuffer() { munmap(data_, static_cast<std::size_t>(bytes_)); }

ClientSession::ClientSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClientSession::~ClientSession() = default;

const std::string& ClientSession::id() const { return impl_->id; }
Client::Impl& ClientSession::client() const { return impl_->client; }
const std::string& ClientSession::descriptor_socket() const { return impl_->descriptor_socket; }

bool ClientSession::lost() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->lost;
}

bool ClientSession::WaitUntilLost(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(impl_->mutex);
  return impl_->changed.wait_for(lock, timeout, [this] { return impl_->lost; });
}

absl::Status ClientSession::end() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->end;
}

bool ClientSession::draining() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->draining;
}

bool ClientSession::IsCacheLost(const Cache& cache) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->lost_caches.contains({cache.name, cache.generation});
}

absl::StatusOr<Cache> ClientSession::CreateCache(const std::string& name, const std::string& device,
                                                 const CacheGeometry& geometry, HandleKind kind) {
  v1::CreateCacheRequest request = MakeCreateRequest(name, device, geometry);
  request.set_session_id(impl_->id);
  request.set_memory_kind(static_cast<v1::MemoryKind>(kind));
  v1::CreateCacheResponse response;
  const auto status = impl_->CallCaches(&CacheStub::CreateCache, request, &response);
  if (!status.ok()) return status;
  return FromProto(response.info());
}

absl::StatusOr<Cache> ClientSession::AttachCache(const std::string& name) {
  v1::AttachCacheRequest request;
  request.set_session_id(impl_->id);
  request.set_name(name);
  v1::AttachCacheResponse response;
  const auto status = impl_->CallCaches(&CacheStub::AttachCache, request, &response);
  if (!status.ok()) return status;
  return FromProto(response.info());
}

absl::StatusOr<ExportedMemory> ClientSession::ExportMemory(const Cache& cache) {
  v1::ExportMemoryRequest request;
  request.set_session_id(impl_->id);
  FillRef(cache, request.mutable_cache());
  v1::ExportMemoryResponse response;
  const auto status = impl_->CallCaches(&CacheStub::ExportMemory, request, &response);
  if (!status.ok()) return status;
  const v1::MemoryHandle& memory = response.memory();
  return ExportedMemory{.kind = static_cast<HandleKind>(memory.kind()),
                        .handle = memory.handle(),
                        .size_bytes = memory.size_bytes(),
                        .offset_bytes = memory.offset_bytes(),
                        .device_uuid = memory.device_uuid(),
                        .pid_namespace = memory.pid_namespace(),
                        .generation = memory.generation()};
}

absl::Status ClientSession::ReleaseMemory(const Cache& cache) {
  v1::ReleaseMemoryRequest request;
  request.set_session_id(impl_->id);
  FillRef(cache, request.mutable_cache());
  v1::ReleaseMemoryResponse response;
  return impl_->CallCaches(&CacheStub::ReleaseMemory, request, &response);
}

absl::StatusOr<std::unique_ptr<SharedBuffer>> ClientSession::RegisterBuffer(std::int64_t bytes) {
  if (bytes <= 0) return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
  const auto memfd = MakeSealedMemfd(bytes);
  if (!memfd.ok()) return memfd.status();
  void* data =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, memfd->get(), 0);
  if (data == MAP_FAILED) return MemoryError("mmap", bytes);
  std::unique_ptr<SharedBuffer> buffer(new SharedBuffer(static_cast<char*>(data), bytes));

  v1::RegisterBufferRequest request;
  request.set_session_id(impl_->id);
  request.mutable_memory()->set_kind(v1::MEMORY_KIND_MEMFD);
  request.mutable_memory()->set_size_bytes(bytes);
  v1::RegisterBufferResponse response;
  absl::Status status = impl_->CallCaches(&CacheStub::RegisterBuffer, request, &response);
  if (!status.ok()) return status;
  buffer->id_ = response.buffer_id();
  status = impl_->Redeem(response.ticket(), memfd->get()).status();
  if (!status.ok()) {
    // The id is of no use without its memory. That this may fail too changes nothing: it ends with the
    // session.
    UnregisterBuffer(buffer->id_).IgnoreError();
    return status;
  }
  return buffer;
}

absl::StatusOr<std::uint64_t> ClientSession::RegisterCudaBuffer(std::span<const std::uint8_t> ipc_handle,
                                                                std::int64_t offset_bytes, std::int64_t bytes,
                                                                const std::string& device_uuid) {
  v1::RegisterBufferRequest request;
  request.set_session_id(impl_->id);
  v1::MemoryHandle* memory = request.mutable_memory();
  memory->set_kind(v1::MEMORY_KIND_CUDA_IPC);
  memory->set_handle(ipc_handle.data(), ipc_handle.size());
  memory->set_size_bytes(bytes);
  memory->set_offset_bytes(offset_bytes);
  memory->set_device_uuid(device_uuid);
  struct stat own = {};
  if (stat("/proc/self/ns/pid", &own) == 0) memory->set_pid_namespace(own.st_ino);
  v1::RegisterBufferResponse response;
  const auto status = impl_->CallCaches(&CacheStub::RegisterBuffer, request, &response);
  if (!status.ok()) return status;
  return response.buffer_id();
}

absl::Status ClientSession::UnregisterBuffer(std::uint64_t buffer_id) {
  v1::UnregisterBufferRequest request;
  request.set_session_id(impl_->id);
  request.set_buffer_id(buffer_id);
  v1::UnregisterBufferResponse response;
  return impl_->CallCaches(&CacheStub::UnregisterBuffer, request, &response);
}

absl::StatusOr<std::unique_ptr<UpdateQueue>> ClientSession::OpenQueue() {
  v1::OpenQueueRequest request;
  request.set_session_id(impl_->id);
  v1::OpenQueueResponse response;
  const auto status = Call(impl_->client.options, *impl_->client.updates, &v1::UpdateService::Stub::OpenQueue,
                           request, &response);
  if (!status.ok()) return status;
  const OwnedDescriptor self = OpenSelfPidfd();
  if (!self.valid()) return absl::InternalError(absl::StrCat("pidfd_open: ", std::strerror(errno)));
  auto memory = impl_->Redeem(response.memory_ticket(), self.get());
  if (!memory.ok()) return memory.status();
  auto wake = impl_->Redeem(response.wake_ticket(), self.get());
  if (!wake.ok()) return wake.status();
  auto mapping = QueueMapping::Map(memory->descriptor, static_cast<std::int64_t>(memory->size_bytes),
                                   std::move(wake->descriptor));
  if (!mapping.ok()) return mapping.status();
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->queues.push_back(*mapping);
    if (impl_->lost) (*mapping)->End();
  }
  return std::unique_ptr<UpdateQueue>(new UpdateQueue(*std::move(mapping), impl_->client.options.timeout));
}

absl::StatusOr<UpdateResult> ClientSession::Decode(const Cache& cache, LayerSpan layers,
                                                   const SharedUpdate& update) {
  return impl_->Update<v1::UpdateDecodeResponse, v1::UpdateDecodeRequest>(
      &v1::UpdateService::Stub::UpdateDecode, cache, layers, update);
}

absl::StatusOr<UpdateResult> ClientSession::Verify(const Cache& cache, LayerSpan layers,
                                                   const SharedUpdate& update) {
  return impl_->Update<v1::UpdateVerifyResponse, v1::UpdateVerifyRequest>(
      &v1::UpdateService::Stub::UpdateVerify, cache, layers, update);
}

absl::StatusOr<UpdateResult> ClientSession::Prefill(const Cache& cache, LayerSpan layers,
                                                    const SharedUpdate& update) {
  return impl_->Update<v1::UpdatePrefillResponse, v1::UpdatePrefillRequest>(
      &v1::UpdateService::Stub::UpdatePrefill, cache, layers, update);
}

}  // namespace kvsummary
