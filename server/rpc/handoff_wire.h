// Hand-offs as messages.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/offers.h"

namespace kvsummary {

inline constexpr int kPullVersion = 1;  // of HandoffService.Pull: what handoff.proto says

// `offset` is where the part begins in its memory.
void FillPart(const Part& part, std::int64_t offset, v1::PullPart* out);
// To be checked with CheckPart.
Part FromProto(const v1::PullPart& part);

// A status of another daemon's: with its reason and field, where it has them.
absl::Status FromGrpc(const grpc::Status& status);
void FillFailed(const absl::Status& status, v1::PullFailed* out);
absl::Status FromProto(const v1::PullFailed& failed);

// What an offer can tell at first.
void FillAccepted(const Offer& offer, const Offer::View& view, v1::PullAccepted* out);
OfferFacts FromProto(const v1::PullAccepted& accepted);

// Identity of the host's boot; empty where the system does not tell.
std::string BootId();

}  // namespace kvsummary
