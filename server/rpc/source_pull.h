// One offer as it is pulled over one stream: what the puller wants of it, what it has been told and sent.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/offers.h"
#include "server/handoff/plan.h"
#include "server/rpc/context.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {

// A part's bytes are kept from when it is told until the pull ends: who maps them reads them without a word.
// Of an offer that ends before, or whose puller's stream does, they are kept for as long as they are lent.
class SourcePull {
 public:
  struct Place {
    std::size_t part = 0;
    std::int64_t chunk = 0;
    auto operator<=>(const Place&) const = default;
  };

  // Whether a request to begin is one: MESSAGE_MALFORMED.
  static absl::Status Check(const v1::PullBegin& begin);
  // How long after it is told `accepted` who maps the memory may read it, whatever becomes of the offer.
  static constexpr std::chrono::milliseconds kLease{500};

  // `begin` has been checked.
  SourcePull(const v1::PullBegin& begin, std::shared_ptr<Offer> offer,
             std::unique_ptr<Drain::Call> admission);

  Offer& offer() const { return *offer_; }
  const std::shared_ptr<Offer>& shared_offer() const { return offer_; }
  const std::string& secret() const { return secret_; }
  const std::string& transfer() const { return transfer_; }
  const StagedPart& part(std::size_t number) const { return *parts_[number]; }
  std::shared_ptr<const StagedPart> shared_part(std::size_t number) const { return parts_[number]; }

  // What it keeps of `held` and `blocks`, in runs: no more than came.
  std::size_t runs() const { return held_.size() + wanted_.blocks.size(); }

  // If the offer has ended, lets go of what it has of it, whenever that can be told.
  void NoticeEnd();
  // Adds what the puller has not been told yet to a message.
  void Tell(v1::PullResponse& message);
  // Nothing more is sent but why.
  void Fail(const absl::Status& why);
  // To be called when the puller is gone without a word.
  void LetGo();

  // The next chunk that the puller wants and has not got, of the parts that have been told; nothing where
  // chunks are not sent.
  std::optional<Place> Take();
  // Asks for a chunk again: MESSAGE_MALFORMED when it cannot have been sent.
  absl::Status TakeAgain(const v1::PullAgain& chunk);

  // How it goes: chosen before anything is told.
  v1::PullAccepted accepted = {};
  v1::HandoffTransport transport = v1::HANDOFF_TRANSPORT_GRPC;
  std::unique_ptr<UcxTransport::Loan> loan = nullptr;  // of UCX
  std::int64_t under_way_bytes = 0;                    // of chunks: for which no credit has come back
  std::size_t loads = 0;                               // of its chunks, being read

 private:
  struct HeldRun {
    Place begin;
    std::int64_t end = 0;  // chunk after the last
  };

  void TakeEnd(const absl::Status& ended);
  bool Holds(const Place& place) const;
  // Whether all that there will ever be has been taken.
  bool IsThrough() const;

  const std::unique_ptr<Drain::Call> admission_;  // it holds a drain up
  const std::shared_ptr<Offer> offer_;
  const std::string secret_;
  const std::string transfer_;
  Wanted wanted_;
  std::vector<HeldRun> held_;                             // that the puller has: rising, apart
  std::vector<std::shared_ptr<const StagedPart>> parts_;  // that have been told
  std::chrono::steady_clock::time_point lent_until_;      // if they are read where they lie
  bool begun_ = false;                                    // `accepted` has been told
  bool done_ = false;                                     // and that no more parts will come
  absl::Status failed_;                                   // why nothing more is sent
  bool told_failed_ = false;
  Place next_;  // chunk to look at
  std::deque<Place> again_;
};

}  // namespace kvsummary
