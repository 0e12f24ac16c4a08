#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "kvsummary/v1/update.grpc.pb.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/memory_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_reactor.h"
#include "server/rpc/update_request.h"
#include "server/rpc/update_stream.h"

namespace kvsummary {
namespace {

// A call of one update: wait for its counter where it has one, check, queue on the device, answer.
template <typename Request, typename Reply>
class UpdateReactor final : public grpc::ServerUnaryReactor {
 public:
  UpdateReactor(const ServiceContext& context, grpc::CallbackServerContext* call, const Request& request,
                Reply* reply)
      : context_(context), admission_(context.drain), call_(call), request_(request), reply_(reply) {
    Begin();
  }

  void OnCancel() override { context_.waits.Cancel(wait_); }  // never before the constructor has returned
  void OnDone() override { delete this; }

 private:
  void Begin() {
    if (!admission_.admitted().ok()) return Refused(admission_.admitted());
    auto shared = FindShared(context_.sessions, request_);
    if (!shared.ok()) return Refused(shared.status());
    shared_ = *std::move(shared);
    if (!shared_.MustWait()) return Queue();
    auto wait = context_.waits.Start(shared_.session, *shared_.ready, "shared.ready",
                                     [this](const absl::Status& outcome) { Awaited(outcome); });
    if (!wait.ok()) return Refused(wait.status());
    wait_ = *std::move(wait);
  }

  void Awaited(const absl::Status& outcome) {
    if (absl::IsCancelled(outcome)) return Finish(grpc::Status::CANCELLED);
    if (!outcome.ok()) return Refused(outcome);
    if (!SlowToParse(request_)) return Queue();
    OnGrpcThread([this] { Queue(); });
  }

  void Queue() {
    auto update = Parse(context_.caches, request_, std::move(shared_));
    if (!update.ok()) return Refused(update.status());
    Executor& executor = update->cache->device().executor();
    const std::size_t bytes = request_.ByteSizeLong() + update->copied.bytes();
    auto queued = executor.Submit([this, update = *std::move(update)] { Run(update); }, bytes);
    if (!queued.ok()) Refused(queued);
  }

  void Run(const Update& update) {
    if (call_->IsCancelled()) return Finish(grpc::Status::CANCELLED);
    const auto status = Apply(context_.stats, update);
    if (!status.ok()) return Refused(status);
    FillResult(update.effect, reply_->mutable_result());
    Finish(grpc::Status::OK);
  }

  void Refused(const absl::Status& status) {
    ++context_.stats.refused_steps;
    Finish(ToGrpc(status));
  }

  const ServiceContext context_;
  const Drain::Call admission_;
  grpc::CallbackServerContext* const call_;
  const Request& request_;  // gRPC keeps both until OnDone
  Reply* const reply_;
  Shared shared_;
  std::weak_ptr<Waits::Wait> wait_;
};

using StreamsRaw = v1::UpdateService::WithRawCallbackMethod_StreamUpdates<v1::UpdateService::Service>;
using DecodeToo = v1::UpdateService::WithCallbackMethod_UpdateDecode<StreamsRaw>;
using VerifyToo = v1::UpdateService::WithCallbackMethod_UpdateVerify<DecodeToo>;
using PrefillToo = v1::UpdateService::WithCallbackMethod_UpdatePrefill<VerifyToo>;
using AllMethods = v1::UpdateService::WithCallbackMethod_OpenQueue<PrefillToo>;

class UpdateService final : public AllMethods {
 public:
  explicit UpdateService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* UpdateDecode(grpc::CallbackServerContext* call,
                                         const v1::UpdateDecodeRequest* request,
                                         v1::UpdateDecodeResponse* reply) override {
    return new UpdateReactor(context_, call, *request, reply);
  }
  grpc::ServerUnaryReactor* UpdateVerify(grpc::CallbackServerContext* call,
                                         const v1::UpdateVerifyRequest* request,
                                         v1::UpdateVerifyResponse* reply) override {
    return new UpdateReactor(context_, call, *request, reply);
  }
  grpc::ServerUnaryReactor* UpdatePrefill(grpc::CallbackServerContext* call,
                                          const v1::UpdatePrefillRequest* request,
                                          v1::UpdatePrefillResponse* reply) override {
    return new UpdateReactor(context_, call, *request, reply);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StreamUpdates(
      grpc::CallbackServerContext* /*call*/) override {
    return NewUpdateStream(context_);
  }
  grpc::ServerUnaryReactor* OpenQueue(grpc::CallbackServerContext* /*call*/,
                                      const v1::OpenQueueRequest* request,
                                      v1::OpenQueueResponse* reply) override {
    auto* reactor = new UnaryReactor(context_.drain);
    auto status = reactor->admitted();
    if (status.ok()) status = kvsummary::OpenQueue(context_, *request, *reply);
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

 private:
  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeUpdateService(const ServiceContext& context) {
  return std::make_unique<UpdateService>(context);
}

}  // namespace kvsummary
