// Requests of HandoffService as server/handoff takes them.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvsummary/v1/admin.pb.h"
#include "kvsummary/v1/handoff.pb.h"
#include "server/handoff/acceptance.h"
#include "server/handoff/handoff_text.h"
#include "server/handoff/offers.h"
#include "server/rpc/context.h"

namespace kvsummary {

absl::StatusOr<Offers::OpenArgs> ToOpenArgs(const ServiceContext& context, const Session& session,
                                            const v1::OfferRequest& request);
absl::StatusOr<Addition> ToPartArgs(const ServiceContext& context, std::uint64_t session,
                                    const v1::AppendRequest& request);
// Checked.
absl::StatusOr<AcceptTarget> ToTarget(const ServiceContext& context, const Session& session,
                                      const v1::AcceptRequest& request);
// Whether what a hand-off itself tells fits the target: GEOMETRY_DIFFERS, RESUME_OUT_OF_RANGE.
absl::Status CheckFits(const Handoff& handoff, const AcceptTarget& target);

absl::Status CancelHandoff(const ServiceContext& context, const v1::CancelHandoffRequest& request);
void FillStats(const ServiceContext& context, v1::HandoffStats* out);

}  // namespace kvsummary
