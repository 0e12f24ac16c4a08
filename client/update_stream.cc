// Client: updates through one stream. Works on a completion queue of its own, on the caller's thread: at most
// one write and one read are under way, and every wait for them has a deadline.
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/session.h"
#include "client/shared_message.h"
#include "client/status.h"
#include "client/update_message.h"

namespace kvsummary {
namespace {

constexpr std::size_t kWindow = 8;  // unanswered messages; a step of a large batch is a few

}  // namespace

struct Client::UpdateStream::Impl {
 public:
  Impl(const std::shared_ptr<v1::UpdateService::Stub>& stub, const Options& options)
      : options_(options), stub_(stub), stream_(stub->AsyncStreamUpdates(&context_, &queue_, &writing_)) {}

  ~Impl() {
    if (status_.ok()) {
      context_.TryCancel();
      End();
    }
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  absl::Status Send(const Cache& cache, LayerSpan layers, const UpdateArrays& arrays) {
    const auto plan = PlanUpdate(cache, layers, arrays, options_.max_message_bytes);
    if (!plan.ok()) {
      // As if the daemon had refused it: what was sent before is answered, nothing follows.
      if (auto status = Await([this] { return unanswered_.empty(); }); !status.ok()) return status;
      context_.TryCancel();
      End();
      return status_ = plan.status();
    }
    for (std::size_t i = 0; i < plan->size(); ++i) {
      if (auto status = AwaitWritable(); !status.ok()) return status;
      FillMessage(cache, layers, arrays, *plan, i, &message_);
      Write(message_, (*plan)[i]);
    }
    return absl::OkStatus();
  }

  // `kind`: mutable_decode, mutable_verify or mutable_prefill.
  template <typename Request>
  absl::Status Send(Request* (v1::StreamUpdatesRequest::*kind)(), const std::string& session_id,
                    const Cache& cache, LayerSpan layers, const SharedUpdate& update) {
    if (auto status = AwaitWritable(); !status.ok()) return status;
    shared_message_.Clear();
    FillShared(session_id, cache, layers, update, (shared_message_.*kind)());
    Write(shared_message_, {});
    return absl::OkStatus();
  }

  absl::StatusOr<UpdateResult> Flush() {
    if (auto status = Await([this] { return unanswered_.empty(); }); !status.ok()) return status;
    return std::exchange(sum_, {});
  }

 private:
  template <typename Condition>
  absl::Status Await(Condition condition) {
    while (status_.ok() && !condition()) Step();
    return status_;
  }

  absl::Status AwaitWritable() {
    return Await([this] { return !writing_ && unanswered_.size() < kWindow; });
  }

  void Write(const v1::StreamUpdatesRequest& message, const UpdatePiece& piece) {
    stream_->Write(message, &writing_);
    writing_ = true;
    unanswered_.push_back(piece);
    StartRead();
  }

  // Waits for one event.
  void Step() {
    void* tag = nullptr;
    bool ok = false;
    const auto next = queue_.AsyncNext(&tag, &ok, DeadlineOf(options_));
    if (next == grpc::CompletionQueue::TIMEOUT) {
      context_.TryCancel();
      End();
      status_ = absl::DeadlineExceededError(
          absl::StrCat("the daemon has not answered an update within ", options_.timeout.count(), " ms"));
      return;
    }
    *static_cast<bool*>(tag) = false;
    if (!ok) return End();
    if (tag == &reading_) {
      const UpdateResult part = Contribution(unanswered_.front(), answer_.result());
      sum_.rows += part.rows;
      sum_.regions_closed += part.regions_closed;
      unanswered_.pop_front();
      StartRead();
    }
  }

  void StartRead() {
    if (reading_ || unanswered_.empty()) return;
    stream_->Read(&answer_, &reading_);
    reading_ = true;
  }

  // Takes the status of a call that has ended or was cancelled. Sets status_, never to OK.
  void End() {
    grpc::Status status;
    bool finishing = true;
    stream_->Finish(&status, &finishing);
    while (finishing || reading_ || writing_) {
      void* tag = nullptr;
      bool ok = false;
      queue_.Next(&tag, &ok);
      *static_cast<bool*>(tag) = false;
    }
    status_ = status.ok() ? absl::UnavailableError("the daemon has ended the stream") : FromGrpc(status);
  }

  const Options options_;
  const std::shared_ptr<v1::UpdateService::Stub> stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  // Under way; their addresses are the tags. The start of the call counts as a write.
  bool writing_ = true;
  bool reading_ = false;
  const std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::StreamUpdatesRequest, v1::StreamUpdatesResponse>>
      stream_;
  v1::StreamUpdatesRequest message_;         // with rows: filled again and again, which keeps its memory
  v1::StreamUpdatesRequest shared_message_;  // with references
  v1::StreamUpdatesResponse answer_;
  std::deque<UpdatePiece> unanswered_;
  UpdateResult sum_;
  absl::Status status_;  // not OK: the call has ended
};

Client::UpdateStream::UpdateStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::UpdateStream::~UpdateStream() = default;

absl::Status Client::UpdateStream::Decode(const Cache& cache, LayerSpan layers, const DecodeUpdate& update) {
  return impl_->Send(cache, layers, UpdateArrays(update));
}

absl::Status Client::UpdateStream::Verify(const Cache& cache, LayerSpan layers, const VerifyUpdate& update) {
  return impl_->Send(cache, layers, UpdateArrays(update));
}

absl::Status Client::UpdateStream::Prefill(const Cache& cache, LayerSpan layers,
                                           const PrefillUpdate& update) {
  return impl_->Send(cache, layers, UpdateArrays(update));
}

absl::Status Client::UpdateStream::Decode(const ClientSession& session, const Cache& cache, LayerSpan layers,
                                          const SharedUpdate& update) {
  return impl_->Send(&v1::StreamUpdatesRequest::mutable_decode, session.id(), cache, layers, update);
}

absl::Status Client::UpdateStream::Verify(const ClientSession& session, const Cache& cache, LayerSpan layers,
                                          const SharedUpdate& update) {
  return impl_->Send(&v1::StreamUpdatesRequest::mutable_verify, session.id(), cache, layers, update);
}

absl::Status Client::UpdateStream::Prefill(const ClientSession& session, const Cache& cache, LayerSpan layers,
                                           const SharedUpdate& update) {
  return impl_->Send(&v1::StreamUpdatesRequest::mutable_prefill, session.id(), cache, layers, update);
}

absl::StatusOr<UpdateResult> Client::UpdateStream::Flush() { return impl_->Flush(); }

std::unique_ptr<Client::UpdateStream> Client::OpenUpdateStream() {
  return std::unique_ptr<UpdateStream>(
      new UpdateStream(std::make_unique<UpdateStream::Impl>(impl_->updates, impl_->options)));
}

}  // namespace kvsummary
