#include "server/rpc/pull_source.h"

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "server/checksum.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/source_pull.h"
#include "server/rpc/staging_lender.h"
#include "server/rpc/status.h"

namespace kvsummary {
namespace {

constexpr std::size_t kMaxPulls = 4096;   // of a stream
constexpr std::size_t kChunksAhead = 4;   // read while one is being sent
constexpr std::size_t kMaxUnsent = 1024;  // messages, then nothing more is read
constexpr std::int64_t kMaxCredit = std::int64_t{1} << 30;

// Messages are written one at a time.
class PullSource final : public grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>,
                         public std::enable_shared_from_this<PullSource> {
 public:
  PullSource(const ServiceContext& context, bool local)
      : context_(context), lender_(std::make_unique<StagingLender>(context, local)) {}

  void Begin() {
    self_ = shared_from_this();
    // What is being pulled may end; each of it holds the drain up.
    context_.drain.Listen(this, [this] {
      const std::lock_guard lock(mutex_);
      draining_ = true;
      Go();
    });
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Stop(absl::OkStatus());
    const absl::Status handled = Handle();
    if (!handled.ok()) return Stop(handled);
    {
      const std::lock_guard lock(mutex_);
      paused_ = out_.size() > kMaxUnsent;
      if (paused_) return;
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    out_.pop_front();
    if (!ok) StopLocked(absl::CancelledError("the puller has gone"));
    if (std::exchange(paused_, paused_ && out_.size() > kMaxUnsent / 2 && !stopped_) && !paused_) {
      StartRead(&request_);
    }
    Go();
  }

  void OnCancel() override { Stop(absl::CancelledError("the puller has gone")); }

  void OnDone() override {
    context_.drain.Forget(this);
    std::map<std::uint32_t, SourcePull> pulls;
    std::unique_ptr<StagingLender> lender;
    {
      const std::lock_guard lock(mutex_);
      pulls.swap(pulls_);
      lender.swap(lender_);
    }
    for (const auto& [id, pull] : pulls) pull.offer->Forget(Key(id));
    self_.reset();
  }

 private:
  // By which offers know a listener.
  Offer::Key Key(std::uint32_t id) const { return {this, id}; }

  absl::Status Handle() {
    switch (request_.message_case()) {
      case v1::PullRequest::kHello: {
        const std::lock_guard lock(mutex_);
        lender_->set_hello(request_.hello());
        return absl::OkStatus();
      }
      case v1::PullRequest::kBegin:
        return BeginPull(request_.begin());
      case v1::PullRequest::kEnd:
        EndPull(request_.end().pull());
        return absl::OkStatus();
      case v1::PullRequest::kAgain: {
        const std::lock_guard lock(mutex_);
        const auto pull = pulls_.find(request_.again().pull());
        if (pull == pulls_.end()) return absl::OkStatus();
        const absl::Status taken = pull->second.TakeAgain(request_.again());
        Go();
        return taken;
      }
      case v1::PullRequest::kCreditBytes: {
        const std::lock_guard lock(mutex_);
        if (request_.credit_bytes() < 0 ||
            request_.credit_bytes() > kMaxCredit - std::max<std::int64_t>(credit_, 0)) {
          return Malformed("credit is negative or above 1 GiB");
        }
        credit_ += request_.credit_bytes();
        Go();
        return absl::OkStatus();
      }
      case v1::PullRequest::MESSAGE_NOT_SET:
        break;
    }
    return Malformed("the message is of no kind");
  }

  static absl::Status Malformed(std::string_view why) { return Refuse(Reason::MESSAGE_MALFORMED, "", why); }

  absl::Status BeginPull(const v1::PullBegin& begin) {
    const std::uint32_t id = begin.pull();
    if (auto s = SourcePull::Check(begin); !s.ok()) return s;
    auto admission = std::make_unique<Drain::Call>(context_.drain);
    auto offer = admission->admitted().ok() ? context_.offers.Bind(begin.offer_secret(), begin.transfer_id())
                                            : absl::StatusOr<std::shared_ptr<Offer>>(admission->admitted());
    {
      const std::lock_guard lock(mutex_);
      if (pulls_.contains(id) || pulls_.size() >= kMaxPulls) {
        return Malformed("the number of the pull is taken, or there are too many");
      }
      if (!offer.ok()) {
        FillFailed(offer.status(), Out(id).mutable_failed());
        Go();
        return absl::OkStatus();
      }
      SourcePull& pull = pulls_.try_emplace(id, begin, *offer, std::move(admission)).first->second;
      v1::PullAccepted accepted;
      lender_->Choose(begin, pull, accepted);
      FillAccepted(**offer, (*offer)->Look(0), &accepted);
      *Out(id).mutable_accepted() = std::move(accepted);
      Advance(id, pull);
      Go();
    }
    (*offer)->Listen(Key(id), [weak = weak_from_this(), id] {
      OnGrpcThread([weak, id] {
        if (const auto self = weak.lock()) self->Changed(id);
      });
    });
    Changed(id);  // what has happened before it listened
    return absl::OkStatus();
  }

  void EndPull(std::uint32_t id) {
    std::shared_ptr<Offer> offer;
    {
      const std::lock_guard lock(mutex_);
      const auto pull = pulls_.extract(id);
      if (!pull.empty()) offer = pull.mapped().offer;
      Withdraw(id);
      Go();
    }
    if (offer != nullptr) offer->Forget(Key(id));
  }

  void Changed(std::uint32_t id) {
    const std::lock_guard lock(mutex_);
    const auto pull = pulls_.find(id);
    if (pull == pulls_.end()) return;
    Advance(id, pull->second);
    Go();
  }

  // All below: with mutex_ held.

  v1::PullResponse& Out(std::uint32_t id) {
    v1::PullResponse& message = out_.emplace_back();
    message.set_pull(id);
    return message;
  }

  // Takes back what is not sent yet of a pull that has ended.
  void Withdraw(std::uint32_t id) {
    for (auto message = out_.begin() + (writing_ ? 1 : 0); message != out_.end();) {
      if (message->pull() != id) {
        ++message;
        continue;
      }
      credit_ += message->chunk().size_bytes();
      message = out_.erase(message);
    }
  }

  // Tells what is new of an offer.
  void Advance(std::uint32_t id, SourcePull& pull) {
    const Offer::View view = pull.offer->Look(pull.parts.size());
    if (!view.ended.ok()) {
      if (!pull.done && !pull.ended) FillFailed(view.ended, Out(id).mutable_failed());
      pull.End();  // nothing is kept for a puller that does not end
      return;
    }
    for (const auto& staged : view.parts) {
      if (pull.loan != nullptr && !pull.loan->Lend(staged)) {
        FillFailed(Refuse(Reason::PEER_UNREACHABLE, "", "the UCX helper has ended"),
                   Out(id).mutable_failed());
        pull.ended = true;
        return;
      }
      v1::PullPart* part = Out(id).mutable_part();
      part->set_part(staged->number);
      FillPart(staged->part, staged->extent.offset(), part);
      pull.parts.push_back(staged);
    }
    pull.complete = view.complete;
    pull.committed_tokens = view.committed_tokens;
  }

  // Keeps a few chunks ready, and a message on its way.
  void Go() {
    while (!stopped_ && out_.size() + loads_ < kChunksAhead && NextChunk()) {
    }
    if (!stopped_) TellDone();
    if (draining_ && pulls_.empty()) {
      StopLocked(Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls"));
    }
    if (writing_ || finished_) return;
    if (stopped_) {
      if (loads_ > 0) return;  // they hold parts
      finished_ = true;
      Finish(ToGrpc(*stopped_));
    } else if (!out_.empty()) {
      writing_ = true;
      StartWrite(&out_.front());
    }
  }

  // Starts to read the next chunk of the pull whose turn it is; false when there is none to send now.
  bool NextChunk() {
    if (credit_ <= 0) return false;
    auto turn = pulls_.upper_bound(last_);
    for (std::size_t i = 0; i < pulls_.size(); ++i, ++turn) {
      if (turn == pulls_.end()) turn = pulls_.begin();
      const auto place = turn->second.Take();
      if (!place) continue;
      last_ = turn->first;
      Load(turn->first, turn->second, *place);
      return true;
    }
    return false;
  }

  void Load(std::uint32_t id, SourcePull& pull, const SourcePull::Place& place) {
    const std::shared_ptr<const StagedPart> staged = pull.parts[place.part];
    const Chunk chunk = ChunkAt(staged->part, place.chunk);
    credit_ -= chunk.bytes();
    context_.stats.handoff_sent_bytes += chunk.bytes();
    Device& device = pull.offer->device();
    if (pull.transport == v1::HANDOFF_TRANSPORT_UCX) {
      v1::PullChunk& message = *Out(id).mutable_chunk();
      message.set_part(static_cast<std::int32_t>(place.part));
      message.set_chunk(place.chunk);
      message.set_size_bytes(chunk.bytes());
      message.set_checksum(ChunkChecksum(message.part(), place.chunk,
                                         staged->data() + chunk.offset(staged->part),
                                         static_cast<std::size_t>(chunk.bytes())));
      return;
    }
    if (!device.pins_host_memory()) {
      FillChunk(
          place,
          std::string(staged->data() + chunk.offset(staged->part), static_cast<std::size_t>(chunk.bytes())),
          *Out(id).mutable_chunk());
      return;
    }
    ++loads_;
    ++pull.loads;
    device.executor().SubmitFree([self = shared_from_this(), id, staged, chunk, place] {
      std::string bytes;
      const absl::Status read = ReadChunk(*staged, chunk, bytes);
      v1::PullChunk message;
      if (read.ok()) FillChunk(place, std::move(bytes), message);
      self->Loaded(id, chunk.bytes(), read, std::move(message));
    });
  }

  static void FillChunk(const SourcePull::Place& place, std::string bytes, v1::PullChunk& chunk) {
    chunk.set_part(static_cast<std::int32_t>(place.part));
    chunk.set_chunk(place.chunk);
    chunk.set_size_bytes(static_cast<std::int64_t>(bytes.size()));
    chunk.set_checksum(ChunkChecksum(chunk.part(), place.chunk, bytes.data(), bytes.size()));
    chunk.set_data(std::move(bytes));
  }

  // (executor; without the lock) A chunk of a pull has been read, or not.
  void Loaded(std::uint32_t id, std::int64_t bytes, const absl::Status& read, v1::PullChunk chunk) {
    const std::lock_guard lock(mutex_);
    --loads_;
    const auto pull = pulls_.find(id);
    const bool wanted = pull != pulls_.end();
    if (wanted) {
      --pull->second.loads;
      if (read.ok()) {
        *Out(id).mutable_chunk() = std::move(chunk);
      } else {
        FillFailed(read, Out(id).mutable_failed());
        pull->second.ended = true;
      }
    }
    if (!wanted || !read.ok()) credit_ += bytes;
    Go();
  }

  void TellDone() {
    for (auto& [id, pull] : pulls_) {
      if (!pull.IsThrough()) continue;
      pull.done = true;
      Out(id).mutable_done()->set_committed_tokens(pull.committed_tokens);
    }
  }

  void Stop(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    StopLocked(status);
    Go();
  }
  void StopLocked(const absl::Status& status) {
    if (!stopped_) stopped_ = status;
  }

  const ServiceContext context_;
  std::shared_ptr<PullSource> self_;  // until OnDone
  v1::PullRequest request_;           // being read
  std::mutex mutex_;
  std::unique_ptr<StagingLender> lender_;  // until OnDone
  std::map<std::uint32_t, SourcePull> pulls_;
  std::uint32_t last_ = 0;  // pull that had its turn
  std::int64_t credit_ = 0;
  std::size_t loads_ = 0;
  std::deque<v1::PullResponse> out_;
  bool writing_ = false;
  bool paused_ = false;  // reading, until enough is sent
  bool draining_ = false;
  std::optional<absl::Status> stopped_;
  bool finished_ = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* NewPullSource(const ServiceContext& context,
                                                                          bool local) {
  auto source = std::make_shared<PullSource>(context, local);
  source->Begin();
  return source.get();
}

}  // namespace kvsummary
