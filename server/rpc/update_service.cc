#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "kvsummary/v1/update.grpc.pb.h"
#include "server/cache/validate.h"
#include "server/error.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_reactor.h"

namespace kvsummary {
namespace {

// A validated update. `step` points into the request it was parsed from.
struct Update {
  std::shared_ptr<Cache> cache;
  LayerSpan layers;
  Step step;
  StepEffect effect;
  Stats::Counter Stats::*steps = nullptr;
};

template <typename T, typename Field>
std::span<const T> Span(const Field& field) {
  return {field.data(), static_cast<std::size_t>(field.size())};
}

// What the requests of all kinds have.
template <typename Request>
absl::StatusOr<Update> ParseCommon(const CacheManager& caches, const Request& request) {
  auto cache = caches.Find(request.cache().name(), request.cache().generation());
  if (!cache.ok()) return cache.status();
  Update update;
  update.cache = *std::move(cache);
  update.layers = {request.layers().first(), request.layers().count()};
  return update;
}

// Puts what every kind of step has into it, and the step and its effect into the update.
template <typename S, typename Request>
absl::StatusOr<Update> Complete(Update update, S step, const Request& request, const StepArrays& arrays,
                                absl::StatusOr<StepEffect> effect) {
  if (!effect.ok()) return effect.status();
  step.rows = static_cast<std::int32_t>(arrays.slots.size());
  step.in = PackedRows(request.rows().inline_().data(), step.rows);
  step.slots = arrays.slots.data();
  step.ring_bases = arrays.ring_bases.data();
  update.step = step;
  update.effect = *effect;
  return update;
}

absl::StatusOr<Update> Parse(const CacheManager& caches, const v1::UpdateDecodeRequest& request) {
  auto update = ParseCommon(caches, request);
  if (!update.ok()) return update;
  const StepArrays arrays{.slots = Span<std::int64_t>(request.slots()),
                          .positions = Span<std::int64_t>(request.positions()),
                          .ring_bases = Span<std::int64_t>(request.ring_bases())};
  auto effect =
      CheckDecode(update->cache->geometry(), update->layers, arrays, request.rows().inline_().size());
  update->steps = &Stats::decode_steps;
  DecodeStep step;
  step.positions = arrays.positions.data();
  return Complete(*std::move(update), step, request, arrays, std::move(effect));
}

absl::StatusOr<Update> Parse(const CacheManager& caches, const v1::UpdateVerifyRequest& request) {
  auto update = ParseCommon(caches, request);
  if (!update.ok()) return update;
  const StepArrays arrays{.slots = Span<std::int64_t>(request.slots()),
                          .query_start_loc = Span<std::int32_t>(request.query_start_loc()),
                          .seq_lens = Span<std::int32_t>(request.seq_lens()),
                          .ring_bases = Span<std::int64_t>(request.ring_bases())};
  auto effect =
      CheckVerify(update->cache->geometry(), update->layers, arrays, request.rows().inline_().size());
  update->steps = &Stats::verify_steps;
  VerifyStep step;
  step.requests = static_cast<std::int32_t>(arrays.seq_lens.size());
  step.query_start_loc = arrays.query_start_loc.data();
  step.seq_lens = arrays.seq_lens.data();
  return Complete(*std::move(update), step, request, arrays, std::move(effect));
}

absl::StatusOr<Update> Parse(const CacheManager& caches, const v1::UpdatePrefillRequest& request) {
  auto update = ParseCommon(caches, request);
  if (!update.ok()) return update;
  const StepArrays arrays{.slots = Span<std::int64_t>(request.slots()),
                          .positions = Span<std::int64_t>(request.positions()),
                          .query_start_loc = Span<std::int32_t>(request.query_start_loc()),
                          .ring_bases = Span<std::int64_t>(request.ring_bases())};
  auto effect =
      CheckPrefill(update->cache->geometry(), update->layers, arrays, request.rows().inline_().size());
  update->steps = &Stats::prefill_steps;
  PrefillStep step;
  step.requests = static_cast<std::int32_t>(arrays.query_start_loc.size()) - 1;
  step.positions = arrays.positions.data();
  step.query_start_loc = arrays.query_start_loc.data();
  return Complete(*std::move(update), step, request, arrays, std::move(effect));
}

absl::StatusOr<Update> Parse(const CacheManager& caches, const v1::StreamUpdatesRequest& request) {
  switch (request.update_case()) {
    case v1::StreamUpdatesRequest::kDecode:
      return Parse(caches, request.decode());
    case v1::StreamUpdatesRequest::kVerify:
      return Parse(caches, request.verify());
    case v1::StreamUpdatesRequest::kPrefill:
      return Parse(caches, request.prefill());
    case v1::StreamUpdatesRequest::UPDATE_NOT_SET:
      break;
  }
  return Refuse(Reason::FIELD_MISSING, "update", "a message of the stream holds no update");
}

// (executor) Applies and counts.
absl::Status Apply(Stats& stats, Update& update) {
  if (auto s = update.cache->Apply(update.layers, update.step); !s.ok()) return s;
  stats.*update.steps += 1;
  stats.token_layers += update.effect.rows * update.layers.count;
  stats.summaries_written += update.effect.regions_closed * update.layers.count;
  return absl::OkStatus();
}

void FillResult(const StepEffect& effect, v1::UpdateResult* result) {
  result->set_rows(effect.rows);
  result->set_regions_closed(effect.regions_closed);
}

// One StreamUpdates call. A few messages are queued on executors while the next is being read; none is read
// while many answers wait for a client that does not take them. The first error stops everything behind it;
// Finish is called once no work is queued and no write is under way. Messages are parsed here: gRPC would
// report one that is malformed as the end of the stream.
class StreamReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit StreamReactor(const ServiceContext& context) : context_(context), call_(context.drain) {
    {
      std::lock_guard lock(mutex_);
      if (!call_.admitted().ok()) Stop(call_.admitted());
      Read();
    }
    context_.drain.Listen(this, [this] {
      std::lock_guard lock(mutex_);
      Stop(Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls"));
    });
  }

  void OnReadDone(bool ok) override {
    std::unique_lock lock(mutex_);
    if (!ok || stopped_) {
      reading_ = false;
      Stop(absl::OkStatus());
      return;
    }
    // reading_ stays set until the message is queued: no later one can overtake it.
    lock.unlock();
    const std::size_t bytes = message_.Length();
    auto request = std::make_unique<v1::StreamUpdatesRequest>();
    auto update = ParseMessage(*request);  // may take milliseconds
    lock.lock();
    reading_ = false;
    if (!update.ok()) {
      ++context_.stats.refused_steps;
      Stop(update.status());
      return;
    }
    if (stopped_) return;
    Executor& executor = update->cache->device().executor();
    auto queued = executor.Submit([this, bytes, request = std::move(request),
                                   update = *std::move(update)]() mutable { Run(update, bytes); },
                                  bytes);
    if (!queued.ok()) {
      ++context_.stats.refused_steps;
      Stop(std::move(queued));
      return;
    }
    ++queued_;
    queued_bytes_ += bytes;
    Read();
  }

  void OnWriteDone(bool /*ok*/) override {  // a failed write means a cancelled call: reads fail too
    std::lock_guard lock(mutex_);
    results_.pop_front();
    writing_ = false;
    Write();
    Read();
  }

  void OnCancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    Stop(absl::CancelledError("cancelled"));
  }

  void OnDone() override {
    context_.drain.Forget(this);
    { std::lock_guard lock(mutex_); }  // an executor that called Finish may still hold it
    delete this;
  }

 private:
  // What is queued while another message is read, and how many answers may wait.
  static constexpr int kMaxQueued = 4;
  static constexpr std::size_t kMaxQueuedBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxUnwritten = 256;

  absl::StatusOr<Update> ParseMessage(v1::StreamUpdatesRequest& request) {
    using Traits = grpc::SerializationTraits<v1::StreamUpdatesRequest>;
    const bool parsed = Traits::Deserialize(&message_, &request).ok();
    message_.Clear();
    if (parsed) return Parse(context_.caches, request);
    return Refuse(Reason::MESSAGE_MALFORMED, "", "a message of the stream is no StreamUpdatesRequest");
  }

  void Run(Update& update, std::size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      if (failed_ || cancelled_) return Ran(bytes);
    }
    auto status = Apply(context_.stats, update);
    std::lock_guard lock(mutex_);
    if (status.ok()) {
      v1::StreamUpdatesResponse reply;
      FillResult(update.effect, reply.mutable_result());
      bool own = false;
      grpc::SerializationTraits<v1::StreamUpdatesResponse>::Serialize(reply, &results_.emplace_back(), &own);
      Write();
    } else {
      failed_ = true;
      ++context_.stats.refused_steps;
      // What was refused when it was read came later in the stream: this error is the first.
      stopped_ = false;
      Stop(std::move(status));
    }
    Ran(bytes);
  }

  // All below: with mutex_ held.
  void Ran(std::size_t bytes) {
    --queued_;
    queued_bytes_ -= bytes;
    Read();
    MaybeFinish();
  }
  // Reads the next message, unless enough is under way: then whatever ends calls this again.
  void Read() {
    if (reading_ || stopped_ || queued_ >= kMaxQueued || queued_bytes_ >= kMaxQueuedBytes ||
        results_.size() >= kMaxUnwritten) {
      return;
    }
    reading_ = true;
    StartRead(&message_);
  }
  void Write() {
    if (!writing_ && !results_.empty()) {
      writing_ = true;
      StartWrite(&results_.front());
    }
    MaybeFinish();
  }
  // Takes no more messages; the call will end with the status of the first Stop.
  void Stop(absl::Status status) {
    if (!stopped_) {
      stopped_ = true;
      status_ = std::move(status);
    }
    MaybeFinish();
  }
  void MaybeFinish() {
    if (!stopped_ || finished_ || queued_ > 0 || writing_ || !results_.empty()) return;
    finished_ = true;
    Finish(ToGrpc(status_));
  }

  const ServiceContext context_;
  const Drain::Call call_;
  std::mutex mutex_;
  grpc::ByteBuffer message_;              // being read
  std::deque<grpc::ByteBuffer> results_;  // the first is being written when writing_
  int queued_ = 0;                        // updates given to executors and not yet run
  std::size_t queued_bytes_ = 0;          // of their messages
  bool reading_ = false;                  // a message is being read, or has been and is not queued yet
  bool writing_ = false;
  bool failed_ = false;     // an update could not be applied: those behind it must not be
  bool cancelled_ = false;  // by the client, or its deadline
  bool stopped_ = false;
  bool finished_ = false;
  absl::Status status_;
};

using StreamsRaw = v1::UpdateService::WithRawCallbackMethod_StreamUpdates<v1::UpdateService::Service>;
using DecodeToo = v1::UpdateService::WithCallbackMethod_UpdateDecode<StreamsRaw>;
using VerifyToo = v1::UpdateService::WithCallbackMethod_UpdateVerify<DecodeToo>;
using AllMethods = v1::UpdateService::WithCallbackMethod_UpdatePrefill<VerifyToo>;

class UpdateService final : public AllMethods {
 public:
  explicit UpdateService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* UpdateDecode(grpc::CallbackServerContext* call,
                                         const v1::UpdateDecodeRequest* request,
                                         v1::UpdateDecodeResponse* reply) override {
    return Handle(call, *request, reply);
  }
  grpc::ServerUnaryReactor* UpdateVerify(grpc::CallbackServerContext* call,
                                         const v1::UpdateVerifyRequest* request,
                                         v1::UpdateVerifyResponse* reply) override {
    return Handle(call, *request, reply);
  }
  grpc::ServerUnaryReactor* UpdatePrefill(grpc::CallbackServerContext* call,
                                          const v1::UpdatePrefillRequest* request,
                                          v1::UpdatePrefillResponse* reply) override {
    return Handle(call, *request, reply);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StreamUpdates(
      grpc::CallbackServerContext* /*call*/) override {
    return new StreamReactor(context_);
  }

 private:
  template <typename Request, typename Reply>
  grpc::ServerUnaryReactor* Handle(grpc::CallbackServerContext* call, const Request& request, Reply* reply) {
    auto* reactor = new UnaryReactor(context_.drain);
    const auto refuse = [&](const absl::Status& status) {
      ++context_.stats.refused_steps;
      reactor->Finish(ToGrpc(status));
      return reactor;
    };
    if (!reactor->admitted().ok()) return refuse(reactor->admitted());
    auto update = Parse(context_.caches, request);
    if (!update.ok()) return refuse(update.status());
    Executor& executor = update->cache->device().executor();
    auto queued = executor.Submit(
        [this, call, reactor, reply, update = *std::move(update)]() mutable {
          if (call->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
          auto status = Apply(context_.stats, update);
          if (status.ok()) {
            FillResult(update.effect, reply->mutable_result());
          } else {
            ++context_.stats.refused_steps;
          }
          reactor->Finish(ToGrpc(status));
        },
        request.ByteSizeLong());
    if (!queued.ok()) return refuse(queued);
    return reactor;
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeUpdateService(const ServiceContext& context) {
  return std::make_unique<UpdateService>(context);
}

}  // namespace kvsummary
