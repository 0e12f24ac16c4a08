#include "server/rpc/pull_source.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "server/checksum.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/source_pull.h"
#include "server/rpc/staging_lender.h"
#include "server/rpc/status.h"

namespace kvsummary {
namespace {

// Of a stream:
constexpr std::size_t kMaxPulls = 4096;
constexpr std::ptrdiff_t kMaxRepeats = 8;  // of an offer by one consumer, who may have given earlier ones up
constexpr std::size_t kMaxRuns = std::size_t{1} << 20;  // that its pulls keep of `held` and `blocks`
constexpr std::size_t kChunksAhead = 4;                 // read while one is being sent
constexpr std::size_t kMaxAnswers = 1024;               // unsent, then nothing more is read
constexpr std::int64_t kMaxCredit = std::int64_t{1} << 30;

// Messages are written one at a time, and what they say is put together when their turn comes: besides a few
// chunks only answers to what was asked are kept, and nothing more is read while there are many.
class PullSource final : public grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>,
                         public std::enable_shared_from_this<PullSource> {
 public:
  using Clock = std::chrono::steady_clock;

  PullSource(const ServiceContext& context, grpc::CallbackServerContext& call)
      : context_(context),
        call_(call),
        lender_(std::make_unique<StagingLender>(context, absl::StartsWith(call.peer(), "unix:"))) {}

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
      paused_ = answers_.size() > kMaxAnswers;
      if (paused_) return;
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (!ok) StopLocked(absl::CancelledError("the puller has gone"));
    if (std::exchange(paused_, paused_ && answers_.size() > kMaxAnswers / 2 && !stopped_) && !paused_) {
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
    for (auto& [id, pull] : pulls) {
      pull.offer().Forget(Key(id));
      pull.LetGo();
    }
    self_.reset();
  }

 private:
  // By which offers know a listener.
  Offer::Key Key(std::uint32_t id) const { return {this, id}; }

  static absl::Status Malformed(std::string_view why) { return Refuse(Reason::MESSAGE_MALFORMED, "", why); }

  absl::Status Handle() {
    switch (request_.message_case()) {
      case v1::PullRequest::kHello:
        return Greet(request_.hello());
      case v1::PullRequest::kBegin:
        return BeginPull(request_.begin());
      case v1::PullRequest::kEnd:
        EndPull(request_.end());
        return absl::OkStatus();
      case v1::PullRequest::kAgain: {
        const std::lock_guard lock(mutex_);
        const auto pull = pulls_.find(request_.again().pull());
        if (pull == pulls_.end()) return absl::OkStatus();
        const absl::Status taken = pull->second.TakeAgain(request_.again());
        Go();
        return taken;
      }
      case v1::PullRequest::kCredit:
        return TakeCredit(request_.credit());
      case v1::PullRequest::kProbe: {
        const std::lock_guard lock(mutex_);
        answers_.emplace_back().mutable_alive();
        Go();
        return absl::OkStatus();
      }
      case v1::PullRequest::MESSAGE_NOT_SET:
        break;
    }
    return Malformed("the message is of no kind");
  }

  absl::Status Greet(const v1::PullHello& hello) {
    if (hello.version() != kPullVersion) {
      return absl::UnimplementedError(
          absl::StrFormat("it speaks version %d of Pull, not %d", kPullVersion, hello.version()));
    }
    const std::lock_guard lock(mutex_);
    lender_->set_hello(hello);
    return absl::OkStatus();
  }

  absl::Status BeginPull(const v1::PullBegin& begin) {
    const std::uint32_t id = begin.pull();
    if (auto s = SourcePull::Check(begin); !s.ok()) return s;
    if (auto s = TakeNumber(begin); !s.ok()) return s;
    auto admission = std::make_unique<Drain::Call>(context_.drain);
    auto offer = Bind(begin, admission->admitted());
    // Before it is told how the offer stands, so that nothing is missed. The listener has no lock to wait
    // for.
    if (offer.ok()) {
      (*offer)->Listen(Key(id), [weak = weak_from_this(), id] {
        OnGrpcThread([weak, id] {
          if (const auto self = weak.lock()) self->Changed(id);
        });
      });
    }
    const std::lock_guard lock(mutex_);
    if (offer.ok()) {
      SourcePull& pull = pulls_.try_emplace(id, begin, *offer, std::move(admission)).first->second;
      pull.accepted.set_version(kPullVersion);
      lender_->Choose(begin, pull);
      pull.NoticeEnd();  // it may have come before there was a pull to tell
      runs_ += pull.runs();
      news_.insert(id);
    } else {
      v1::PullResponse& refused = answers_.emplace_back();
      refused.set_pull(id);
      FillFailed(offer.status(), refused.mutable_failed());
    }
    Go();
    return absl::OkStatus();
  }

  absl::Status TakeNumber(const v1::PullBegin& begin) {
    const std::lock_guard lock(mutex_);
    // None comes back: what is still being read for a pull that has ended is no other's.
    if (begin.pull() <= last_begun_) return Malformed("the numbers of pulls do not rise");
    if (pulls_.size() >= kMaxPulls) return Malformed("there are too many pulls");
    const int runs = begin.held_size() + begin.blocks_size();
    if (runs_ + static_cast<std::size_t>(runs) > kMaxRuns) return Malformed("the pulls name too many runs");
    last_begun_ = begin.pull();
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<Offer>> Bind(const v1::PullBegin& begin, const absl::Status& admitted) {
    if (!admitted.ok()) return admitted;
    {
      const std::lock_guard lock(mutex_);
      const auto repeats = std::count_if(pulls_.begin(), pulls_.end(), [&](const auto& pull) {
        return pull.second.secret() == begin.offer_secret() && pull.second.transfer() == begin.transfer_id();
      });
      if (repeats >= kMaxRepeats) {
        return Refuse(Reason::HANDOFF_LIMIT, "handoff",
                      absl::StrFormat("the consumer pulls the offer %d times already", repeats));
      }
    }
    return context_.offers.Bind(begin.offer_secret(), begin.transfer_id());
  }

  void EndPull(const v1::PullEnd& end) {
    std::map<std::uint32_t, SourcePull>::node_type pull;  // ends without the lock
    {
      const std::lock_guard lock(mutex_);
      pull = pulls_.extract(end.pull());
      if (!pull.empty()) runs_ -= pull.mapped().runs();
      news_.erase(end.pull());
      std::erase_if(chunks_, [&](const v1::PullResponse& message) {
        if (message.pull() != end.pull()) return false;
        credit_ += message.chunk().size_bytes();
        return true;
      });
    }
    if (!pull.empty()) pull.mapped().offer().Forget(Key(end.pull()));
    v1::PullResponse ended;
    ended.set_pull(end.pull());
    if (end.acknowledge()) {
      const absl::Status taken =
          pull.empty() ? Malformed("a pull that is none is acknowledged")
                       : context_.offers.Acknowledge(pull.mapped().secret(), pull.mapped().transfer());
      ended.mutable_ended();
      if (!taken.ok()) FillFailed(taken, ended.mutable_ended()->mutable_refused());
    }
    const std::lock_guard lock(mutex_);
    if (end.acknowledge()) answers_.push_back(std::move(ended));
    Go();
  }

  absl::Status TakeCredit(const v1::PullCredit& credit) {
    const std::lock_guard lock(mutex_);
    if (credit.bytes() < 0 || credit.bytes() > kMaxCredit - std::max<std::int64_t>(credit_, 0)) {
      return Malformed("credit is negative or above 1 GiB");
    }
    credit_ += credit.bytes();
    if (const auto pull = pulls_.find(credit.pull()); pull != pulls_.end()) {
      pull->second.under_way_bytes -= std::min(credit.bytes(), pull->second.under_way_bytes);
    }
    Go();
    return absl::OkStatus();
  }

  void Changed(std::uint32_t id) {
    const std::lock_guard lock(mutex_);
    const auto pull = pulls_.find(id);
    if (pull == pulls_.end()) return;
    pull->second.NoticeEnd();  // only to tell of it has to wait for its turn
    news_.insert(id);
    Go();
  }

  // Cuts a puller off that does not take what is being written.
  void LookAtWrite() {
    {
      const std::lock_guard lock(mutex_);
      watched_ = false;
      if (!writing_) return;
      const auto left = writing_from_ + context_.handoff.longest_write - Clock::now();
      if (left > Clock::duration(0)) {
        watched_ = true;
        return Watch(std::chrono::ceil<std::chrono::milliseconds>(left));
      }
      cancelling_ = true;  // the stream stays meanwhile
    }
    call_.TryCancel();  // may call back
    const std::lock_guard lock(mutex_);
    cancelling_ = false;
    Go();
  }

  // All below: with mutex_ held.

  // Keeps a few chunks ready, and a message on its way.
  void Go() {
    if (draining_ && pulls_.empty() && answers_.empty()) {
      StopLocked(Refuse(Reason::DRAINING, "", "the daemon is draining and takes no new calls"));
    }
    if (stopped_) {
      if (writing_ || cancelling_ || loads_ > 0 || finished_) return;  // loads hold parts
      finished_ = true;
      return Finish(ToGrpc(*stopped_));
    }
    ReadAhead();
    if (writing_ || !NextMessage()) return;
    writing_ = true;
    writing_from_ = Clock::now();
    if (!std::exchange(watched_, true)) Watch(context_.handoff.longest_write);
    StartWrite(&message_);
  }

  // One alarm at a time, however many writes there are.
  void Watch(std::chrono::milliseconds delay) {
    OnGrpcThreadAfter(delay, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->LookAtWrite();
    });
  }

  // Puts the next message together; false when there is nothing to say.
  bool NextMessage() {
    if (!answers_.empty()) {
      message_ = std::move(answers_.front());
      answers_.pop_front();
      return true;
    }
    message_.Clear();
    while (!news_.empty()) {
      const std::uint32_t id = *news_.begin();
      news_.erase(news_.begin());
      pulls_.at(id).Tell(message_);
      if (message_.ByteSizeLong() == 0) continue;  // it has been told
      message_.set_pull(id);
      ReadAhead();  // of new parts
      if (!chunks_.empty() && chunks_.front().pull() == id) {
        message_.mutable_chunk()->Swap(chunks_.front().mutable_chunk());
        chunks_.pop_front();
      }
      return true;
    }
    if (chunks_.empty()) return false;
    message_ = std::move(chunks_.front());
    chunks_.pop_front();
    ReadAhead();
    return true;
  }

  void ReadAhead() {
    while (chunks_.size() + loads_ < kChunksAhead && NextChunk()) {
    }
  }

  // Starts to read the next chunk of the pull whose turn it is; false when there is none to send now.
  bool NextChunk() {
    if (credit_ <= 0) return false;
    auto turn = pulls_.upper_bound(last_);
    for (std::size_t i = 0; i < pulls_.size(); ++i, ++turn) {
      if (turn == pulls_.end()) turn = pulls_.begin();
      // One whose puller is slow leaves room for the others.
      if (turn->second.under_way_bytes > credit_) continue;
      const auto place = turn->second.Take();
      if (!place) continue;
      last_ = turn->first;
      Load(turn->first, turn->second, *place);
      return true;
    }
    return false;
  }

  void Load(std::uint32_t id, SourcePull& pull, const SourcePull::Place& place) {
    const StagedPart& staged = pull.part(place.part);
    const Chunk chunk = ChunkAt(staged.part, place.chunk);
    credit_ -= chunk.bytes();
    pull.under_way_bytes += chunk.bytes();
    context_.stats.handoff_sent_bytes += chunk.bytes();
    v1::PullResponse message;
    message.set_pull(id);
    message.mutable_chunk()->set_part(static_cast<std::int32_t>(place.part));
    message.mutable_chunk()->set_chunk(place.chunk);
    message.mutable_chunk()->set_size_bytes(chunk.bytes());
    Device& device = pull.offer().device();
    const bool fetched = pull.transport == v1::HANDOFF_TRANSPORT_UCX;
    if (fetched || !device.pins_host_memory()) {
      const char* data = staged.data() + chunk.offset(staged.part);
      Seal(*message.mutable_chunk(), data, static_cast<std::size_t>(chunk.bytes()));
      if (!fetched) message.mutable_chunk()->set_data(data, static_cast<std::size_t>(chunk.bytes()));
      chunks_.push_back(std::move(message));
      return;
    }
    ++loads_;
    ++pull.loads;
    device.executor().SubmitFree([self = shared_from_this(), part = pull.shared_part(place.part), chunk,
                                  message = std::move(message)]() mutable {
      std::string& bytes = *message.mutable_chunk()->mutable_data();
      const absl::Status read = ReadChunk(*part, chunk, bytes);
      if (read.ok()) Seal(*message.mutable_chunk(), bytes.data(), bytes.size());
      self->Loaded(std::move(message), read);
    });
  }

  static void Seal(v1::PullChunk& chunk, const char* data, std::size_t bytes) {
    chunk.set_checksum(ChunkChecksum(chunk.part(), chunk.chunk(), data, bytes));
  }

  // (executor; without the lock) A chunk of a pull has been read, or not.
  void Loaded(v1::PullResponse message, const absl::Status& read) {
    const std::lock_guard lock(mutex_);
    --loads_;
    const auto pull = pulls_.find(message.pull());
    if (pull == pulls_.end() || !read.ok()) credit_ += message.chunk().size_bytes();
    if (pull != pulls_.end()) {
      --pull->second.loads;
      if (read.ok()) {
        chunks_.push_back(std::move(message));
      } else {
        pull->second.Fail(read);
        news_.insert(message.pull());
      }
    }
    Go();
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
  grpc::CallbackServerContext& call_;
  std::shared_ptr<PullSource> self_;  // until OnDone
  v1::PullRequest request_;           // being read
  std::mutex mutex_;
  std::unique_ptr<StagingLender> lender_;  // until OnDone
  std::map<std::uint32_t, SourcePull> pulls_;
  std::uint32_t last_begun_ = 0;
  std::size_t runs_ = 0;    // of all pulls
  std::uint32_t last_ = 0;  // pull that had its turn
  std::int64_t credit_ = 0;
  std::size_t loads_ = 0;                 // chunks that are being read
  std::deque<v1::PullResponse> answers_;  // to be written, as the next two; these first
  std::set<std::uint32_t> news_;          // pulls that there may be something to tell of
  std::deque<v1::PullResponse> chunks_;   // last
  v1::PullResponse message_;              // being written
  bool writing_ = false;
  Clock::time_point writing_from_;
  bool watched_ = false;     // there is an alarm for what is being written
  bool cancelling_ = false;  // the call
  bool paused_ = false;      // reading, until enough is written
  bool draining_ = false;
  std::optional<absl::Status> stopped_;
  bool finished_ = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* NewPullSource(const ServiceContext& context,
                                                                          grpc::CallbackServerContext& call) {
  auto source = std::make_shared<PullSource>(context, call);
  source->Begin();
  return source.get();
}

}  // namespace kvsummary
