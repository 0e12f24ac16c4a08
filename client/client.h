// C++ client of summaryd.
//
//   auto client = kvsummary::Client::Connect("unix:/run/summaryd/summaryd.sock");
//   auto cache = (*client)->CreateCache("engine-0", "", {.layers = 23, .blocks = 4096, .block_size = 64,
//                                                        .ring_blocks = 257, .capacity = 10, .k = 3});
//   auto result = (*client)->Decode(*cache, {0, 23}, {slots, positions, ring_bases, rows});
//
// Thread-safe. Calls block until answered, at most Options::timeout each. Errors are those of the
// daemon: the same code, the message, and the payloads that ReasonOf and FieldOf read. Calls larger than
// a message are split, by layers first, then by tokens (verify: by requests); each message is all or
// nothing, and a Progress says how far a failed call came.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/prefix.h"
#include "client/tls.h"
#include "kernels/layout.h"

namespace kvsummary {

// A cache in one life, with its geometry (defaults filled in).
struct Cache {
  std::string name;
  std::uint64_t generation = 0;
  std::string device;
  CacheGeometry geometry;
};

// Rows are bf16 [layers][rows][512], key then z. Arrays as in kvsummary/v1/update.proto.
struct DecodeUpdate {
  std::span<const std::int64_t> slots, positions, ring_bases;  // [rows]
  std::span<const std::uint16_t> rows;
};
struct VerifyUpdate {
  std::span<const std::int64_t> slots;            // [rows]
  std::span<const std::int32_t> query_start_loc;  // [requests + 1]
  std::span<const std::int32_t> seq_lens;         // [requests]
  std::span<const std::int64_t> ring_bases;       // [rows]
  std::span<const std::uint16_t> rows;
};
struct PrefillUpdate {
  std::span<const std::int64_t> slots, positions;  // [rows]
  std::span<const std::int32_t> query_start_loc;   // [requests + 1]
  std::span<const std::int64_t> ring_bases;        // [rows]
  std::span<const std::uint16_t> rows;
};

struct UpdateResult {
  std::int64_t rows = 0;            // not padding
  std::int64_t regions_closed = 0;  // in each layer
};

// How far a call came that was split, also when it failed: every layer of [0, layers) (counted from the
// call's first) has all its rows applied, and layers [layers, layers + partial_layers) have the first `rows`
// of them.
struct Progress {
  std::int32_t layers = 0;
  std::int32_t partial_layers = 0;
  std::int64_t rows = 0;
};

// The daemon's reason ("SLOT_OUT_OF_RANGE") and field ("slots[3]") in a status; empty when there is none.
std::string ReasonOf(const absl::Status& status);
std::string FieldOf(const absl::Status& status);

struct DeviceInfo {
  std::string name, description, uuid;
  std::int64_t budget_bytes = 0, used_bytes = 0, overhead_bytes = 0, pinned_host_bytes = 0;
  std::string unusable_reason;
};

struct ServerInfo {
  std::string version, default_device;
  std::int64_t max_message_bytes = 0;
  std::vector<DeviceInfo> devices;
};

// What a session holds, as AdminService.ListSessions tells it.
struct SessionSummary {
  std::string name;
  std::uint64_t number = 0;  // in the order of opening, from 1
  double age_seconds = 0;
  std::vector<std::string> caches, mapped_caches;
  std::int64_t tickets = 0;  // not redeemed yet
  std::int64_t buffers = 0, buffer_bytes = 0;
  std::int64_t waits = 0;  // updates that wait for a counter
};

class ClientSession;  // client/session.h, with what follows
struct SharedUpdate;

class Client {
 public:
  struct Options {
    std::chrono::milliseconds connect_timeout = std::chrono::seconds(10);
    std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of each message
    std::int64_t max_message_bytes = 4 << 20;                      // gRPC's default
    TlsFiles tls = {};                                             // over TCP, where it has a CA
  };

  // `address` is "unix:PATH" or "HOST:PORT". Waits for the daemon up to connect_timeout; UNAVAILABLE after.
  // INVALID_ARGUMENT names a file of `tls` that cannot be used.
  // Each client is a connection of its own; it connects again by itself when the daemon comes back.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address, const Options& options);
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address);
  ~Client();

  absl::StatusOr<ServerInfo> GetServerInfo();

  // `device` empty: the daemon's default. block_stride and rows_per_layer of 0: the least.
  absl::StatusOr<Cache> CreateCache(const std::string& name, const std::string& device,
                                    const CacheGeometry& geometry);
  absl::StatusOr<Cache> GetCache(const std::string& name);
  absl::StatusOr<std::vector<Cache>> ListCaches();
  absl::Status DeleteCache(const Cache& cache);

  absl::StatusOr<UpdateResult> Decode(const Cache& cache, LayerSpan layers, const DecodeUpdate& update,
                                      Progress* progress = nullptr);
  absl::StatusOr<UpdateResult> Verify(const Cache& cache, LayerSpan layers, const VerifyUpdate& update,
                                      Progress* progress = nullptr);
  absl::StatusOr<UpdateResult> Prefill(const Cache& cache, LayerSpan layers, const PrefillUpdate& update,
                                       Progress* progress = nullptr);

  // Pages [blocks][layers][block_size/8][256].
  absl::StatusOr<std::vector<std::uint8_t>> ReadPages(const Cache& cache,
                                                      std::span<const std::int64_t> blocks, LayerSpan layers);
  absl::Status WritePages(const Cache& cache, std::span<const std::int64_t> blocks, LayerSpan layers,
                          std::span<const std::uint8_t> pages);
  // Rows bf16 [ring_blocks][layers][capacity][512].
  absl::StatusOr<std::vector<std::uint16_t>> ReadRing(const Cache& cache,
                                                      std::span<const std::int64_t> ring_blocks,
                                                      LayerSpan layers);
  absl::Status WriteRing(const Cache& cache, std::span<const std::int64_t> ring_blocks, LayerSpan layers,
                         std::span<const std::uint16_t> rows);

  // Updates through one stream, many in flight: the lowest cost a step. Not thread-safe.
  class UpdateStream {
   public:
    ~UpdateStream();  // cancels what is not answered yet
    // Sends; splits like the calls above. Blocks while more than a few messages are unanswered. An error
    // (also of an earlier update) ends the stream: nothing after the refused message is applied.
    absl::Status Decode(const Cache& cache, LayerSpan layers, const DecodeUpdate& update);
    absl::Status Verify(const Cache& cache, LayerSpan layers, const VerifyUpdate& update);
    absl::Status Prefill(const Cache& cache, LayerSpan layers, const PrefillUpdate& update);
    // By reference to buffers of the session. `update.done` is set before its answer comes. A step that waits
    // for `update.ready` holds back those behind it.
    absl::Status Decode(const ClientSession& session, const Cache& cache, LayerSpan layers,
                        const SharedUpdate& update);
    absl::Status Verify(const ClientSession& session, const Cache& cache, LayerSpan layers,
                        const SharedUpdate& update);
    absl::Status Prefill(const ClientSession& session, const Cache& cache, LayerSpan layers,
                         const SharedUpdate& update);
    // Waits until all that was sent is answered; the sum of the results since the last Flush, or the error
    // that ended the stream.
    absl::StatusOr<UpdateResult> Flush();

   private:
    friend class Client;
    struct Impl;
    explicit UpdateStream(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  std::unique_ptr<UpdateStream> OpenUpdateStream();

  // Opens a session; `name` is for people. What can be done with it is in client/session.h.
  absl::StatusOr<std::unique_ptr<ClientSession>> OpenSession(const std::string& name);
  // Every live session, oldest first.
  absl::StatusOr<std::vector<SessionSummary>> ListSessions();

  // Ends an offer of this daemon's, by its hand-off: for who has no session, as a router.
  absl::Status CancelHandoff(const std::string& handoff);

  // The page store.
  absl::StatusOr<std::vector<NamespaceUsage>> ListNamespaces();
  absl::StatusOr<StoreStats> GetStoreStats();
  absl::StatusOr<CheckReport> Check();
  // One JSON object: the fields of kvsummary.v1.GetStatsResponse by their names.
  absl::StatusOr<std::string> GetStatsJson();

 private:
  friend class ClientSession;
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvsummary
