// The ways to bring rows to a cache, behind one interface: what conformance, replay and the benchmark drive.
//
//   inline   rows and arrays travel in the messages
//   shared   they lie in a buffer that the session has registered; messages refer to them
//   queue    as shared, but submitted through a queue in shared memory instead of messages
//   direct   this process maps the cache and runs the kernels itself
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/command_line.h"
#include "client/direct/kvsummary.h"
#include "client/session.h"

namespace kvsummary {

enum class PlaneKind { kInline, kShared, kQueue, kDirect };

// "inline", "shared", "queue" or "direct".
absl::StatusOr<PlaneKind> ParsePlane(const std::string& name);

// --plane, of commands that make updates.
Flag PlaneFlag();

// A cache made for one plane, and its updates by it. Not thread-safe. The client must outlive it.
class Plane {
 public:
  // Makes the cache as Client::CreateCache does; on the inline plane it is the operator's, else of a session
  // that the plane opens.
  static absl::StatusOr<std::unique_ptr<Plane>> Create(PlaneKind kind, Client& client,
                                                       const std::string& name, const std::string& device,
                                                       const CacheGeometry& geometry);
  virtual ~Plane() = default;

  const Cache& cache() const { return cache_; }
  // The session that the cache is of; null on the inline plane.
  virtual ClientSession* session() const { return nullptr; }
  // Results are those of Client's calls. On the direct plane nobody checks the arrays but the kernels: rows
  // that they skip are an INVALID_ARGUMENT after the others have been applied.
  virtual absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& update) = 0;
  virtual absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& update) = 0;
  virtual absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& update) = 0;

  // Deletes the cache. Only the destructor may follow.
  virtual absl::Status Delete();

 protected:
  Plane(Client& client, Cache cache) : client_(client), cache_(std::move(cache)) {}
  Client& client() const { return client_; }

 private:
  Client& client_;
  const Cache cache_;
};

// "PREFIX-" and 16 random hex digits: a name that no other cache has.
std::string UniqueName(const std::string& prefix);

// Arguments of kvs_map. They point into the three.
kvs_map_args MapArguments(const ClientSession& session, const Cache& cache, const ExportedMemory& memory);

}  // namespace kvsummary
