// The source's side: sends ranges of staging memory to peers that name their token.
//
// A peer is a connection that came to the listener. Requests on any other are dropped. A peer that has
// kMaxUcxSends requests under way is refused more.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/ucx/am.h"
#include "server/ucx/control.h"
#include "server/ucx/memories.h"
#include "server/ucx/worker.h"

namespace kvsummary {

inline constexpr int kMaxUcxSends = 64;            // under way to one peer
inline constexpr std::size_t kMaxUcxPeers = 1024;  // later ones are rejected

class UcxSource {
 public:
  using Time = std::chrono::steady_clock::time_point;

  UcxSource(const UcxMemories& staging, UcxControl& control, std::chrono::milliseconds deadline)
      : staging_(staging), control_(control), deadline_(deadline) {}

  // For the listener that `worker` has.
  ucp_listener_conn_handler_t ConnectionHandler() { return {OnConnect, this}; }
  absl::Status Serve(UcxWorker& worker);
  // No callback comes afterwards.
  void CloseAll();

  void Lend(const UcxCommand& command);
  void Revoke(const UcxCommand& command, Time now);

  // Closes what has to be, and answers revocations.
  void Pump(Time now);
  // When Pump has something to do even if nothing happens.
  Time NextDeadline() const;

 private:
  struct Range {
    std::uint32_t staging;
    std::int64_t from;
    std::int64_t bytes;
  };
  struct Send {
    UcxSource* source;
    std::uint64_t token;
    ucp_ep_h endpoint;
    UcxChunkHeader header;  // has to live until the send has ended
    std::list<Send>::iterator self;
  };
  struct Peer {
    int sends = 0;
    bool lost = false;
  };
  struct Revocation {
    std::uint64_t id;
    std::uint64_t token;
    Time deadline;
  };

  static void OnConnect(ucp_conn_request_h request, void* self);
  static void OnLost(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t OnFetch(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t bytes, const ucp_am_recv_param_t* parameters);
  static void OnSent(void* request, ucs_status_t status, void* send);

  absl::StatusCode Check(const UcxFetchHeader& fetch, const Peer& peer) const;
  void Reply(const UcxFetchHeader& fetch, ucp_ep_h endpoint);
  void End(const Send& send);
  void ClosePeer(ucp_ep_h endpoint);

  const UcxMemories& staging_;
  UcxControl& control_;
  const std::chrono::milliseconds deadline_;
  UcxWorker* worker_ = nullptr;
  absl::flat_hash_map<std::uint64_t, std::vector<Range>> loans_;  // by token
  std::list<Send> sends_;
  absl::flat_hash_map<std::uint64_t, int> sends_of_token_;
  absl::flat_hash_map<ucp_ep_h, Peer> peers_;
  std::vector<Revocation> revocations_;  // in the order of their deadlines
  bool has_lost_ = false;                // some peer is lost
};

}  // namespace kvsummary
