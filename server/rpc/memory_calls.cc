#include "server/rpc/memory_calls.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/update_queue.h"
#include "server/error.h"
#include "server/rpc/update_queue.h"
#include "server/session/memory_buffer.h"

namespace kvsummary {
namespace {

// Beyond this a size is a mistake, and sums of two do not overflow.
constexpr std::int64_t kMaxBufferBytes = std::int64_t{1} << 52;

std::uint64_t PidNamespace() {
  struct stat info {};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

absl::Status CheckDescriptorSocket(const ServiceContext& context) {
  if (!context.descriptor_socket.empty()) return absl::OkStatus();
  return Refuse(
      Reason::DESCRIPTOR_SOCKET_OFF, "",
      "the daemon has no descriptor socket (--descriptor-socket): memory cannot be shared this way");
}

absl::Status CheckExtent(const v1::MemoryHandle& memory) {
  if (memory.size_bytes() <= 0 || memory.size_bytes() > kMaxBufferBytes) {
    return Refuse(Reason::BUFFER_RANGE, "memory.size_bytes",
                  absl::StrFormat("size_bytes is %d, not between 1 and 2^52", memory.size_bytes()));
  }
  if (memory.offset_bytes() < 0 || memory.offset_bytes() > kMaxBufferBytes) {
    return Refuse(Reason::BUFFER_RANGE, "memory.offset_bytes",
                  absl::StrFormat("offset_bytes is %d, not between 0 and 2^52", memory.offset_bytes()));
  }
  return absl::OkStatus();
}

// The device that pins host memory and has a cache of the session, or null.
Device* PinningDevice(const CacheManager& caches, std::uint64_t session) {
  for (const auto& cache : caches.List()) {
    if (cache->session() == session && cache->device().pins_host_memory()) return &cache->device();
  }
  return nullptr;
}

std::shared_ptr<Buffer> MakeMemfdBuffer(const CacheManager& caches, std::uint64_t session,
                                        ClientMemfd mapped) {
  Device* const device = PinningDevice(caches, session);
  if (device == nullptr) return MakeHostBuffer(std::move(mapped.memory), std::move(mapped.identity));
  return MakePinnedBuffer(std::move(mapped.memory), *device, std::move(mapped.identity));
}

// Answers a ticket: the client sends the memfd with it.
absl::Status RegisterMemfd(const ServiceContext& context, const std::shared_ptr<Session>& session,
                           const v1::MemoryHandle& memory, v1::RegisterBufferResponse& reply) {
  if (auto s = CheckDescriptorSocket(context); !s.ok()) return s;
  if (!memory.handle().empty() || memory.offset_bytes() != 0) {
    return Refuse(Reason::HANDLE_INVALID, "memory.handle",
                  "a MEMFD is announced without handle and offset: its descriptor comes with the ticket");
  }
  const auto id = session->ReserveBuffer();
  if (!id.ok()) return id.status();
  const std::int64_t bytes = memory.size_bytes();
  // Weak: the ticket ends with the session, not the other way round.
  auto redeem = [&caches = context.caches, weak = std::weak_ptr(session), id = *id,
                 bytes](Descriptor descriptor) -> absl::StatusOr<DescriptorAnswer> {
    const auto owner = weak.lock();
    if (owner == nullptr) return Refuse(Reason::TICKET_UNKNOWN, "ticket", "the session has ended");
    auto mapped = MapClientMemfd(std::move(descriptor), bytes);
    auto status = mapped.status();
    if (status.ok()) {
      status = owner->FillBuffer(id, MakeMemfdBuffer(caches, owner->number(), *std::move(mapped)));
    } else {
      owner->RemoveBuffer(id).IgnoreError();  // the ticket is used up: the id will never have memory
    }
    if (!status.ok()) return status;
    DescriptorAnswer answer;
    answer.size_bytes = bytes;
    return answer;
  };
  auto ticket = context.tickets.Issue(session, std::move(redeem));
  if (!ticket.ok()) {
    session->RemoveBuffer(*id).IgnoreError();
    return ticket.status();
  }
  reply.set_buffer_id(*id);
  reply.set_ticket(*std::move(ticket));
  return absl::OkStatus();
}

absl::StatusOr<Device*> FindByUuid(const CacheManager& caches, const std::string& uuid) {
  for (const auto& device : caches.devices()) {
    if (!uuid.empty() && device->uuid() == uuid) return device.get();
  }
  return Refuse(
      Reason::DEVICE_NOT_VISIBLE, "memory.device_uuid",
      absl::StrFormat("the daemon does not see device \"%s\"", absl::CHexEscape(uuid.substr(0, 64))));
}

// (executor)
absl::Status OpenIpcBuffer(Device& device, Session& session, const v1::MemoryHandle& memory,
                           v1::RegisterBufferResponse& reply) {
  if (auto s = device.Open(); !s.ok()) return s;
  const auto id = session.ReserveBuffer();
  if (!id.ok()) return id.status();
  auto opened = device.OpenIpc(memory.handle(), memory.offset_bytes(), memory.size_bytes());
  if (!opened.ok()) {
    session.RemoveBuffer(*id).IgnoreError();
    return opened.status();
  }
  const std::string identity =
      absl::StrCat("ipc:", device.uuid(), ":", memory.handle(), ":", memory.offset_bytes());
  if (auto s = session.FillBuffer(*id, MakeDeviceBuffer(*std::move(opened), device, identity)); !s.ok()) {
    return s;
  }
  reply.set_buffer_id(*id);
  return absl::OkStatus();
}

void RegisterIpc(const ServiceContext& context, const std::shared_ptr<Session>& session,
                 const v1::MemoryHandle& memory, v1::RegisterBufferResponse& reply, const CallDone& done) {
  const auto device = FindByUuid(context.caches, memory.device_uuid());
  if (!device.ok()) return done(device.status());
  if (context.caches.IsOwnIpcHandle(memory.handle())) {
    return done(
        Refuse(Reason::CUDA_IPC_SAME_PROCESS, "memory.handle",
               "the handle is of a cache: a CUDA IPC handle does not open in the process that made it"));
  }
  const auto queued = (*device)->executor().Submit([device = *device, session, &memory, &reply, done] {
    done(OpenIpcBuffer(*device, *session, memory, reply));
  });
  if (!queued.ok()) done(queued);
}

// A ticket for a descriptor; the one that comes with it is not looked at.
absl::StatusOr<std::string> IssueFor(Tickets& tickets, const std::shared_ptr<Session>& session,
                                     Descriptor descriptor, std::int64_t bytes) {
  auto held = std::make_shared<Descriptor>(std::move(descriptor));
  return tickets.Issue(session, [held, bytes](const Descriptor& /*theirs*/) {
    return absl::StatusOr<DescriptorAnswer>(
        DescriptorAnswer{.descriptor = std::move(*held), .size_bytes = bytes});
  });
}

}  // namespace

void DetachAtEnd(const ServiceContext& context, const std::shared_ptr<Session>& session) {
  // The store first: what it copies for the session must not become visible, or be written, once another
  // session may have the cache.
  session->OnEnd(&context.caches,
                 [&caches = context.caches, &store = context.store, number = session->number()] {
                   store.EndSession(number);
                   caches.EndSession(number);
                 });
}

absl::Status ExportMemory(const ServiceContext& context, const v1::ExportMemoryRequest& request,
                          v1::ExportMemoryResponse& reply) {
  const auto session = context.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  const std::uint64_t number = (*session)->number();
  const std::string& name = request.cache().name();
  const std::uint64_t generation = request.cache().generation();
  const auto cache = context.caches.FindMappable(name, generation, number);
  if (!cache.ok()) return cache.status();
  const Memory& memory = (*cache)->memory();
  auto* handle = reply.mutable_memory();
  if (memory.descriptor() < 0) {
    auto mapped = context.caches.MapMemory(name, generation, number, Descriptor());
    if (!mapped.ok()) return mapped.status();
    DetachAtEnd(context, *session);
    handle->set_handle(std::move(mapped->ipc_handle));
  } else {
    if (auto s = CheckDescriptorSocket(context); !s.ok()) return s;
    auto ticket = context.tickets.Issue(
        *session,
        [&caches = context.caches, name, generation,
         number](Descriptor pidfd) -> absl::StatusOr<DescriptorAnswer> {
          auto mapped = caches.MapMemory(name, generation, number, std::move(pidfd));
          if (!mapped.ok()) return mapped.status();
          return DescriptorAnswer{.descriptor = std::move(mapped->descriptor), .size_bytes = mapped->bytes};
        });
    if (!ticket.ok()) return ticket.status();
    handle->set_handle(*std::move(ticket));
  }
  handle->set_kind(static_cast<v1::MemoryKind>(memory.kind()));
  handle->set_size_bytes(memory.bytes());
  handle->set_device_uuid((*cache)->device().uuid());
  handle->set_pid_namespace(PidNamespace());
  handle->set_generation(generation);
  return absl::OkStatus();
}

absl::Status ReleaseMemory(const ServiceContext& context, const v1::ReleaseMemoryRequest& request) {
  const auto session = context.sessions.NumberOf(request.session_id());
  if (!session.ok()) return session.status();
  context.caches.ReleaseMemory(request.cache().name(), request.cache().generation(), *session);
  return absl::OkStatus();
}

void RegisterBuffer(const ServiceContext& context, const v1::RegisterBufferRequest& request,
                    v1::RegisterBufferResponse& reply, const CallDone& done) {
  const auto session = context.sessions.Find(request.session_id());
  if (!session.ok()) return done(session.status());
  if (auto s = CheckExtent(request.memory()); !s.ok()) return done(s);
  switch (request.memory().kind()) {
    case v1::MEMORY_KIND_MEMFD:
      return done(RegisterMemfd(context, *session, request.memory(), reply));
    case v1::MEMORY_KIND_CUDA_IPC:
      return RegisterIpc(context, *session, request.memory(), reply, done);
    case v1::MEMORY_KIND_CUDA_VMM:
      return done(
          Refuse(Reason::CUDA_IPC_VMM_MEMORY, "memory.kind",
                 "memory of a VMM allocator (expandable segments) has no CUDA IPC handle: allocate the "
                 "buffer with cudaMalloc"));
    default:
      return done(Refuse(Reason::FIELD_MISSING, "memory.kind", "a buffer is of kind MEMFD or CUDA_IPC"));
  }
}

void UnregisterBuffer(const ServiceContext& context, const v1::UnregisterBufferRequest& request,
                      CallDone done) {
  const auto session = context.sessions.Find(request.session_id());
  if (!session.ok()) return done(session.status());
  auto buffer = (*session)->RemoveBuffer(request.buffer_id());
  if (!buffer.ok()) return done(buffer.status());
  if (*buffer == nullptr) return done(absl::OkStatus());  // it was only reserved
  (*buffer)->OnUnmapped([done = std::move(done)] { done(absl::OkStatus()); });
}

absl::Status OpenQueue(const ServiceContext& context, const v1::OpenQueueRequest& request,
                       v1::OpenQueueResponse& reply) {
  const auto session = context.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  if (auto s = CheckDescriptorSocket(context); !s.ok()) return s;
  auto queue = context.queues.Open(*session);
  if (!queue.ok()) return queue.status();
  auto memory = IssueFor(context.tickets, *session, std::move(queue->memory), kUpdateQueueBytes);
  if (!memory.ok()) return memory.status();
  auto wake = IssueFor(context.tickets, *session, std::move(queue->wake), 0);
  if (!wake.ok()) return wake.status();
  reply.set_memory_ticket(*std::move(memory));
  reply.set_wake_ticket(*std::move(wake));
  reply.set_size_bytes(kUpdateQueueBytes);
  return absl::OkStatus();
}

}  // namespace kvsummary
