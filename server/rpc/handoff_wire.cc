#include "server/rpc/handoff_wire.h"

#include <algorithm>
#include <fstream>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/error.h"
#include "server/rpc/status.h"

namespace kvsummary {

static_assert(v1::HANDOFF_PART_KIND_SUMMARIES == static_cast<int>(PartKind::kSummaries) &&
              v1::HANDOFF_PART_KIND_ROWS == static_cast<int>(PartKind::kRows) &&
              v1::HANDOFF_PART_KIND_BLOCKS == static_cast<int>(PartKind::kBlocks));

void FillPart(const Part& part, std::int64_t offset, v1::PullPart* out) {
  out->set_kind(static_cast<v1::HandoffPartKind>(part.kind));
  if (part.kind != PartKind::kBlocks) {
    out->mutable_layers()->set_first(part.layers.first);
    out->mutable_layers()->set_count(part.layers.count);
  }
  out->set_first(part.first);
  out->set_count(part.count);
  out->set_unit_bytes(part.unit_bytes);
  out->set_group(part.group);
  out->mutable_positions()->Add(part.positions.begin(), part.positions.end());
  out->set_offset_bytes(offset);
}

Part FromProto(const v1::PullPart& part) {
  Part out;
  // A kind that is none is of no size that fits.
  out.kind = part.kind() == v1::HANDOFF_PART_KIND_ROWS     ? PartKind::kRows
             : part.kind() == v1::HANDOFF_PART_KIND_BLOCKS ? PartKind::kBlocks
                                                           : PartKind::kSummaries;
  out.layers = {part.layers().first(), part.layers().count()};
  out.first = part.first();
  out.count = part.count();
  out.unit_bytes = part.unit_bytes();
  out.group = part.group();
  out.positions.assign(part.positions().begin(), part.positions().end());
  return out;
}

absl::Status FromGrpc(const grpc::Status& status) {
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      if (!detail.UnpackTo(&info) || info.domain() != "kvsummary") continue;
      const auto field = info.metadata().find("field");
      return MakeRefusal(code, info.reason(), field == info.metadata().end() ? "" : field->second,
                         status.error_message());
    }
  }
  return absl::Status(code, status.error_message());
}

void FillFailed(const absl::Status& status, v1::PullFailed* out) {
  const grpc::Status failed = ToGrpc(status);
  out->set_code(failed.error_code());
  out->set_message(failed.error_message());
  out->set_details(failed.error_details());
}

absl::Status FromProto(const v1::PullFailed& failed) {
  constexpr int kLastCode = static_cast<int>(grpc::StatusCode::UNAUTHENTICATED);
  const int code = failed.code() > 0 && failed.code() <= kLastCode
                       ? failed.code()
                       : static_cast<int>(grpc::StatusCode::UNKNOWN);
  return FromGrpc({static_cast<grpc::StatusCode>(code), failed.message(), failed.details()});
}

void FillAccepted(const Offer& offer, const Offer::View& view, v1::PullAccepted* out) {
  out->set_layers(offer.layers());
  out->set_block_size(offer.block_size());
  out->set_complete(view.complete);
  if (!view.complete) return;
  out->set_committed_tokens(view.committed_tokens);
  for (const auto& staged : view.parts) {
    if (staged->part.kind != PartKind::kRows) continue;
    out->mutable_positions()->Add(staged->part.positions.begin(), staged->part.positions.end());
  }
}

OfferFacts FromProto(const v1::PullAccepted& accepted) {
  return {.layers = accepted.layers(),
          .block_size = accepted.block_size(),
          .complete = accepted.complete(),
          .committed_tokens = accepted.committed_tokens(),
          .positions = {accepted.positions().begin(), accepted.positions().end()}};
}

std::string BootId() {
  static const std::string read = [] {  // the same for this process's life
    std::string id;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
    return id;
  }();
  return read;
}

}  // namespace kvsummary
