#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <utility>

#include "kvsummary/v1/prefix.grpc.pb.h"
#include "server/rpc/counters.h"
#include "server/rpc/event_stream.h"
#include "server/rpc/prefix_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_reactor.h"
#include "server/rpc/waiting_reactor.h"

namespace kvsummary {
namespace {

// A call that moves pages of a cache.
class MoveReactor : public WaitingReactor {
 protected:
  explicit MoveReactor(const PrefixContext& context) : WaitingReactor(context.service), prefixes_(context) {}
  const PrefixContext& prefixes() const { return prefixes_; }

 private:
  const PrefixContext prefixes_;
};

class PublishReactor final : public MoveReactor {
 public:
  PublishReactor(const PrefixContext& context, const v1::PublishRequest& request, v1::PublishResponse* reply)
      : MoveReactor(context), request_(request), reply_(reply) {
    Begin(request);
  }

 private:
  bool AnswerRepeated() override {
    const auto before = prefixes().sessions.FindPublished(
        session()->number(), static_cast<NamespaceId>(request_.namespace_id()), request_.request_id());
    if (before) Answer(*before);
    return before.has_value();
  }

  void Go() override {
    const std::uint64_t number = session()->number();
    PublishArgs args = ToArgs(request_);
    args.session = number;
    auto cache = FindBound(prefixes(), number, args.name_space, request_.cache());
    if (!cache.ok()) return End(cache.status());
    args.cache = *std::move(cache);
    const auto before = prefixes().sessions.BeginPublish(number, args.name_space, request_.request_id());
    if (!before.ok()) return End(before.status());
    if (*before) return Answer(**before);
    context().store.Publish(std::move(args), [this](absl::StatusOr<PublishResult> result) {
      prefixes().sessions.EndPublish(session()->number(), request_.request_id(), result);
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
  void Go() override {
    auto done = FindCounter(*session(), request_.has_done(), request_.done(), "done");
    if (!done.ok()) return End(done.status());
    const std::uint64_t number = session()->number();
    LoadArgs args = ToArgs(request_);
    args.session = number;
    auto cache =
        FindBound(prefixes(), number, static_cast<NamespaceId>(request_.namespace_id()), request_.cache());
    if (!cache.ok()) return End(cache.status());
    args.cache = *std::move(cache);
    context().store.Load(std::move(args),
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
  explicit PrefixService(const ServiceContext& context)
      : service_(context), context_{service_, service_.prefixes} {}

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
  const PrefixContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakePrefixService(const ServiceContext& context) {
  return std::make_unique<PrefixService>(context);
}

}  // namespace kvsummary
