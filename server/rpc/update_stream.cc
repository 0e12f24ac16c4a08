#include "server/rpc/update_stream.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "kvsummary/v1/update.pb.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/status.h"
#include "server/rpc/update_request.h"

namespace kvsummary {
namespace {

// A few messages are queued on executors while the next is being read; none is read while many answers wait
// for a client that does not take them, or behind one that waits for its counter. The first error stops
// everything behind it; Finish is called once no message is under way and no write.
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
    {
      std::lock_guard lock(mutex_);
      if (!ok || stopped_) {
        reading_ = false;
        Stop(absl::OkStatus());
        return;
      }
      taken_ = {.bytes = message_.Length()};
      ++under_way_;
      bytes_under_way_ += taken_.bytes;
    }
    // reading_ stays set until the message is queued: no later one can overtake it, and taken_ is its own.
    auto shared = ParseMessage();
    if (!shared.ok()) return Refused(shared.status());
    taken_.shared = *std::move(shared);
    if (!taken_.shared.MustWait()) return Queue();
    std::unique_lock lock(mutex_);
    if (stopped_) return Dropped();
    auto wait = context_.waits.Start(taken_.shared.session, *taken_.shared.ready, "shared.ready",
                                     [this](const absl::Status& outcome) { Awaited(outcome); });
    if (wait.ok()) {
      wait_ = *std::move(wait);
      return;
    }
    lock.unlock();
    Refused(wait.status());
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
  // What is under way while another message is read, and how many answers may wait.
  static constexpr int kMaxUnderWay = 4;
  static constexpr std::size_t kMaxBytesUnderWay = std::size_t{64} << 20;
  static constexpr std::size_t kMaxUnwritten = 256;

  // A message that has been read and is not queued yet.
  struct Taken {
    std::size_t bytes = 0;
    std::unique_ptr<v1::StreamUpdatesRequest> request = nullptr;
    Shared shared = {};
  };

  absl::StatusOr<Shared> ParseMessage() {
    using Traits = grpc::SerializationTraits<v1::StreamUpdatesRequest>;
    taken_.request = std::make_unique<v1::StreamUpdatesRequest>();
    const bool parsed = Traits::Deserialize(&message_, taken_.request.get()).ok();
    message_.Clear();
    if (parsed) return FindShared(context_.sessions, *taken_.request);
    return Refuse(Reason::MESSAGE_MALFORMED, "", "a message of the stream is no StreamUpdatesRequest");
  }

  void Awaited(const absl::Status& outcome) {
    if (!outcome.ok()) return Refused(outcome);
    if (!SlowToParse(*taken_.request)) return Queue();
    OnGrpcThread([this] { Queue(); });
  }

  // Checks the message that was taken, which may take milliseconds, and gives it to its device.
  void Queue() {
    auto update = Parse(context_.caches, *taken_.request, std::move(taken_.shared));
    if (!update.ok()) return Refused(update.status());
    std::unique_lock lock(mutex_);
    if (stopped_) return Dropped();
    Executor& executor = update->cache->device().executor();
    const std::size_t bytes = taken_.bytes;
    const std::size_t held = bytes + update->copied.bytes();
    auto queued = executor.Submit([this, bytes, request = std::move(taken_.request),
                                   update = *std::move(update)] { Run(update, bytes); },
                                  held);
    if (!queued.ok()) {
      lock.unlock();
      return Refused(queued);
    }
    reading_ = false;
    Read();
  }

  // The message that was taken is refused, or its wait was cancelled because the stream has stopped.
  void Refused(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      ++context_.stats.refused_steps;
      Stop(status);
    }
    Dropped();
  }

  void Run(const Update& update, std::size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      if (failed_ || cancelled_) return Passed(bytes);
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
    Passed(bytes);
  }

  // All below: with mutex_ held.
  // The message that was taken will not be queued.
  void Dropped() {
    reading_ = false;
    Passed(taken_.bytes);
  }
  void Passed(std::size_t bytes) {
    --under_way_;
    bytes_under_way_ -= bytes;
    Read();
    MaybeFinish();
  }
  // Reads the next message, unless enough is under way: then whatever ends calls this again.
  void Read() {
    if (reading_ || stopped_ || under_way_ >= kMaxUnderWay || bytes_under_way_ >= kMaxBytesUnderWay ||
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
  // Takes no more messages, and lets none wait; the call will end with the status of the first Stop.
  void Stop(absl::Status status) {
    if (!stopped_) {
      stopped_ = true;
      status_ = std::move(status);
      context_.waits.Cancel(wait_);
    }
    MaybeFinish();
  }
  void MaybeFinish() {
    if (!stopped_ || finished_ || under_way_ > 0 || writing_ || !results_.empty()) return;
    finished_ = true;
    Finish(ToGrpc(status_));
  }

  const ServiceContext context_;
  const Drain::Call call_;
  std::mutex mutex_;
  grpc::ByteBuffer message_;         // being read
  Taken taken_;                      // of whoever has the message that was read, from then until it is queued
  std::weak_ptr<Waits::Wait> wait_;  // of the message that was taken, while it waits for its counter
  std::deque<grpc::ByteBuffer> results_;  // the first is being written when writing_
  int under_way_ = 0;                     // messages that have been read and have not run
  std::size_t bytes_under_way_ = 0;
  bool reading_ = false;  // a message is being read, or has been and is not queued yet
  bool writing_ = false;
  bool failed_ = false;     // an update could not be applied: those behind it must not be
  bool cancelled_ = false;  // by the client, or its deadline
  bool stopped_ = false;
  bool finished_ = false;
  absl::Status status_;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewUpdateStream(const ServiceContext& context) {
  return new StreamReactor(context);
}

}  // namespace kvsummary
