#include "server/error.h"

#include "absl/strings/cord.h"

namespace kvsummary {
namespace {

constexpr absl::string_view kReasonUrl = "kvsummary/reason";
constexpr absl::string_view kFieldUrl = "kvsummary/field";

struct ReasonEntry {
  std::string_view name;
  absl::StatusCode code;
};

constexpr ReasonEntry kReasons[] = {
#define X(name, code) {#name, absl::StatusCode::code},
    KVSUMMARY_REASONS(X)
#undef X
};

const ReasonEntry& Entry(Reason reason) { return kReasons[static_cast<std::size_t>(reason)]; }

std::string Payload(const absl::Status& status, absl::string_view url) {
  const auto payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace

std::string_view ReasonName(Reason reason) { return Entry(reason).name; }

absl::Status Refuse(Reason reason, std::string_view field, std::string_view message) {
  return MakeRefusal(Entry(reason).code, Entry(reason).name, field, message);
}

absl::Status MakeRefusal(absl::StatusCode code, std::string_view reason, std::string_view field,
                         std::string_view message) {
  absl::Status status(code, ToAbsl(message));
  status.SetPayload(kReasonUrl, absl::Cord(ToAbsl(reason)));
  if (!field.empty()) status.SetPayload(kFieldUrl, absl::Cord(ToAbsl(field)));
  return status;
}

absl::Status AtField(absl::Status refusal, std::string_view field) {
  refusal.SetPayload(kFieldUrl, absl::Cord(ToAbsl(field)));
  return refusal;
}

std::string RefusalReason(const absl::Status& status) { return Payload(status, kReasonUrl); }
std::string RefusalField(const absl::Status& status) { return Payload(status, kFieldUrl); }

}  // namespace kvsummary
