#include "client/status.h"

#include <grpcpp/support/status.h>

#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/client.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace kvsummary {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com/";

template <typename Detail>
std::string TypeUrl() {
  return kTypePrefix + Detail::descriptor()->full_name();
}

template <typename Detail>
void SetDetail(const Detail& detail, absl::Status& status) {
  status.SetPayload(TypeUrl<Detail>(), absl::Cord(detail.SerializeAsString()));
}

void SetReason(const std::string& reason, absl::Status& status) {
  google::rpc::ErrorInfo info;
  info.set_domain("kvsummary");
  info.set_reason(reason);
  SetDetail(info, status);
}

// The default message when there is no such payload, or none that parses.
template <typename Detail>
Detail GetDetail(const absl::Status& status) {
  Detail detail;
  const auto payload = status.GetPayload(TypeUrl<Detail>());
  if (payload.has_value() && !detail.ParseFromString(std::string(*payload))) detail.Clear();
  return detail;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const auto& detail : details.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

absl::Status FromPlain(const PlainStatus& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.code), status.message);
  if (!status.reason.empty()) SetReason(status.reason, result);
  return result;
}

absl::Status MakeError(absl::StatusCode code, const std::string& message, const std::string& reason,
                       const std::string& field) {
  absl::Status status(code, message);
  SetReason(reason, status);
  google::rpc::BadRequest request;
  auto* violation = request.add_field_violations();
  violation->set_field(field);
  violation->set_description(message);
  SetDetail(request, status);
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  return GetDetail<google::rpc::ErrorInfo>(status).reason();
}

std::string FieldOf(const absl::Status& status) {
  const auto request = GetDetail<google::rpc::BadRequest>(status);
  return request.field_violations().empty() ? "" : request.field_violations(0).field();
}

std::string Describe(const absl::Status& status) {
  std::string text = absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  std::vector<std::string> details;
  if (const std::string reason = ReasonOf(status); !reason.empty()) details.push_back("reason " + reason);
  if (const std::string field = FieldOf(status); !field.empty()) details.push_back("field " + field);
  if (!details.empty()) absl::StrAppend(&text, " (", absl::StrJoin(details, ", "), ")");
  return text;
}

}  // namespace kvsummary
