// The reactor of a unary call that may have to wait for a counter of its session before it touches a cache.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <utility>

#include "server/rpc/context.h"
#include "server/rpc/counters.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/status.h"

namespace kvsummary {

// Deletes itself when the call has ended. A derived class calls Begin once, when the object is complete.
class WaitingReactor : public grpc::ServerUnaryReactor {
 public:
  void OnCancel() override { context_.waits.Cancel(wait_); }  // never before Begin has returned
  void OnDone() override { delete this; }

 protected:
  explicit WaitingReactor(const ServiceContext& context) : context_(context), admission_(context.drain) {}

  template <typename Request>
  void Begin(const Request& request) {
    if (!admission_.admitted().ok()) return End(admission_.admitted());
    auto session = context_.sessions.Find(request.session_id());
    if (!session.ok()) return End(session.status());
    session_ = *std::move(session);
    if (AnswerRepeated()) return;
    const auto ready = FindCounter(*session_, request.has_ready(), request.ready(), "ready");
    if (!ready.ok()) return End(ready.status());
    if (!*ready || (*ready)->Reached()) return Go();
    auto wait = context_.waits.Start(session_, **ready, "ready",
                                     [this](const absl::Status& outcome) { Awaited(outcome); });
    if (!wait.ok()) return End(wait.status());
    wait_ = *std::move(wait);
  }

  void End(const absl::Status& status) { Finish(ToGrpc(status)); }

  const ServiceContext& context() const { return context_; }
  const std::shared_ptr<Session>& session() const { return session_; }

 private:
  // Ends a call whose answer is known: that has nothing to wait for. Whether it has.
  virtual bool AnswerRepeated() { return false; }
  // Does the call's work, and sees to it that End is called.
  virtual void Go() = 0;

  void Awaited(const absl::Status& outcome) {
    if (outcome.ok()) return OnGrpcThread([this] { Go(); });
    End(OfCounter(outcome));
  }

  const ServiceContext context_;
  const Drain::Call admission_;
  std::shared_ptr<Session> session_;
  std::weak_ptr<Waits::Wait> wait_;
};

}  // namespace kvsummary
