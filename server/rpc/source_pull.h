// One offer as it is pulled over one stream: what the puller wants of it, what it has been told and sent.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/offers.h"
#include "server/handoff/plan.h"
#include "server/rpc/context.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {

// A part's bytes are kept from when it is told until the pull ends: who maps them reads them without a word.
struct SourcePull {
  struct Place {
    std::size_t part = 0;
    std::int64_t chunk = 0;
  };

  // Whether a request to begin is one: MESSAGE_MALFORMED.
  static absl::Status Check(const v1::PullBegin& begin);
  // `begin` has been checked.
  SourcePull(const v1::PullBegin& begin, std::shared_ptr<Offer> pulled,
             std::unique_ptr<Drain::Call> admitted);

  // The next chunk that the puller wants and has not got, of the parts that have been told; nothing where
  // chunks are not sent.
  std::optional<Place> Take();
  // Whether everything has been told and given out, but not that it has.
  bool IsThrough() const;
  // Asks for a chunk again: MESSAGE_MALFORMED when it cannot have been sent.
  absl::Status TakeAgain(const v1::PullAgain& chunk);
  // Nothing more is sent, and nothing is kept. What is read of mapped memory from now on cannot be
  // acknowledged.
  void End();

  std::unique_ptr<Drain::Call> admission;  // it holds a drain up
  std::shared_ptr<Offer> offer;
  v1::HandoffTransport transport = v1::HANDOFF_TRANSPORT_GRPC;
  std::unique_ptr<UcxTransport::Loan> loan;              // of UCX
  std::vector<std::shared_ptr<const StagedPart>> parts;  // that have been told
  bool complete = false;                                 // no others will come
  std::int64_t committed_tokens = 0;                     // when complete
  std::size_t loads = 0;                                 // of its chunks, under way
  bool done = false;                                     // that has been told
  bool ended = false;                                    // the offer is no more, or could not be read

 private:
  bool Holds(const Place& place) const;

  Wanted wanted_;
  std::map<std::size_t, std::vector<Wanted::Run>> held_;  // by part: that the puller has
  Place next_;                                            // chunk to look at
  std::deque<Place> again_;
};

}  // namespace kvsummary
