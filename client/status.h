// Errors of the daemon in the client's terms.
//
// The daemon's details (google.rpc.ErrorInfo, BadRequest, QuotaFailure, ...) become payloads of the
// absl::Status, one a detail under its type URL; ReasonOf and FieldOf in client.h read two of them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/plain_status.h"

namespace grpc {
class Status;
}

namespace kvsummary {

// Same code and message. Details that do not parse are dropped, the code and the message stay.
absl::Status FromGrpc(const grpc::Status& status);

// The status of what has no Abseil, in the daemon's form.
absl::Status FromPlain(const PlainStatus& status);

// An error that the client finds itself, in the daemon's form: reason without its ERROR_REASON_ prefix.
absl::Status MakeError(absl::StatusCode code, const std::string& message, const std::string& reason,
                       const std::string& field);

// One line for people: "INVALID_ARGUMENT: the message (reason SLOT_OUT_OF_RANGE, field slots[3])".
std::string Describe(const absl::Status& status);

}  // namespace kvsummary
