#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "kvsummary/v1/session.grpc.pb.h"
#include "server/error.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"

namespace kvsummary {
namespace {

// Events that a client has not read yet; one that lets more pile up loses its session.
constexpr std::size_t kMaxEvents = 256;

// One Open call: the session lives as long as it does. When the client goes, in whatever way, gRPC calls
// OnCancel; the daemon ends it when it drains, once that has been told.
class OpenReactor final : public grpc::ServerWriteReactor<v1::OpenResponse>, SessionStreams::Stream {
 public:
  OpenReactor(const ServiceContext& context, grpc::CallbackServerContext& call,
              const v1::OpenRequest& request)
      : context_(context), call_(call) {
    const Drain::Call now(context.drain);  // refused while draining, but not waited for
    auto session = context_.sessions.Open(request.name());
    if (!now.admitted().ok() && session.ok()) {
      context_.sessions.End(*session);
      session = now.admitted();
    }
    if (!session.ok()) {
      finished_ = true;
      Finish(ToGrpc(session.status()));
      return;
    }
    session_ = *std::move(session);
    {
      std::lock_guard lock(mutex_);
      auto* opened = events_.emplace_back().mutable_opened();
      opened->set_session_id(session_->id());
      opened->set_descriptor_socket(context_.descriptor_socket);
      Write();
    }
    context_.streams.Add(session_->number(), this);
  }

  void CacheLost(const std::string& name, std::uint64_t generation) override {
    std::lock_guard lock(mutex_);
    auto* cache = events_.emplace_back().mutable_cache_lost()->mutable_cache();
    cache->set_name(name);
    cache->set_generation(generation);
    if (events_.size() > kMaxEvents) call_.TryCancel();
    Write();
  }
  void Draining() override {
    std::lock_guard lock(mutex_);
    events_.emplace_back().mutable_draining();
    Write();
  }
  void End() override {
    std::lock_guard lock(mutex_);
    Stop(Refuse(Reason::DRAINING, "", "the daemon is draining"));
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    events_.pop_front();
    if (!ok) {
      events_.clear();
      Stop(absl::CancelledError("the client has gone"));
    }
    Write();
  }

  void OnCancel() override {
    if (session_ != nullptr) context_.sessions.End(session_);
    std::lock_guard lock(mutex_);
    if (!writing_) events_.clear();
    Stop(absl::CancelledError("the client has gone"));
  }

  void OnDone() override {
    if (session_ != nullptr) {
      context_.streams.Remove(session_->number());
      context_.sessions.End(session_);
    }
    { std::lock_guard lock(mutex_); }  // who called Finish may still hold it
    delete this;
  }

 private:
  // All below: with mutex_ held.
  void Write() {
    if (!writing_ && !events_.empty() && !finished_) {
      writing_ = true;
      StartWrite(&events_.front());
    }
    MaybeFinish();
  }
  // The call ends with the status of the first Stop, once the events before it are written.
  void Stop(absl::Status status) {
    if (!stopped_) {
      stopped_ = true;
      status_ = std::move(status);
    }
    Write();
  }
  void MaybeFinish() {
    if (!stopped_ || finished_ || writing_ || !events_.empty()) return;
    finished_ = true;
    Finish(ToGrpc(status_));
  }

  const ServiceContext context_;
  grpc::CallbackServerContext& call_;
  std::shared_ptr<Session> session_;
  std::mutex mutex_;
  std::deque<v1::OpenResponse> events_;  // the first is being written when writing_
  bool writing_ = false;
  bool stopped_ = false;
  bool finished_ = false;
  absl::Status status_;
};

class SessionService final : public v1::SessionService::CallbackService {
 public:
  explicit SessionService(const ServiceContext& context) : context_(context) {}

  grpc::ServerWriteReactor<v1::OpenResponse>* Open(grpc::CallbackServerContext* call,
                                                   const v1::OpenRequest* request) override {
    return new OpenReactor(context_, *call, *request);
  }

 private:
  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSessionService(const ServiceContext& context) {
  return std::make_unique<SessionService>(context);
}

}  // namespace kvsummary
