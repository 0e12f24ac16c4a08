// The StreamUpdates call.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "server/rpc/context.h"

namespace kvsummary {

// Owns itself. Takes and gives messages as bytes, and parses them here: gRPC would report one that is
// malformed as the end of the stream. What `context` refers to is needed until the call has ended.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewUpdateStream(const ServiceContext& context);

}  // namespace kvsummary
