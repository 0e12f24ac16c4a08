// Sessions of the C++ client: shared memory, and updates by reference to it.
//
//   auto session = (*client)->OpenSession("engine-0");
//   auto cache = (*session)->CreateCache("engine-0", "", geometry);
//   auto buffer = (*session)->RegisterBuffer(64 << 20);
//   ... write rows and arrays to (*buffer)->data() ...
//   auto result = (*session)->Decode(*cache, {0, 23}, {.rows = {.buffer_id = (*buffer)->id(), ...}, ...});
//
// What a session holds ends with it: when the daemon sees the stream end, be it by the destructor or by this
// process's death. Thread-safe, and blocking as Client is; the client must outlive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/handoff.h"
#include "client/prefix.h"

namespace kvsummary {

// The numbers of kvsummary.v1.MemoryKind.
enum class HandleKind { kDefault = 0, kMemfd = 1, kCudaVmm = 2, kCudaIpc = 3 };

// A handle to memory of the daemon's, for kvs_map (client/direct/kvsummary.h). A ticket in it is good once.
struct ExportedMemory {
  HandleKind kind = HandleKind::kDefault;
  std::string handle;  // bytes
  std::int64_t size_bytes = 0;
  std::int64_t offset_bytes = 0;
  std::string device_uuid;
  std::uint64_t pid_namespace = 0;
  std::uint64_t generation = 0;
};

// Host memory that this process and the daemon share, zeroed, in pages of a memfd. Unmapped here when
// destroyed; the daemon keeps its mapping until UnregisterBuffer or the session's end.
class SharedBuffer {
 public:
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  std::uint64_t id() const { return id_; }
  char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  friend class ClientSession;
  SharedBuffer(char* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  char* const data_;
  const std::int64_t bytes_;
  std::uint64_t id_ = 0;
};

// References as in kvsummary/v1/update.proto. An id of 0: nothing, for arrays that a kind of update does not
// have.
struct SharedRows {
  std::uint64_t buffer_id = 0;
  std::int64_t key_offset_bytes = 0;
  std::int64_t z_offset_bytes = 0;
  std::int64_t row_stride_bytes = 0;
  std::int64_t layer_stride_bytes = 0;
};
struct SharedArray {
  std::uint64_t buffer_id = 0;
  std::int64_t offset_bytes = 0;
  std::int64_t count = 0;  // elements
};
struct SharedUpdate {
  SharedRows rows = {};
  SharedArray slots = {};
  SharedArray positions = {};
  SharedArray query_start_loc = {};
  SharedArray seq_lens = {};
  SharedArray ring_bases = {};
  SharedCounter ready = {};  // the daemon reads nothing before it is there
  SharedCounter done = {};   // set when the update has been applied, before the call returns
};

class UpdateQueue;  // client/update_queue.h

class ClientSession {
 public:
  // Closes the session.
  ~ClientSession();

  // 16 bytes, by which calls name the session. Whoever has them can act as it.
  const std::string& id() const;

  // Path of the daemon's descriptor socket; empty: it has none.
  const std::string& descriptor_socket() const;
  // Whether the session has ended without this process closing it: the daemon is gone or took it away.
  bool lost() const;
  // Waits until it is lost, `timeout` at most; whether it is. Then end() says why.
  bool WaitUntilLost(std::chrono::milliseconds timeout) const;
  absl::Status end() const;
  // Whether the daemon drains: finish, and close the session.
  bool draining() const;
  // Whether the daemon has told that the cache, in this generation, was taken over or deleted.
  bool IsCacheLost(const Cache& cache) const;

  // As Client::CreateCache; the cache ends with the session but for the daemon's grace time.
  absl::StatusOr<Cache> CreateCache(const std::string& name, const std::string& device,
                                    const CacheGeometry& geometry, HandleKind kind = HandleKind::kDefault);
  // Takes a detached cache over, with a new generation.
  absl::StatusOr<Cache> AttachCache(const std::string& name);

  absl::StatusOr<ExportedMemory> ExportMemory(const Cache& cache);
  // Call it when what ExportMemory gave is unmapped. Also when the session is lost: until then its cache
  // cannot be attached while this process lives.
  absl::Status ReleaseMemory(const Cache& cache);

  // Makes host memory that the daemon maps too.
  absl::StatusOr<std::unique_ptr<SharedBuffer>> RegisterBuffer(std::int64_t bytes);
  // Registers CUDA memory of this process by its cudaIpcMemHandle_t (64 bytes): `bytes` from `offset_bytes`
  // of the allocation on. Answers the buffer's id. The memory must stay allocated until UnregisterBuffer has
  // answered: freeing it earlier is undefined by CUDA.
  absl::StatusOr<std::uint64_t> RegisterCudaBuffer(std::span<const std::uint8_t> ipc_handle,
                                                   std::int64_t offset_bytes, std::int64_t bytes,
                                                   const std::string& device_uuid);
  // Returns when the daemon uses it no more.
  absl::Status UnregisterBuffer(std::uint64_t buffer_id);

  absl::StatusOr<UpdateResult> Decode(const Cache& cache, LayerSpan layers, const SharedUpdate& update);
  absl::StatusOr<UpdateResult> Verify(const Cache& cache, LayerSpan layers, const SharedUpdate& update);
  absl::StatusOr<UpdateResult> Prefill(const Cache& cache, LayerSpan layers, const SharedUpdate& update);

  // Makes a submission queue: updates without a call each.
  absl::StatusOr<std::unique_ptr<UpdateQueue>> OpenQueue();

  // The page store, as kvsummary/v1/prefix.proto describes its calls.

  absl::StatusOr<std::uint64_t> DeclareNamespace(const Namespace& declared);
  // Groups that are not named keep the cache's summaries.
  absl::Status BindCache(const Cache& cache, std::uint64_t namespace_id, std::span<const GroupViews> groups);
  absl::StatusOr<PublishResult> Publish(const Cache& cache, std::uint64_t namespace_id,
                                        const PublishBlocks& blocks);
  // A lease of 0 ms: the daemon's default.
  absl::StatusOr<PrefixHit> Lookup(std::uint64_t namespace_id, std::string_view hashes,
                                   const std::string& device, std::chrono::milliseconds lease);
  absl::StatusOr<LoadResult> Load(const Cache& cache, std::uint64_t namespace_id, const LoadBlocks& blocks);
  absl::StatusOr<std::chrono::milliseconds> RenewLease(std::uint64_t lease_id,
                                                       std::chrono::milliseconds lease);
  absl::Status ReleaseLease(std::uint64_t lease_id);
  // From sequence number 0: from now on.
  std::unique_ptr<EventWatch> WatchEvents(std::uint64_t namespace_id, std::uint64_t from_sequence);

  // Hand-offs, as kvsummary/v1/handoff.proto describes their calls.

  absl::StatusOr<HandoffOffer> Offer(const Cache& cache, const OfferedRequest& offered);
  // Answers the bytes that are staged of the offer. `cache` is the one that was offered from.
  absl::StatusOr<std::int64_t> Append(const Cache& cache, std::uint64_t offer_id, const AppendedPart& part);
  // Waits for what is appended yet; like every call, for the client's timeout at most.
  absl::StatusOr<AcceptResult> Accept(const Cache& cache, const std::string& handoff,
                                      const AcceptedRequest& accepted);
  absl::Status CancelHandoff(std::uint64_t offer_id);

 private:
  friend class Client;
  struct Impl;
  explicit ClientSession(std::unique_ptr<Impl> impl);
  Client::Impl& client() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvsummary
