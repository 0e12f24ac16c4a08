#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "server/error.h"
#include "server/handoff/handoff_text.h"
#include "server/handoff/local_pull.h"
#include "server/rpc/handoff_calls.h"
#include "server/rpc/pull_links.h"
#include "server/rpc/pull_source.h"
#include "server/rpc/remembered_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/unary_reactor.h"
#include "server/rpc/waiting_reactor.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

constexpr int kMaxAccepts = 1024;  // under way

// What Offer and Append of one service remember.
struct Repeats {
  RememberedCalls<v1::OfferResponse> offers;
  RememberedCalls<v1::AppendResponse> appends;
};

// Everything that the session has offered ends with it.
void ForgetAtEnd(const ServiceContext& context, Repeats& repeats, Session& session) {
  session.OnEnd(&repeats, [&offers = context.offers, &repeats, number = session.number()] {
    offers.EndSession(number);
    repeats.offers.EndSession(number);
    repeats.appends.EndSession(number);
  });
}

class OfferReactor final : public WaitingReactor {
 public:
  OfferReactor(const ServiceContext& context, Repeats& repeats, const v1::OfferRequest& request,
               v1::OfferResponse* reply)
      : WaitingReactor(context), repeats_(repeats), request_(request), reply_(reply) {
    Begin(request);
  }

 private:
  bool AnswerRepeated() override {
    const auto before = repeats_.offers.Find(session()->number(), request_.request_id());
    if (!before) return false;
    *reply_ = *before;
    End(absl::OkStatus());
    return true;
  }

  void Go() override {
    auto args = ToOpenArgs(context(), *session(), request_);
    if (!args.ok()) return End(args.status());
    const std::uint64_t number = session()->number();
    const auto before = repeats_.offers.Begin(number, request_.request_id());
    ForgetAtEnd(context(), repeats_, *session());
    if (!before.ok()) return End(before.status());
    if (*before) {  // ended since this one began
      *reply_ = **before;
      return End(absl::OkStatus());
    }
    const std::int32_t layers = args->cache->geometry().layers;
    context().offers.Open(*std::move(args), [this, layers](const absl::StatusOr<Offers::Opened>& opened) {
      Opened(layers, opened);
    });
  }

  void Opened(std::int32_t layers, const absl::StatusOr<Offers::Opened>& opened) {
    absl::StatusOr<v1::OfferResponse> answer = v1::OfferResponse();
    if (!opened.ok()) {
      answer = opened.status();
    } else {
      answer->set_handoff(FormatHandoff({.instance = context().handoff.instance,
                                         .secret = opened->secret,
                                         .address = context().handoff.address,
                                         .layers = layers,
                                         .committed_tokens = opened->committed_tokens}));
      answer->set_offer_id(opened->number);
      answer->set_lifetime_milliseconds(opened->lifetime.count());
      answer->set_staged_bytes(opened->staged_bytes);
    }
    repeats_.offers.End(session()->number(), request_.request_id(), answer);
    ForgetAtEnd(context(), repeats_, *session());  // it may have ended meanwhile
    if (answer.ok()) *reply_ = *std::move(answer);
    End(opened.status());
  }

  Repeats& repeats_;
  const v1::OfferRequest& request_;  // gRPC keeps both until OnDone
  v1::OfferResponse* const reply_;
};

class AppendReactor final : public WaitingReactor {
 public:
  AppendReactor(const ServiceContext& context, Repeats& repeats, const v1::AppendRequest& request,
                v1::AppendResponse* reply)
      : WaitingReactor(context), repeats_(repeats), request_(request), reply_(reply) {
    Begin(request);
  }

 private:
  bool AnswerRepeated() override {
    const auto before = repeats_.appends.Find(session()->number(), request_.request_id());
    if (!before) return false;
    *reply_ = *before;
    End(absl::OkStatus());
    return true;
  }

  void Go() override {
    const std::uint64_t number = session()->number();
    auto part = ToPartArgs(context(), number, request_);
    if (!part.ok()) return End(part.status());
    const auto before = repeats_.appends.Begin(number, request_.request_id());
    ForgetAtEnd(context(), repeats_, *session());
    if (!before.ok()) return End(before.status());
    if (*before) {  // ended since this one began
      *reply_ = **before;
      return End(absl::OkStatus());
    }
    context().offers.Append(number, request_.offer_id(), *std::move(part),
                            [this](const absl::StatusOr<std::int64_t>& staged) { Appended(staged); });
  }

  void Appended(const absl::StatusOr<std::int64_t>& staged) {
    absl::StatusOr<v1::AppendResponse> answer = v1::AppendResponse();
    if (staged.ok()) {
      answer->set_staged_bytes(*staged);
    } else {
      answer = staged.status();
    }
    repeats_.appends.End(session()->number(), request_.request_id(), answer);
    ForgetAtEnd(context(), repeats_, *session());
    if (answer.ok()) *reply_ = *std::move(answer);
    End(staged.status());
  }

  Repeats& repeats_;
  const v1::AppendRequest& request_;  // gRPC keeps both until OnDone
  v1::AppendResponse* const reply_;
};

// Cancelling the call, or the session's end, fails the acceptance: its end ends the call. When that is over,
// and the source's word awaited, they end the call at once.
class AcceptReactor final : public WaitingReactor {
 public:
  AcceptReactor(const ServiceContext& context, std::atomic<int>& under_way, const v1::AcceptRequest& request,
                v1::AcceptResponse* reply)
      : WaitingReactor(context), under_way_(under_way), request_(request), reply_(reply) {
    ++under_way_;
    Begin(request);
  }

  void OnCancel() override {
    WaitingReactor::OnCancel();
    Fail(absl::CancelledError("the call has been cancelled"));
  }

  void OnDone() override {
    if (session() != nullptr) session()->Forget(this);
    if (const auto cache = cache_.lock()) cache->Forget(this);
    --under_way_;
    WaitingReactor::OnDone();
  }

 private:
  void Go() override {
    if (const absl::Status started = Start(); !started.ok()) {
      ++context().stats.handoffs_failed;
      End(started);
    }
  }

  absl::Status Start() {
    if (under_way_ > kMaxAccepts) {
      return Refuse(Reason::HANDOFF_LIMIT, "",
                    absl::StrFormat("%d hand-offs are being accepted", kMaxAccepts));
    }
    auto handoff = ParseHandoff(request_.handoff());
    if (!handoff.ok()) return handoff.status();
    handoff_ = *std::move(handoff);
    auto target = ToTarget(context(), *session(), request_);
    if (!target.ok()) return target.status();
    if (auto s = CheckFits(handoff_, *target); !s.ok()) return s;
    transfer_ = request_.transfer_id();
    if (transfer_.empty()) {
      auto made = RandomBytes(kTransferBytes);
      if (!made.ok()) return made.status();
      transfer_ = *std::move(made);
    } else if (transfer_.size() != kTransferBytes) {
      return Refuse(Reason::SIZE_MISMATCH, "transfer_id",
                    absl::StrFormat("transfer_id has %d bytes, not %d", transfer_.size(), kTransferBytes));
    }
    cache_ = target->cache;
    return handoff_.instance == context().handoff.instance ? PullHere(*std::move(target))
                                                           : PullFrom(*std::move(target));
  }

  std::shared_ptr<Acceptance> MakeAcceptance(AcceptTarget target) {
    return std::make_shared<Acceptance>(std::move(target), context().bounces,
                                        [this](const absl::StatusOr<Accepted>& accepted) { Over(accepted); });
  }

  absl::Status PullHere(AcceptTarget target) {
    auto offer = context().offers.Bind(handoff_.secret, transfer_);
    if (!offer.ok()) return offer.status();
    const auto acceptance = MakeAcceptance(std::move(target));
    Hold(acceptance, [this, offer = *std::move(offer), acceptance] {
      local_ = LocalPull::Start(offer, acceptance);
      return absl::OkStatus();
    });
    return absl::OkStatus();
  }

  absl::Status PullFrom(AcceptTarget target) {
    if (handoff_.address.empty()) {
      return Refuse(Reason::PEER_UNREACHABLE, "handoff",
                    "the daemon that offered does not say where it is reached: it needs --advertise");
    }
    if (auto s = context().handoff.peers.Check(handoff_.address); !s.ok()) return s;
    const auto acceptance = MakeAcceptance(std::move(target));
    Hold(acceptance, [this, acceptance] {
      auto pulling = context().links.Pull(handoff_.address, handoff_.secret, transfer_, acceptance);
      if (pulling.ok()) remote_ = *std::move(pulling);
      return pulling.status();
    });
    return absl::OkStatus();
  }

  // Starts what feeds the acceptance. All of it under the lock: Conclude, on another thread, may come before
  // this returns, and ends with this object.
  template <typename Start>
  void Hold(const std::shared_ptr<Acceptance>& acceptance, Start start) {
    // Before the lock, which it takes; OnDone waits for it.
    session()->OnEnd(this,
                     [this] { Fail(Refuse(Reason::SESSION_ENDED, "session_id", "the session has ended")); });
    const std::lock_guard lock(mutex_);
    acceptance_ = acceptance;
    cache_.lock()->OnDeleted(this, [weak = std::weak_ptr(acceptance)] {
      if (const auto held = weak.lock()) {
        held->Fail(Refuse(Reason::CACHE_NOT_FOUND, "cache", "the cache has been deleted"));
      }
    });
    const absl::Status started = cancelled_.ok() ? start() : cancelled_;
    if (!started.ok()) acceptance->Fail(started);
  }

  void Fail(const absl::Status& why) {
    std::shared_ptr<Acceptance> acceptance;
    {
      const std::lock_guard lock(mutex_);
      cancelled_ = why;
      acceptance = acceptance_;
    }
    if (acceptance != nullptr) acceptance->Fail(why);
    // Who tells of a failure may hold what Answer takes.
    if (awaiting_->exchange(nullptr) != nullptr) OnGrpcThread([this, why] { Answer(why); });
  }

  // Nothing is written to the cache any more. Who tells of a failure may hold what Conclude takes.
  void Over(const absl::StatusOr<Accepted>& accepted) {
    if (accepted.ok()) return Conclude(accepted);
    OnGrpcThread([this, accepted] { Conclude(accepted); });
  }

  void Conclude(const absl::StatusOr<Accepted>& accepted) {
    {
      const std::lock_guard lock(mutex_);
      acceptance_ = nullptr;
      local_ = nullptr;
    }
    if (!accepted.ok()) return Answer(accepted.status());
    reply_->set_bytes(accepted->bytes);
    reply_->set_committed_tokens(accepted->committed_tokens);
    reply_->set_device_nanoseconds(accepted->device_time.count());
    if (remote_ == nullptr) {
      reply_->set_transport(v1::HANDOFF_TRANSPORT_SAME_DAEMON);
      // The parts were held while they were read: an offer that has ended since is no fault.
      context().offers.Acknowledge(handoff_.secret, transfer_).IgnoreError();
      return Answer(absl::OkStatus());
    }
    reply_->set_transport(remote_->transport());
    reply_->set_reconnects(remote_->reconnects());
    reply_->set_damaged_chunks(remote_->damaged_chunks());
    const auto remote = std::move(remote_);  // this object may be no more once it can be answered
    // The client need not wait for the source's word, unless that can still tell that the bytes are wrong.
    if (!remote->certain()) {
      const auto awaiting = awaiting_;
      absl::Status cancelled;
      {
        const std::lock_guard lock(mutex_);
        cancelled = cancelled_;
        if (cancelled.ok()) awaiting->store(this);
      }
      if (!cancelled.ok()) return Answer(cancelled);
      return remote->Acknowledge([awaiting](const absl::Status& acknowledged) {
        if (AcceptReactor* self = awaiting->exchange(nullptr)) self->Answer(acknowledged);
      });
    }
    const std::string address = handoff_.address;
    Answer(absl::OkStatus());
    remote->Acknowledge([address](const absl::Status& acknowledged) {
      if (acknowledged.ok()) return;
      spdlog::warn("a hand-off from {} is not acknowledged: {}", address,
                   std::string(acknowledged.message()));
    });
  }

  void Answer(const absl::Status& status) {
    remote_ = nullptr;
    Stats& stats = context().stats;
    if (status.ok()) {
      ++stats.handoffs_accepted;
      Stats::Counter& bytes =
          reply_->transport() == v1::HANDOFF_TRANSPORT_SAME_DAEMON ? stats.handoff_same_daemon_bytes
          : reply_->transport() == v1::HANDOFF_TRANSPORT_SAME_HOST ? stats.handoff_same_host_bytes
          : reply_->transport() == v1::HANDOFF_TRANSPORT_UCX       ? stats.handoff_ucx_bytes
                                                                   : stats.handoff_grpc_bytes;
      bytes += reply_->bytes();
    } else {
      ++stats.handoffs_failed;
    }
    End(status);
  }

  std::atomic<int>& under_way_;
  const v1::AcceptRequest& request_;  // gRPC keeps both until OnDone
  v1::AcceptResponse* const reply_;
  Handoff handoff_;
  std::string transfer_;
  std::weak_ptr<Cache> cache_;  // that it is for
  // While the source's word is awaited: this object. Who takes it away answers, and nobody else.
  const std::shared_ptr<std::atomic<AcceptReactor*>> awaiting_ =
      std::make_shared<std::atomic<AcceptReactor*>>(nullptr);
  std::mutex mutex_;
  absl::Status cancelled_;  // or the session has ended
  std::shared_ptr<Acceptance> acceptance_;
  std::shared_ptr<LocalPull> local_;
  std::shared_ptr<PullLinks::Pulling> remote_;
};

class HandoffService final : public v1::HandoffService::CallbackService {
 public:
  explicit HandoffService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Offer(grpc::CallbackServerContext* /*call*/, const v1::OfferRequest* request,
                                  v1::OfferResponse* reply) override {
    return new OfferReactor(context_, repeats_, *request, reply);
  }
  grpc::ServerUnaryReactor* Append(grpc::CallbackServerContext* /*call*/, const v1::AppendRequest* request,
                                   v1::AppendResponse* reply) override {
    return new AppendReactor(context_, repeats_, *request, reply);
  }
  grpc::ServerUnaryReactor* Accept(grpc::CallbackServerContext* /*call*/, const v1::AcceptRequest* request,
                                   v1::AcceptResponse* reply) override {
    return new AcceptReactor(context_, accepts_, *request, reply);
  }
  // These two while the daemon drains too: they give something back.
  grpc::ServerUnaryReactor* CancelHandoff(grpc::CallbackServerContext* call,
                                          const v1::CancelHandoffRequest* request,
                                          v1::CancelHandoffResponse* /*reply*/) override {
    return Done(call, kvsummary::CancelHandoff(context_, *request));
  }
  grpc::ServerUnaryReactor* Acknowledge(grpc::CallbackServerContext* call,
                                        const v1::AcknowledgeRequest* request,
                                        v1::AcknowledgeResponse* /*reply*/) override {
    return Done(call, context_.offers.Acknowledge(request->offer_secret(), request->transfer_id()));
  }
  grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* Pull(
      grpc::CallbackServerContext* call) override {
    return NewPullSource(context_, *call);
  }

 private:
  static grpc::ServerUnaryReactor* Done(grpc::CallbackServerContext* call, const absl::Status& status) {
    auto* reactor = call->DefaultReactor();
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  const ServiceContext context_;
  Repeats repeats_;
  std::atomic<int> accepts_ = 0;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeHandoffService(const ServiceContext& context) {
  return std::make_unique<HandoffService>(context);
}

}  // namespace kvsummary
