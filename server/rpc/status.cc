#include "server/rpc/status.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr int kRetryDelayNanos = 50'000'000;

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message(status.message());
  const std::string reason = RefusalReason(status);
  if (reason.empty()) return {code, message};
  const std::string field = RefusalField(status);

  google::rpc::Status details;
  details.set_code(code);
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("kvsummary");
  if (!field.empty()) (*info.mutable_metadata())["field"] = field;
  details.add_details()->PackFrom(info);
  const auto is = [&reason](Reason other) { return reason == ReasonName(other); };
  if (is(Reason::MEMORY_BUDGET_EXCEEDED) || is(Reason::OUT_OF_MEMORY) || is(Reason::STORE_FULL) ||
      is(Reason::QUOTA_EXCEEDED) || is(Reason::HANDOFF_BUDGET_EXCEEDED)) {
    google::rpc::QuotaFailure quota;
    auto* violation = quota.add_violations();
    violation->set_subject(is(Reason::QUOTA_EXCEEDED)            ? "namespace"
                           : is(Reason::STORE_FULL)              ? "store"
                           : is(Reason::HANDOFF_BUDGET_EXCEEDED) ? "handoff"
                                                                 : "memory");
    violation->set_description(message);
    details.add_details()->PackFrom(quota);
  } else if (is(Reason::QUEUE_FULL)) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(kRetryDelayNanos);
    details.add_details()->PackFrom(retry);
  } else if (!field.empty()) {
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description(message);
    details.add_details()->PackFrom(bad);
  }
  return {code, message, details.SerializeAsString()};
}

}  // namespace kvsummary
