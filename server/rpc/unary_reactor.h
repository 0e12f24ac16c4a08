// The reactor of a unary call that a drain waits for.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "server/rpc/context.h"

namespace kvsummary {

// Deletes itself when the call has ended. Finish it at once when it was not admitted.
class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryReactor(Drain& drain) : call_(drain) {}
  const absl::Status& admitted() const { return call_.admitted(); }
  void OnDone() override { delete this; }

 private:
  const Drain::Call call_;
};

}  // namespace kvsummary
