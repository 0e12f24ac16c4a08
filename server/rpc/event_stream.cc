#include "server/rpc/event_stream.h"

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "server/error.h"
#include "server/rpc/status.h"

namespace kvsummary {
namespace {

// Events that are taken from the store at a time: a client that does not read them holds no more.
constexpr std::size_t kBatchEvents = 64;

void Fill(const EventGap& gap, v1::WatchEventsResponse& message) {
  message.set_sequence(gap.to);
  message.mutable_gap()->set_from_sequence(gap.from);
  message.mutable_gap()->set_to_sequence(gap.to);
}

void Fill(const StoreEvent& event, v1::WatchEventsResponse& message) {
  message.set_sequence(event.sequence);
  v1::PageEvent* pages =
      event.kind == EventKind::kStored ? message.mutable_stored() : message.mutable_removed();
  pages->set_group(event.group);
  pages->set_hashes(event.hashes);
  pages->set_parent_hash(event.parent_hash);
  pages->set_first_block_index(event.first_block_index);
}

// One message is written at a time. When all that were read are written, the next are; when there are none,
// the store's listener goes on.
class EventStream final : public grpc::ServerWriteReactor<v1::WatchEventsResponse> {
 public:
  EventStream(const PrefixContext& context, const v1::WatchEventsRequest& request)
      : context_(context),
        name_space_(static_cast<NamespaceId>(request.namespace_id())),
        next_(request.from_sequence()) {
    if (auto s = Begin(request); !s.ok()) Stop(s);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    messages_.pop_front();
    if (!ok) StopLocked(absl::CancelledError("the client has gone"));
    Write();
  }

  void OnCancel() override { Stop(absl::CancelledError("the client has gone")); }

  void OnDone() override {
    if (listener_) context_.service.store.StopListening(*listener_);
    context_.service.drain.Forget(this);
    if (session_ != nullptr) session_->Forget(this);
    { std::lock_guard lock(mutex_); }  // who called Finish may still hold it
    delete this;
  }

 private:
  absl::Status Begin(const v1::WatchEventsRequest& request) {
    auto session = context_.service.sessions.Find(request.session_id());
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    const auto listener = context_.service.store.Listen(session_->number(), name_space_, [this] { Go(); });
    if (!listener.ok()) return listener.status();
    listener_ = *listener;
    // Either may call at once.
    session_->OnEnd(this,
                    [this] { Stop(Refuse(Reason::SESSION_ENDED, "session_id", "the session has ended")); });
    context_.service.drain.Listen(this, [this] {
      Stop(Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls"));
    });
    Go();
    return absl::OkStatus();
  }

  void Go() {
    std::lock_guard lock(mutex_);
    Write();
  }
  void Stop(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    StopLocked(status);
    Write();
  }

  // All below: with mutex_ held.

  // The call ends with the status of the first.
  void StopLocked(const absl::Status& status) {
    if (!stopped_) stopped_ = status;
  }

  void Write() {
    if (finished_ || writing_) return;
    if (!stopped_ && messages_.empty()) Read();
    if (stopped_) {
      finished_ = true;
      Finish(ToGrpc(*stopped_));
    } else if (!messages_.empty()) {
      writing_ = true;
      StartWrite(&messages_.front());
    }
  }

  void Read() {
    const auto batch =
        context_.service.store.ReadEvents(session_->number(), name_space_, next_, kBatchEvents);
    if (!batch.ok()) return StopLocked(batch.status());
    if (batch->gap) Fill(*batch->gap, messages_.emplace_back());
    for (const StoreEvent& event : batch->events) Fill(event, messages_.emplace_back());
    next_ = batch->next;
  }

  const PrefixContext context_;
  const NamespaceId name_space_;
  std::shared_ptr<Session> session_;
  std::optional<std::uint64_t> listener_;
  std::mutex mutex_;
  std::uint64_t next_;  // sequence to read from
  std::deque<v1::WatchEventsResponse> messages_;
  bool writing_ = false;
  std::optional<absl::Status> stopped_;
  bool finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::WatchEventsResponse>* NewEventStream(const PrefixContext& context,
                                                                  const v1::WatchEventsRequest& request) {
  return new EventStream(context, request);
}

}  // namespace kvsummary
