// One call with the client's deadline. Private to the client.
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "client/client_impl.h"
#include "client/status.h"

namespace kvsummary {

// Calls `method` of `stub` within the deadline.
template <typename Stub, typename Request, typename Response>
absl::Status Call(const Client::Options& options, Stub& stub,
                  grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineOf(options));
  return FromGrpc((stub.*method)(&context, request, response));
}

}  // namespace kvsummary
