#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <utility>

#include "kvsummary/v1/prefix.grpc.pb.h"
#include "server/rpc/counters.h"
#include "server/rpc/event_stream.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/prefix_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_reactor.h"

namespace kvsummary {
namespace {

// A call that moves pages of a cache: waits for its counter where it has one, then calls the store.
class MoveReactor : public grpc::ServerUnaryReactor {
 public:
  void OnCancel() final { context_.service.waits.Cancel(wait_); }  // never before Begin has returned
  void OnDone() final { delete this; }

 protected:
  explicit MoveReactor(const PrefixContext& context) : context_(context), admission_(context.service.drain) {}

  // To be called once, when the object is complete.
  template <typename Request>
  void Begin(const Request& request) {
    if (!admission_.admitted().ok()) return End(admission_.admitted());
    auto session = context_.service.sessions.Find(request.session_id());
    if (!session.ok()) return End(session.status());
    session_ = *std::move(session);
    if (AnswerRepeated()) return;
    const auto ready = FindCounter(*session_, request.has_ready(), request.ready(), "ready");
    if (!ready.ok()) return End(ready.status());
    if (!*ready || (*ready)->Reached()) return Move();
    auto wait = context_.service.waits.Start(session_, **ready, "ready",
                                             [this](const absl::Status& outcome) { Awaited(outcome); });
    if (!wait.ok()) return End(wait.status());
    wait_ = *std::move(wait);
  }

  void End(const absl::Status& status) { Finish(ToGrpc(status)); }

  const PrefixContext& context() const { return context_; }
  Session& session() const { return *session_; }

 private:
  // Ends a call whose answer is known: that has nothing to wait for. Whether it has.
  virtual bool AnswerRepeated() { return false; }
  // Calls the store, or End.
  virtual void Move() = 0;

  void Awaited(const absl::Status& outcome) {
    if (outcome.ok()) return OnGrpcThread([this] { Move(); });
    End(OfCounter(outcome));
  }

  const PrefixContext context_;
  const Drain::Call admission_;
  std::shared_ptr<Session> session_;
  std::weak_ptr<Waits::Wait> wait_;
};

class PublishReactor final : public MoveReactor {
 public:
  PublishReactor(const PrefixContext& context, const v1::PublishRequest& request, v1::PublishResponse* reply)
      : MoveReactor(context), request_(request), reply_(reply) {
    Begin(request);
  }

 private:
  bool AnswerRepeated() override {
    const auto before = context().sessions.FindPublished(
        session().number(), static_cast<NamespaceId>(request_.namespace_id()), request_.request_id());
    if (before) Answer(*before);
    return before.has_value();
  }

  void Move() override {
    const std::uint64_t number = session().number();
    PublishArgs args = ToArgs(request_);
    args.session = number;
    auto cache = FindBound(context(), number, args.name_space, request_.cache());
    if (!cache.ok()) return End(cache.status());
    args.cache = *std::move(cache);
    const auto before = context().sessions.BeginPublish(number, args.name_space, request_.request_id());
    if (!before.ok()) return End(before.status());
    if (*before) return Answer(**before);
    context().service.store.Publish(std::move(args), [this](absl::StatusOr<PublishResult> result) {
      context().sessions.EndPublish(session().number(), request_.request_id(), result);
      if (!result.ok()) return End(result.status());
      Answer(*result);
    });
  }

  void Answer(const PublishResult& result) {
    FillReply(result, reply_);
    End(absl::OkStatus());
  }

  const v1::PublishRequest& request_;  // gRPC keeps both until OnDone
  v1::PublishResponse* const reply_;
};

class LoadReactor final : public MoveReactor {
 public:
  LoadReactor(const PrefixContext& context, const v1::LoadRequest& request, v1::LoadResponse* reply)
      : MoveReactor(context), request_(request), reply_(reply) {
    Begin(request);
  }

 private:
  void Move() override {
    auto done = FindCounter(session(), request_.has_done(), request_.done(), "done");
    if (!done.ok()) return End(done.status());
    const std::uint64_t number = session().number();
    LoadArgs args = ToArgs(request_);
    args.session = number;
    auto cache =
        FindBound(context(), number, static_cast<NamespaceId>(request_.namespace_id()), request_.cache());
    if (!cache.ok()) return End(cache.status());
    args.cache = *std::move(cache);
    context().service.store.Load(std::move(args),
                                 [this, done = *std::move(done)](const absl::StatusOr<LoadResult>& result) {
                                   if (!result.ok()) return End(result.status());
                                   FillReply(*result, request_, reply_);
                                   if (done && reply_->groups().empty()) done->Set();
                                   End(absl::OkStatus());
                                 });
  }

  const v1::LoadRequest& request_;  // gRPC keeps both until OnDone
  v1::LoadResponse* const reply_;
};

class PrefixService final : public v1::PrefixService::CallbackService {
 public:
  explicit PrefixService(const ServiceContext& context) : service_(context), context_{service_, sessions_} {}

  grpc::ServerUnaryReactor* DeclareNamespace(grpc::CallbackServerContext* /*call*/,
                                             const v1::DeclareNamespaceRequest* request,
                                             v1::DeclareNamespaceResponse* reply) override {
    return Admitted([&] { return kvsummary::DeclareNamespace(context_, *request, *reply); });
  }
  grpc::ServerUnaryReactor* BindCache(grpc::CallbackServerContext* /*call*/,
                                      const v1::BindCacheRequest* request,
                                      v1::BindCacheResponse* /*reply*/) override {
    return Admitted([&] { return kvsummary::BindCache(context_, *request); });
  }
  grpc::ServerUnaryReactor* Publish(grpc::CallbackServerContext* /*call*/, const v1::PublishRequest* request,
                                    v1::PublishResponse* reply) override {
    return new PublishReactor(context_, *request, reply);
  }
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* /*call*/, const v1::LookupRequest* request,
                                   v1::LookupResponse* reply) override {
    return Admitted([&] { return kvsummary::Lookup(context_, *request, *reply); });
  }
  grpc::ServerUnaryReactor* Load(grpc::CallbackServerContext* /*call*/, const v1::LoadRequest* request,
                                 v1::LoadResponse* reply) override {
    return new LoadReactor(context_, *request, reply);
  }
  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* /*call*/,
                                       const v1::RenewLeaseRequest* request,
                                       v1::RenewLeaseResponse* reply) override {
    return Admitted([&] { return kvsummary::RenewLease(context_, *request, *reply); });
  }
  // While the daemon drains too: it gives something back.
  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* call,
                                         const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* /*reply*/) override {
    return Done(call->DefaultReactor(), kvsummary::ReleaseLease(context_, *request));
  }
  grpc::ServerWriteReactor<v1::WatchEventsResponse>* WatchEvents(
      grpc::CallbackServerContext* /*call*/, const v1::WatchEventsRequest* request) override {
    return NewEventStream(context_, *request);
  }
  grpc::ServerUnaryReactor* ListNamespaces(grpc::CallbackServerContext* call,
                                           const v1::ListNamespacesRequest* /*request*/,
                                           v1::ListNamespacesResponse* reply) override {
    kvsummary::ListNamespaces(context_, *reply);
    return Done(call->DefaultReactor(), absl::OkStatus());
  }

 private:
  static grpc::ServerUnaryReactor* Done(grpc::ServerUnaryReactor* reactor, const absl::Status& status) {
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  // Makes a call that ends at once, unless the daemon drains.
  template <typename Call>
  grpc::ServerUnaryReactor* Admitted(Call call) {
    auto* reactor = new UnaryReactor(service_.drain);
    return Done(reactor, reactor->admitted().ok() ? call() : reactor->admitted());
  }

  const ServiceContext service_;
  PrefixSessions sessions_;
  const PrefixContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakePrefixService(const ServiceContext& context) {
  return std::make_unique<PrefixService>(context);
}

}  // namespace kvsummary
