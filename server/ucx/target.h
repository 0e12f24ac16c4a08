// The target's side: fetches ranges of peers' staging memory into landing memory.
//
// A link is the connection to one peer, made by the first fetch and kept. Each has kUcxPeerFetches fetches
// under way at most; the others wait in order. A link that is lost, or of which nothing has come for the
// deadline while something was under way, is closed; then all its fetches end, and the next one connects
// anew.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/ucx/am.h"
#include "server/ucx/control.h"
#include "server/ucx/memories.h"
#include "server/ucx/worker.h"

namespace kvsummary {

class UcxTarget {
 public:
  using Time = std::chrono::steady_clock::time_point;

  UcxTarget(const UcxMemories& landing, UcxControl& control, std::chrono::milliseconds deadline);
  absl::Status Serve(UcxWorker& worker);
  // Every fetch ends; no callback comes afterwards.
  void CloseAll();

  void Fetch(const UcxCommand& command);
  // Sends requests that have their turn, closes links that have failed.
  void Pump(Time now);
  // When Pump has something to do even if nothing happens.
  Time NextDeadline() const;

 private:
  using Address = std::pair<std::uint32_t, std::uint32_t>;  // as in UcxCommand
  struct Link {
    std::string name;
    ucp_ep_h endpoint = nullptr;
    std::deque<UcxCommand> queued;
    int under_way = 0;  // requests sent and not ended
    int receiving = 0;  // of these, whose bytes UCX is writing to their places
    Time progress;      // of the last chunk, or since when something is under way
    ucs_status_t lost = UCS_OK;
    bool closing = false;
  };
  struct Operation {
    UcxTarget* target;
    Link* link;
    UcxCommand command;
  };
  struct Request {  // has to live until it has been sent
    UcxTarget* target;
    UcxFetchHeader header;
  };

  static void OnLost(void* link, ucp_ep_h endpoint, ucs_status_t status);
  static void OnRequestSent(void* request, ucs_status_t status, void* user);
  static ucs_status_t OnChunk(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t bytes, const ucp_am_recv_param_t* parameters);
  static void OnReceived(void* request, ucs_status_t status, std::size_t bytes, void* operation);

  ucs_status_t Receive(const UcxChunkHeader& header, void* data, std::size_t bytes, bool rendezvous);
  ucs_status_t Connect(const Address& address, Link& link);
  void Post(Link& link, Time now);
  void End(std::unique_ptr<Operation> operation, const absl::Status& status);
  // Closes the link and ends all of its fetches.
  void Drop(Link& link, const absl::Status& why);

  const UcxMemories& landing_;
  UcxControl& control_;
  const std::chrono::milliseconds deadline_;
  UcxWorker* worker_ = nullptr;
  std::map<Address, Link> links_;
  // Fetches whose answer has not begun, by the number of their request. Those that receive are their
  // callback's.
  absl::flat_hash_map<std::uint64_t, std::unique_ptr<Operation>> waiting_;
  std::uint64_t last_request_;
};

}  // namespace kvsummary
