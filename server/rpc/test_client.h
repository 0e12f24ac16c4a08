// What tests of the server send and look at: a client with stubs, an Open stream and the descriptor socket's
// other end; updates of the caches that it makes, and all bytes of one.
#pragma once

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/layout.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/prefix.grpc.pb.h"
#include "kvsummary/v1/session.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"
#include "proto/descriptor_socket.h"
#include "proto/update_queue.h"
#include "server/memory/descriptor.h"
#include "server/memory/descriptor_message.h"

namespace kvsummary {

// The reason of a refusal; "OK", or the code as a number where there is none.
inline std::string ReasonOf(const grpc::Status& status) {
  if (status.ok()) return "OK";
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& any : details.details()) {
      if (any.UnpackTo(&info)) return info.reason();
    }
  }
  return std::to_string(status.error_code()) + " " + status.error_message();
}

// Reason and field of a refusal's details, as "REASON field".
inline std::string Details(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  std::string reason;
  std::string field;
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::QuotaFailure quota;
    if (any.UnpackTo(&info))
      reason = info.domain() == "kvsummary" ? info.reason() : "domain " + info.domain();
    if (any.UnpackTo(&bad)) field = " " + bad.field_violations(0).field();
    if (any.UnpackTo(&quota)) field = " quota " + quota.violations(0).subject();
  }
  return details.code() == status.error_code() ? reason + field : "another code than the status's";
}

inline constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW;

inline Descriptor MakeMemfd(std::int64_t bytes, int seals = kAllSeals) {
  Descriptor memfd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd || posix_fallocate(memfd.get(), 0, bytes) != 0 || fcntl(memfd.get(), F_ADD_SEALS, seals) != 0)
    std::abort();
  return memfd;
}

inline Descriptor PidfdOf(pid_t pid) { return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

inline Descriptor ConnectDescriptors(const std::string& path) {
  Descriptor connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    std::abort();
  return connection;
}

inline DescriptorRequest RequestOf(const std::string& ticket) {
  DescriptorRequest request;
  std::memcpy(request.ticket, ticket.data(), std::min(ticket.size(), sizeof(request.ticket)));
  return request;
}

// What a request was answered with. `reason` "OK": done; "CLOSED": the connection was closed instead.
struct Redeemed {
  std::string reason;
  std::int64_t size_bytes = 0;
  Descriptor descriptor;
};

inline Redeemed ReadReply(int connection) {
  pollfd polled{connection, POLLIN, 0};
  while (poll(&polled, 1, -1) < 0) {
  }
  DescriptorReply reply;
  std::vector<Descriptor> descriptors;
  Redeemed redeemed;
  if (ReceiveMessage(connection, &reply, sizeof(reply), descriptors) != ReceiveResult::kMessage) {
    redeemed.reason = "CLOSED";
    return redeemed;
  }
  redeemed.reason = reply.code == 0 ? "OK" : reply.reason;
  redeemed.size_bytes = static_cast<std::int64_t>(reply.size_bytes);
  if (!descriptors.empty()) redeemed.descriptor = std::move(descriptors.front());
  return redeemed;
}

inline Redeemed Redeem(const std::string& path, const std::string& ticket, int descriptor) {
  const Descriptor connection = ConnectDescriptors(path);
  const DescriptorRequest request = RequestOf(ticket);
  if (!SendMessage(connection.get(), &request, sizeof(request), descriptor)) std::abort();
  return ReadReply(connection.get());
}

class TestClient {
 public:
  explicit TestClient(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    caches = v1::CacheService::NewStub(channel_);
    sessions = v1::SessionService::NewStub(channel_);
    updates = v1::UpdateService::NewStub(channel_);
    prefixes = v1::PrefixService::NewStub(channel_);
    admin = v1::AdminService::NewStub(channel_);
  }

  // Opens a session, which ends with Close or this object.
  grpc::Status Open(const std::string& name) {
    context_ = std::make_unique<grpc::ClientContext>();
    v1::OpenRequest request;
    request.set_name(name);
    stream = sessions->Open(context_.get(), request);
    v1::OpenResponse first;
    if (!stream->Read(&first)) {
      const auto status = stream->Finish();
      stream.reset();
      return status;
    }
    session_id = first.opened().session_id();
    descriptor_socket = first.opened().descriptor_socket();
    return grpc::Status::OK;
  }
  ~TestClient() {
    if (stream != nullptr) Close();
  }
  // Returns when the daemon has taken note.
  void Close() {
    context_->TryCancel();
    v1::OpenResponse event;
    while (stream->Read(&event)) {
    }
    stream->Finish();
    stream.reset();
  }

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // 2 layers, 10 blocks of 16 tokens, 4 ring blocks of 2 * 12 rows (bases 24, 48, 72), on the host.
  static v1::CreateCacheRequest CacheRequest(const std::string& name) {
    v1::CreateCacheRequest request;
    request.set_name(name);
    request.set_device("host");
    auto* g = request.mutable_geometry();
    g->set_layers(2);
    g->set_blocks(10);
    g->set_block_size(16);
    g->set_block_stride(1280);
    g->set_ring_blocks(4);
    g->set_capacity(10);
    g->set_rows_per_layer(12);
    g->set_k(3);
    return request;
  }
  grpc::Status Create(const std::string& name, v1::CacheInfo* info, bool owned = true) {
    auto request = CacheRequest(name);
    if (owned) request.set_session_id(session_id);
    v1::CreateCacheResponse reply;
    const auto status = Call(&v1::CacheService::Stub::CreateCache, request, &reply);
    *info = reply.info();
    return status;
  }
  grpc::Status Attach(const std::string& name, v1::CacheInfo* info) {
    v1::AttachCacheRequest request;
    request.set_session_id(session_id);
    request.set_name(name);
    v1::AttachCacheResponse reply;
    const auto status = Call(&v1::CacheService::Stub::AttachCache, request, &reply);
    *info = reply.info();
    return status;
  }
  grpc::Status Delete(const v1::CacheRef& cache) {
    v1::DeleteCacheRequest request;
    *request.mutable_cache() = cache;
    v1::DeleteCacheResponse reply;
    return Call(&v1::CacheService::Stub::DeleteCache, request, &reply);
  }
  grpc::Status Export(const v1::CacheRef& cache, v1::MemoryHandle* handle) {
    v1::ExportMemoryRequest request;
    request.set_session_id(session_id);
    *request.mutable_cache() = cache;
    v1::ExportMemoryResponse reply;
    const auto status = Call(&v1::CacheService::Stub::ExportMemory, request, &reply);
    *handle = reply.memory();
    return status;
  }
  grpc::Status Release(const v1::CacheRef& cache) {
    v1::ReleaseMemoryRequest request;
    request.set_session_id(session_id);
    *request.mutable_cache() = cache;
    v1::ReleaseMemoryResponse reply;
    return Call(&v1::CacheService::Stub::ReleaseMemory, request, &reply);
  }
  // Exports and maps; null when refused.
  char* Map(const v1::CacheRef& cache) {
    v1::MemoryHandle handle;
    if (!Export(cache, &handle).ok()) return nullptr;
    const Descriptor self = PidfdOf(getpid());
    const Redeemed redeemed = Redeem(descriptor_socket, handle.handle(), self.get());
    if (redeemed.reason != "OK") return nullptr;
    void* data = mmap(nullptr, static_cast<std::size_t>(handle.size_bytes()), PROT_READ | PROT_WRITE,
                      MAP_SHARED, redeemed.descriptor.get(), 0);
    return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
  }
  grpc::Status Register(const v1::MemoryHandle& memory, v1::RegisterBufferResponse* reply) {
    v1::RegisterBufferRequest request;
    request.set_session_id(session_id);
    *request.mutable_memory() = memory;
    return Call(&v1::CacheService::Stub::RegisterBuffer, request, reply);
  }
  grpc::Status RegisterMemfd(std::int64_t bytes, v1::RegisterBufferResponse* reply) {
    v1::MemoryHandle memory;
    memory.set_kind(v1::MEMORY_KIND_MEMFD);
    memory.set_size_bytes(bytes);
    return Register(memory, reply);
  }
  grpc::Status Unregister(std::uint64_t buffer_id) {
    v1::UnregisterBufferRequest request;
    request.set_session_id(session_id);
    request.set_buffer_id(buffer_id);
    v1::UnregisterBufferResponse reply;
    return Call(&v1::CacheService::Stub::UnregisterBuffer, request, &reply);
  }
  // Opens a queue and maps it.
  grpc::Status OpenQueue(UpdateQueueMemory** queue, Descriptor* wake) {
    v1::OpenQueueRequest request;
    request.set_session_id(session_id);
    v1::OpenQueueResponse reply;
    grpc::ClientContext context;
    const auto status = updates->OpenQueue(&context, request, &reply);
    if (!status.ok()) return status;
    const Descriptor self = PidfdOf(getpid());
    const Redeemed memory = Redeem(descriptor_socket, reply.memory_ticket(), self.get());
    *wake = Redeem(descriptor_socket, reply.wake_ticket(), self.get()).descriptor;
    void* data = mmap(nullptr, sizeof(UpdateQueueMemory), PROT_READ | PROT_WRITE, MAP_SHARED,
                      memory.descriptor.get(), 0);
    if (data == MAP_FAILED || !*wake) std::abort();
    *queue = static_cast<UpdateQueueMemory*>(data);
    return status;
  }
  v1::ListSessionsResponse ListSessions() {
    grpc::ClientContext context;
    v1::ListSessionsResponse reply;
    if (!admin->ListSessions(&context, {}, &reply).ok()) std::abort();
    return reply;
  }

  std::unique_ptr<v1::CacheService::Stub> caches;
  std::unique_ptr<v1::SessionService::Stub> sessions;
  std::unique_ptr<v1::UpdateService::Stub> updates;
  std::unique_ptr<v1::PrefixService::Stub> prefixes;
  std::unique_ptr<v1::AdminService::Stub> admin;
  std::unique_ptr<grpc::ClientReader<v1::OpenResponse>> stream;
  std::string session_id;
  std::string descriptor_socket;

 private:
  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                   Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    return (caches.get()->*method)(&context, request, reply);
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::ClientContext> context_;
};

// Everything in the cache: all pages, then all tails. Empty when a read is refused.
inline std::string Snapshot(v1::CacheService::Stub& caches, const v1::CacheInfo& info) {
  std::string bytes;
  v1::ReadPagesRequest pages;
  *pages.mutable_cache() = info.cache();
  pages.mutable_layers()->set_count(info.geometry().layers());
  for (int b = 0; b < info.geometry().blocks(); ++b) pages.add_blocks(b);
  grpc::ClientContext context;
  auto reader = caches.ReadPages(&context, pages);
  for (v1::ReadPagesResponse part; reader->Read(&part);) bytes += part.data();
  if (!reader->Finish().ok()) return "";
  v1::ReadRingRequest ring;
  *ring.mutable_cache() = info.cache();
  ring.mutable_layers()->set_count(info.geometry().layers());
  for (int b = 0; b < info.geometry().ring_blocks(); ++b) ring.add_ring_blocks(b);
  grpc::ClientContext ring_context;
  auto ring_reader = caches.ReadRing(&ring_context, ring);
  for (v1::ReadRingResponse part; ring_reader->Read(&part);) bytes += part.data();
  return ring_reader->Finish().ok() ? bytes : "";
}

// bf16 rows of ordinary values, [layers][rows][512].
inline std::string RandomRows(int layers, int rows, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(static_cast<std::size_t>(layers) * static_cast<std::size_t>(rows) * kRowBytes, 0);
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
    bytes[i] = static_cast<char>(random());
    bytes[i + 1] = static_cast<char>(0x3c + random() % 4 + (random() % 2) * 0x80);
  }
  return bytes;
}

// Updates of both layers of a cache of CacheRequest, by messages: of one request in block 1 on and ring
// block 1. The chunk begins at position 0, the verified rows at `first`.
inline v1::UpdatePrefillRequest PrefillOf(const v1::CacheInfo& info, int count, unsigned seed) {
  v1::UpdatePrefillRequest request;
  *request.mutable_cache() = info.cache();
  request.mutable_layers()->set_count(2);
  for (int i = 0; i < count; ++i) {
    request.add_slots(16 + i);
    request.add_positions(i);
    request.add_ring_bases(24);
  }
  request.add_query_start_loc(0);
  request.add_query_start_loc(count);
  request.mutable_rows()->set_inline_(RandomRows(2, count, seed));
  return request;
}
inline v1::UpdateVerifyRequest VerifyOf(const v1::CacheInfo& info, int first, int count, unsigned seed) {
  v1::UpdateVerifyRequest request;
  *request.mutable_cache() = info.cache();
  request.mutable_layers()->set_count(2);
  for (int i = 0; i < count; ++i) {
    request.add_slots(16 + first + i);
    request.add_ring_bases(24);
  }
  request.add_query_start_loc(0);
  request.add_query_start_loc(count);
  request.add_seq_lens(first + count);
  request.mutable_rows()->set_inline_(RandomRows(2, count, seed));
  return request;
}
inline v1::UpdateDecodeRequest DecodeOf(const v1::CacheInfo& info, int position, unsigned seed) {
  v1::UpdateDecodeRequest request;
  *request.mutable_cache() = info.cache();
  request.mutable_layers()->set_count(2);
  request.add_slots(16 + position);
  request.add_positions(position);
  request.add_ring_bases(24);
  request.mutable_rows()->set_inline_(RandomRows(2, 1, seed));
  return request;
}

inline grpc::Status Send(v1::UpdateService::Stub& updates, grpc::ClientContext* context,
                         const v1::UpdatePrefillRequest& request, v1::UpdateResult* result = nullptr) {
  v1::UpdatePrefillResponse reply;
  const auto status = updates.UpdatePrefill(context, request, &reply);
  if (result != nullptr) *result = reply.result();
  return status;
}
inline grpc::Status Send(v1::UpdateService::Stub& updates, grpc::ClientContext* context,
                         const v1::UpdateVerifyRequest& request) {
  v1::UpdateVerifyResponse reply;
  return updates.UpdateVerify(context, request, &reply);
}
inline grpc::Status Send(v1::UpdateService::Stub& updates, grpc::ClientContext* context,
                         const v1::UpdateDecodeRequest& request) {
  v1::UpdateDecodeResponse reply;
  return updates.UpdateDecode(context, request, &reply);
}

}  // namespace kvsummary
