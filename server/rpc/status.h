// absl::Status to grpc::Status with google.rpc details.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace kvsummary {

// The same code and message. A status made by Refuse gets an ErrorInfo with its reason, and where it names
// a field a BadRequest (or, for an exhausted budget, a QuotaFailure); a full queue gets a RetryInfo.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace kvsummary
