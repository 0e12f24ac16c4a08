#include "server/rpc/pull_source.h"

#include <fcntl.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checksum.h"
#include "server/error.h"
#include "server/handoff/handoff_text.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/status.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {
namespace {

constexpr std::size_t kMaxPulls = 4096;   // of a stream
constexpr std::size_t kChunksAhead = 4;   // read while one is being sent
constexpr std::size_t kMaxUnsent = 1024;  // messages, then nothing more is read
constexpr int kMaxHeldRuns = 65536;       // of a pull
constexpr std::int64_t kMaxCredit = std::int64_t{1} << 30;

// Messages are written one at a time. A part's bytes are kept from when it is told until the pull ends: who
// maps them reads them without a word.
class PullSource final : public grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>,
                         public std::enable_shared_from_this<PullSource> {
 public:
  PullSource(const ServiceContext& context, bool local) : context_(context), local_(local) {}

  void Begin() {
    self_ = shared_from_this();
    // What is being pulled may end; each of it holds the drain up.
    context_.drain.Listen(this, [this] {
      std::lock_guard lock(mutex_);
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
      std::lock_guard lock(mutex_);
      paused_ = out_.size() > kMaxUnsent;
      if (paused_) return;
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
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
    std::map<std::uint32_t, Pull> pulls;
    std::shared_ptr<Session> session;
    {
      std::lock_guard lock(mutex_);
      pulls.swap(pulls_);
      session.swap(session_);
    }
    for (const auto& [id, pull] : pulls) pull.offer->Forget(Key(id));
    if (session != nullptr) context_.sessions.End(session);
    self_.reset();
  }

 private:
  struct Place {
    std::size_t part = 0;
    std::int64_t chunk = 0;
    auto operator<=>(const Place&) const = default;
  };

  struct Pull {
    std::unique_ptr<Drain::Call> admission;
    std::shared_ptr<Offer> offer;
    Wanted wanted;
    v1::HandoffTransport transport = v1::HANDOFF_TRANSPORT_GRPC;
    std::unique_ptr<UcxTransport::Loan> loan;              // of UCX
    std::vector<std::shared_ptr<const StagedPart>> parts;  // that have been told
    bool complete = false;
    std::int64_t committed_tokens = 0;
    Place next;  // chunk to look at
    std::deque<Place> again;
    std::map<std::size_t, std::vector<Wanted::Run>> held;  // by part
    std::size_t loads = 0;                                 // of its chunks, under way
    bool done = false;                                     // that has been told
    bool ended = false;  // nothing more is sent: the offer is no more, or could not be read

    bool Holds(const Place& place) const {
      const auto runs = held.find(place.part);
      if (runs == held.end()) return false;
      for (const Wanted::Run& run : runs->second) {
        if (place.chunk >= run.first && place.chunk - run.first < run.count) return true;
      }
      return false;
    }
  };

  // By which offers know a listener.
  Offer::Key Key(std::uint32_t id) const { return {this, id}; }

  absl::Status Handle() {
    switch (request_.message_case()) {
      case v1::PullRequest::kHello: {
        std::lock_guard lock(mutex_);
        hello_ = request_.hello();
        return absl::OkStatus();
      }
      case v1::PullRequest::kBegin:
        return BeginPull(request_.begin());
      case v1::PullRequest::kEnd: {
        std::shared_ptr<Offer> offer;
        {
          std::lock_guard lock(mutex_);
          const auto pull = pulls_.extract(request_.end().pull());
          if (!pull.empty()) offer = pull.mapped().offer;
          Withdraw(request_.end().pull());
          Go();
        }
        if (offer != nullptr) offer->Forget(Key(request_.end().pull()));
        return absl::OkStatus();
      }
      case v1::PullRequest::kAgain: {
        std::lock_guard lock(mutex_);
        const auto pull = pulls_.find(request_.again().pull());
        if (pull == pulls_.end() || pull->second.ended) return absl::OkStatus();
        const Place place{static_cast<std::size_t>(request_.again().part()), request_.again().chunk()};
        if (place.part >= pull->second.parts.size() || place.chunk < 0 ||
            place.chunk >= ChunkCount(pull->second.parts[place.part]->part) ||
            pull->second.again.size() >= kMaxPulls) {
          return Malformed("a chunk that was never sent is asked for again");
        }
        pull->second.again.push_back(place);
        pull->second.done = false;
        Go();
        return absl::OkStatus();
      }
      case v1::PullRequest::kCreditBytes: {
        std::lock_guard lock(mutex_);
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

  static bool InRange(std::int64_t number) { return number >= 0 && number <= kMaxIndex; }

  static absl::Status Malformed(std::string_view why) { return Refuse(Reason::MESSAGE_MALFORMED, "", why); }

  absl::Status BeginPull(const v1::PullBegin& begin) {
    const std::uint32_t id = begin.pull();
    if (begin.transfer_id().size() != kTransferBytes || begin.regions() < 0) {
      return Malformed("transfer_id has not 16 bytes, or regions is negative");
    }
    if (begin.held_size() > kMaxHeldRuns) return Malformed("too many runs of chunks are held");
    for (const auto& run : begin.held()) {
      if (run.part() < 0 || !InRange(run.first()) || !InRange(run.count()))
        return Malformed("held chunks are none");
    }
    for (const auto& run : begin.blocks()) {
      if (!InRange(run.first()) || !InRange(run.count())) return Malformed("wanted blocks are none");
    }
    auto admission = std::make_unique<Drain::Call>(context_.drain);
    auto offer = admission->admitted().ok() ? context_.offers.Bind(begin.offer_secret(), begin.transfer_id())
                                            : absl::StatusOr<std::shared_ptr<Offer>>(admission->admitted());
    std::unique_lock lock(mutex_);
    if (pulls_.contains(id) || pulls_.size() >= kMaxPulls) {
      return Malformed("the number of the pull is taken, or there are too many");
    }
    if (!offer.ok()) {
      FillFailed(offer.status(), Out(id).mutable_failed());
      Go();
      return absl::OkStatus();
    }
    Pull& pull = pulls_[id];
    pull.admission = std::move(admission);
    pull.offer = *std::move(offer);
    pull.wanted.regions = begin.regions();
    for (const auto& blocks : begin.blocks())
      pull.wanted.blocks[blocks.group()] = {blocks.first(), blocks.count()};
    for (const auto& held : begin.held()) {
      pull.held[static_cast<std::size_t>(held.part())].push_back({held.first(), held.count()});
    }
    v1::PullAccepted accepted;
    ChooseTransport(begin, pull, accepted);
    FillAccepted(*pull.offer, pull.offer->Look(0), &accepted);
    *Out(id).mutable_accepted() = std::move(accepted);
    const std::shared_ptr<Offer> listened = pull.offer;
    Advance(id, pull);
    Go();
    lock.unlock();
    listened->Listen(Key(id), [weak = weak_from_this(), id] {
      OnGrpcThread([weak, id] {
        if (const auto self = weak.lock()) self->Changed(id);
      });
    });
    Changed(id);  // what has happened before it listened
    return absl::OkStatus();
  }

  void Changed(std::uint32_t id) {
    std::lock_guard lock(mutex_);
    const auto pull = pulls_.find(id);
    if (pull == pulls_.end()) return;
    Advance(id, pull->second);
    Go();
  }

  // All below: with mutex_ held.

  void ChooseTransport(const v1::PullBegin& begin, Pull& pull, v1::PullAccepted& accepted) {
    std::set<int> can(begin.transports().begin(), begin.transports().end());
    if (can.contains(v1::HANDOFF_TRANSPORT_SAME_HOST) && !hello_.boot_id().empty() &&
        hello_.boot_id() == BootId() && LendMemory(begin, pull, *accepted.mutable_memory())) {
      pull.transport = v1::HANDOFF_TRANSPORT_SAME_HOST;
      accepted.set_descriptor_socket(context_.descriptor_socket);
    } else {
      accepted.clear_memory();
      if (can.contains(v1::HANDOFF_TRANSPORT_UCX)) OfferUcx(pull, accepted);
    }
    accepted.set_transport(pull.transport);
  }

  void OfferUcx(Pull& pull, v1::PullAccepted& accepted) {
    if (context_.ucx == nullptr || hello_.ucx_version().empty() ||
        hello_.ucx_version() != context_.ucx->version()) {
      return;
    }
    const Memory* memory = context_.offers.arena(pull.offer->device())->memory();
    if (memory != nullptr) pull.loan = context_.ucx->Borrow(*memory);
    if (pull.loan == nullptr) return;
    pull.transport = v1::HANDOFF_TRANSPORT_UCX;
    accepted.set_ucx_address(pull.loan->address());
    accepted.set_ucx_token(pull.loan->token());
    accepted.set_ucx_staging(pull.loan->staging());
  }

  // Whether the puller can have the offer's memory itself.
  bool LendMemory(const v1::PullBegin& begin, const Pull& pull, v1::MemoryHandle& handle) {
    if (!local_ || !context_.handoff.shares_memory) return false;
    const Device& device = pull.offer->device();
    const Memory* memory = context_.offers.arena(device)->memory();
    if (memory == nullptr) return false;
    handle.set_kind(static_cast<v1::MemoryKind>(memory->kind()));
    handle.set_size_bytes(memory->bytes());
    handle.set_device_uuid(device.uuid());
    handle.set_generation(context_.handoff.generation());
    if (!memory->ipc_handle().empty()) {
      handle.set_handle(memory->ipc_handle());
      return !begin.device_uuid().empty();
    }
    if (memory->kind() != MemoryKind::kMemfd || context_.descriptor_socket.empty()) return false;
    if (lent_) return true;
    auto ticket = IssueTicket(*memory);
    if (!ticket) return false;
    handle.set_handle(*std::move(ticket));
    lent_ = true;
    return true;
  }

  // For a descriptor that cannot be written through.
  std::optional<std::string> IssueTicket(const Memory& memory) {
    if (session_ == nullptr) {
      auto session = context_.sessions.Open("handoff-peer");
      if (!session.ok()) return std::nullopt;
      session_ = *std::move(session);
    }
    auto ticket = context_.tickets.Issue(
        session_,
        [fd = memory.descriptor(),
         bytes = memory.bytes()](const Descriptor&) -> absl::StatusOr<DescriptorAnswer> {
          Descriptor read_only(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
          if (read_only.get() < 0) return absl::InternalError("the staging memory cannot be opened");
          return DescriptorAnswer{.descriptor = std::move(read_only), .size_bytes = bytes};
        });
    if (!ticket.ok()) return std::nullopt;
    return *std::move(ticket);
  }

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
  void Advance(std::uint32_t id, Pull& pull) {
    const Offer::View view = pull.offer->Look(pull.parts.size());
    if (!view.ended.ok()) {
      if (!pull.done && !pull.ended) FillFailed(view.ended, Out(id).mutable_failed());
      pull.ended = true;
      // Nothing is kept for a puller that does not end. What it reads of mapped memory from now on it cannot
      // acknowledge.
      pull.loan = nullptr;
      pull.parts.clear();
      pull.again.clear();
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
      const auto place = Take(turn->second);
      if (!place) continue;
      last_ = turn->first;
      Load(turn->first, turn->second, *place);
      return true;
    }
    return false;
  }

  // The next chunk that the puller wants and has not got.
  static std::optional<Place> Take(Pull& pull) {
    if (pull.ended || pull.transport == v1::HANDOFF_TRANSPORT_SAME_HOST) return std::nullopt;
    if (!pull.again.empty()) {
      const Place place = pull.again.front();
      pull.again.pop_front();
      return place;
    }
    for (; pull.next.part < pull.parts.size(); pull.next = {pull.next.part + 1, 0}) {
      const Part& part = pull.parts[pull.next.part]->part;
      for (; pull.next.chunk < ChunkCount(part); ++pull.next.chunk) {
        if (!IsWanted(pull.wanted, part, ChunkAt(part, pull.next.chunk)) || pull.Holds(pull.next)) continue;
        const Place place = pull.next;
        ++pull.next.chunk;
        return place;
      }
    }
    return std::nullopt;
  }

  void Load(std::uint32_t id, Pull& pull, const Place& place) {
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
      std::lock_guard lock(self->mutex_);
      bool sent = false;
      --self->loads_;
      const auto still = self->pulls_.find(id);
      if (still != self->pulls_.end()) {
        --still->second.loads;
        if (read.ok()) {
          sent = true;
          *self->Out(id).mutable_chunk() = std::move(message);
        } else {
          FillFailed(read, self->Out(id).mutable_failed());
          still->second.ended = true;
        }
      }
      if (!sent) self->credit_ += chunk.bytes();
      self->Go();
    });
  }

  static void FillChunk(const Place& place, std::string bytes, v1::PullChunk& chunk) {
    chunk.set_part(static_cast<std::int32_t>(place.part));
    chunk.set_chunk(place.chunk);
    chunk.set_size_bytes(static_cast<std::int64_t>(bytes.size()));
    chunk.set_checksum(ChunkChecksum(chunk.part(), place.chunk, bytes.data(), bytes.size()));
    chunk.set_data(std::move(bytes));
  }

  void TellDone() {
    for (auto& [id, pull] : pulls_) {
      if (pull.done || pull.ended || !pull.complete || pull.loads > 0 || !pull.again.empty()) continue;
      if (pull.transport != v1::HANDOFF_TRANSPORT_SAME_HOST && pull.next.part < pull.parts.size()) continue;
      pull.done = true;
      Out(id).mutable_done()->set_committed_tokens(pull.committed_tokens);
    }
  }

  void Stop(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    StopLocked(status);
    Go();
  }
  void StopLocked(const absl::Status& status) {
    if (!stopped_) stopped_ = status;
  }

  const ServiceContext context_;
  const bool local_;
  std::shared_ptr<PullSource> self_;  // until OnDone
  v1::PullRequest request_;           // being read
  std::mutex mutex_;
  v1::PullHello hello_;
  std::shared_ptr<Session> session_;  // for tickets
  bool lent_ = false;
  std::map<std::uint32_t, Pull> pulls_;
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
