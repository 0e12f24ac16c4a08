#include "server/rpc/pull_links.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/descriptor_client.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "proto/descriptor_socket.h"
#include "server/checksum.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxLinks = 256;
constexpr std::int64_t kMaxDamaged = 16;  // chunks of one hand-off
constexpr std::chrono::milliseconds kFirstDelay{20};
constexpr std::chrono::milliseconds kLongestDelay{500};
constexpr std::chrono::seconds kAcknowledgeTimeout{5};
constexpr std::chrono::seconds kAvoidTransport{60};  // that has just failed
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 60;
constexpr int kMaxMessageBytes = 64 << 20;

// The two ends notice within twice this time that the other, or the network, is gone.
constexpr int kKeepaliveMs = 1500;

std::shared_ptr<grpc::Channel> Dial(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, static_cast<int>(kFirstDelay.count()));
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);  // also what an attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, static_cast<int>(kLongestDelay.count()));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // dials what was checked, and nothing else
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

absl::Status Unreachable(const std::string& address, std::string_view why) {
  return Refuse(Reason::PEER_UNREACHABLE, "handoff",
                absl::StrFormat("the daemon at %s is not reached: %s", address, why));
}

// Another daemon's staging memory, mapped for reading.
class MappedStaging {
 public:
  MappedStaging(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~MappedStaging() { munmap(data_, bytes_); }
  MappedStaging(const MappedStaging&) = delete;
  MappedStaging& operator=(const MappedStaging&) = delete;
  const char* data() const { return static_cast<const char*>(data_); }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }

 private:
  void* const data_;
  const std::size_t bytes_;
};

std::shared_ptr<MappedStaging> Redeem(const std::string& socket, const v1::MemoryHandle& memory) {
  if (memory.handle().size() != kTicketBytes || memory.size_bytes() <= 0) return nullptr;
  const OwnedDescriptor pidfd = OpenSelfPidfd();
  Redeemed redeemed;
  const PlainStatus status = RedeemTicket(
      socket, reinterpret_cast<const std::uint8_t*>(memory.handle().data()), pidfd.get(), &redeemed);
  const auto bytes = static_cast<std::size_t>(memory.size_bytes());
  if (!status.ok() || !redeemed.descriptor.valid() || redeemed.size_bytes != bytes) return nullptr;
  // Of a size that cannot shrink: no access faults.
  struct stat info {};
  if ((fcntl(redeemed.descriptor.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0 ||
      fstat(redeemed.descriptor.get(), &info) != 0 || info.st_size < memory.size_bytes()) {
    return nullptr;
  }
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, redeemed.descriptor.get(), 0);
  return data == MAP_FAILED ? nullptr : std::make_shared<MappedStaging>(data, bytes);
}

// Memory of another daemon that parts of a pull lie in: one of these ways to it.
struct Reach {
  std::shared_ptr<MappedStaging> mapping;          // of the host
  std::shared_ptr<const Memory> memory;            // of a CUDA device
  UcxTransport::Place ucx;                         // its peer is empty where it is not this
  std::int64_t bytes = 0;                          // of the first two
  std::map<std::int32_t, std::int64_t> offsets{};  // of parts; on the stream's thread alone
};

}  // namespace

class PullLink : public std::enable_shared_from_this<PullLink> {
 public:
  PullLink(std::string address, const PullLinks::Options& options, Stats& stats)
      : address_(std::move(address)),
        options_(options),
        stats_(stats),
        stub_(v1::HandoffService::NewStub(Dial(address_))) {}

  std::shared_ptr<PullLinks::Pulling> Pull(const std::string& secret, const std::string& transfer,
                                           std::shared_ptr<Acceptance> acceptance) {
    const std::shared_ptr<PullLinks::Pulling> pulling(new PullLinks::Pulling());
    pulling->link_ = shared_from_this();
    std::lock_guard lock(mutex_);
    pulling->key_ = next_key_++;
    const auto now = Clock::now();
    const bool others = std::any_of(pulls_.begin(), pulls_.end(),
                                    [](const auto& pull) { return pull.second.acceptance->status().ok(); });
    if (!others) heard_ = now;
    Entry& entry = pulls_[pulling->key_];
    entry.secret = secret;
    entry.transfer = transfer;
    entry.acceptance = std::move(acceptance);
    entry.pulling = pulling;
    entry.same_host = options_.same_host && now >= no_same_host_until_;
    entry.ucx = options_.ucx != nullptr && now >= no_ucx_until_;
    if (stream_ != nullptr) {
      BeginLocked(pulling->key_, entry);
    } else if (!waiting_) {
      OpenLocked();
    }
    return pulling;
  }

  void End(std::uint64_t key) {
    std::lock_guard lock(mutex_);
    const auto entry = pulls_.extract(key);
    if (entry.empty()) return;
    if (stream_ != nullptr && entry.mapped().number != 0) {
      v1::PullRequest end;
      end.mutable_end()->set_pull(entry.mapped().number);
      numbers_.erase(entry.mapped().number);
      stream_->Send(std::move(end));
    }
  }

  void Acknowledge(const std::string& secret, const std::string& transfer,
                   std::function<void(absl::Status)> done) {
    struct Call {
      grpc::ClientContext context;
      v1::AcknowledgeRequest request;
      v1::AcknowledgeResponse reply;
    };
    auto call = std::make_shared<Call>();
    call->request.set_offer_secret(secret);
    call->request.set_transfer_id(transfer);
    call->context.set_wait_for_ready(true);
    call->context.set_deadline(std::chrono::system_clock::now() + kAcknowledgeTimeout);
    stub_->async()->Acknowledge(
        &call->context, &call->request, &call->reply,
        [self = shared_from_this(), call, done = std::move(done)](const grpc::Status& status) {
          absl::Status answer = FromGrpc(status);
          if (!status.ok() && RefusalReason(answer).empty()) {
            answer = Unreachable(self->address_, status.error_message());
          }
          done(status.ok() ? absl::OkStatus() : answer);
        });
  }

  // Ends the stream, unless something is being pulled; whether it does.
  bool CloseIfIdle() {
    std::lock_guard lock(mutex_);
    if (!pulls_.empty()) return false;
    closed_ = true;
    if (stream_ != nullptr) stream_->Cancel();
    return true;
  }
  bool closed() const {
    std::lock_guard lock(mutex_);
    return streams_ == 0;
  }
  // Ends the stream, and returns when nothing of it is left.
  void Close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    if (stream_ != nullptr) stream_->Cancel();
    idle_.wait(lock, [this] { return streams_ == 0; });
  }

 private:
  struct Entry {
    std::string secret;
    std::string transfer;
    std::shared_ptr<Acceptance> acceptance;
    std::weak_ptr<PullLinks::Pulling> pulling;
    std::uint32_t number = 0;  // in the present stream; 0: none
    bool same_host = true;     // what may be tried
    bool ucx = true;
    std::shared_ptr<Reach> reach;
  };

  // A call. It lives until it is done; after that nothing of it is under way.
  class Stream final : public grpc::ClientBidiReactor<v1::PullRequest, v1::PullResponse> {
   public:
    Stream(std::shared_ptr<PullLink> link, std::uint64_t number) : link_(std::move(link)), number_(number) {
      link_->stub_->async()->Pull(&context_, this);
      AddHold();  // writes begin outside of its own calls
      message_ = std::make_shared<v1::PullResponse>();
      StartRead(message_.get());
    }
    std::uint64_t number() const { return number_; }
    // The link's lock is held around what follows.
    void Heard() { heard_ = true; }
    void Start() { StartCall(); }
    void Send(v1::PullRequest request) {
      if (broken_) return;
      requests_.push_back(std::move(request));
      if (requests_.size() == 1) StartWrite(&requests_.front());
    }
    void Cancel() { context_.TryCancel(); }

    void OnReadDone(bool ok) override {
      if (!ok) return Break();
      link_->Take(this, std::move(message_));
      message_ = std::make_shared<v1::PullResponse>();
      StartRead(message_.get());
    }
    void OnWriteDone(bool ok) override {
      std::lock_guard lock(link_->mutex_);
      requests_.pop_front();
      if (!ok || broken_) return;  // reads fail too
      if (!requests_.empty()) StartWrite(&requests_.front());
    }
    void OnDone(const grpc::Status& status) override {
      const std::shared_ptr<PullLink> link = link_;
      const bool heard = heard_;
      delete this;
      link->Ended(status, heard);
    }

   private:
    void Break() {
      {
        std::lock_guard lock(link_->mutex_);
        broken_ = true;
        if (link_->stream_ == this) link_->stream_ = nullptr;
      }
      RemoveHold();
    }

    const std::shared_ptr<PullLink> link_;
    const std::uint64_t number_;
    bool heard_ = false;  // of the source
    grpc::ClientContext context_;
    std::shared_ptr<v1::PullResponse> message_;  // being read
    std::deque<v1::PullRequest> requests_;       // the first is being written
    bool broken_ = false;
  };

  // Returns the credit of a chunk when it has been written to the cache.
  struct HeldMessage {
    HeldMessage(std::shared_ptr<PullLink> l, std::uint64_t s, std::shared_ptr<v1::PullResponse> m)
        : link(std::move(l)), stream(s), message(std::move(m)) {}
    ~HeldMessage() { link->GiveCredit(stream, CreditOf(*message)); }
    HeldMessage(const HeldMessage&) = delete;
    HeldMessage& operator=(const HeldMessage&) = delete;
    const std::shared_ptr<PullLink> link;
    const std::uint64_t stream;  // that it came on
    const std::shared_ptr<v1::PullResponse> message;
    std::string fetched = {};  // where the message has none
  };

  void OpenLocked() {
    if (closed_) return;
    ++streams_;
    stream_ = new Stream(shared_from_this(), ++opened_);
    owed_ = 0;
    v1::PullRequest hello;
    hello.mutable_hello()->set_boot_id(boot_id_);
    if (options_.ucx != nullptr) hello.mutable_hello()->set_ucx_version(options_.ucx->version());
    stream_->Send(std::move(hello));
    v1::PullRequest credit;
    credit.set_credit_bytes(options_.credit_bytes);
    stream_->Send(std::move(credit));
    numbers_.clear();
    {
      const std::lock_guard lock(mapping_mutex_);
      mapping_ = nullptr;  // tickets are of a stream
      opened_memory_.clear();
    }
    for (auto& [key, entry] : pulls_) BeginLocked(key, entry);
    stream_->Start();
  }

  void BeginLocked(std::uint64_t key, Entry& entry) {
    entry.number = next_number_++;
    entry.reach = nullptr;
    numbers_[entry.number] = key;
    v1::PullRequest request;
    v1::PullBegin* begin = request.mutable_begin();
    begin->set_pull(entry.number);
    begin->set_offer_secret(entry.secret);
    begin->set_transfer_id(entry.transfer);
    begin->set_regions(entry.acceptance->wanted().regions);
    for (const auto& [group, run] : entry.acceptance->wanted().blocks) {
      auto* blocks = begin->add_blocks();
      blocks->set_group(group);
      blocks->set_first(run.first);
      blocks->set_count(run.count);
    }
    for (const Acceptance::HeldRun& run : entry.acceptance->Held()) {
      auto* held = begin->add_held();
      held->set_part(run.part);
      held->set_first(run.first);
      held->set_count(run.count);
    }
    if (entry.same_host) begin->add_transports(v1::HANDOFF_TRANSPORT_SAME_HOST);
    if (entry.ucx) begin->add_transports(v1::HANDOFF_TRANSPORT_UCX);
    begin->set_device_uuid(entry.acceptance->device().uuid());
    stream_->Send(std::move(request));
  }

  // What a chunk takes of the credit; the source's word, within bounds.
  static std::int64_t CreditOf(const v1::PullResponse& message) {
    const auto bytes =
        std::max(static_cast<std::int64_t>(message.chunk().data().size()), message.chunk().size_bytes());
    return std::clamp<std::int64_t>(bytes, 0, kChunkBytes);
  }

  void GiveCredit(std::uint64_t stream, std::int64_t bytes) {
    std::lock_guard lock(mutex_);
    if (stream_ != nullptr && stream_->number() == stream) GiveCreditLocked(bytes);
  }
  void GiveCreditLocked(std::int64_t bytes) {
    owed_ += bytes;
    if (owed_ < options_.credit_bytes / 8) return;
    v1::PullRequest credit;
    credit.set_credit_bytes(owed_);
    owed_ = 0;
    stream_->Send(std::move(credit));
  }

  // A message of the stream.
  void Take(Stream* stream, std::shared_ptr<v1::PullResponse> message) {
    std::shared_ptr<Acceptance> acceptance;
    std::shared_ptr<PullLinks::Pulling> pulling;
    std::shared_ptr<Reach> reach;
    {
      std::lock_guard lock(mutex_);
      if (stream != stream_) return;
      stream->Heard();
      heard_ = Clock::now();
      delay_ = kFirstDelay;
      const auto number = numbers_.find(message->pull());
      if (number != numbers_.end()) {
        const Entry& entry = pulls_.at(number->second);
        acceptance = entry.acceptance;
        pulling = entry.pulling.lock();
        reach = entry.reach;
      }
      if (acceptance == nullptr || pulling == nullptr) {  // ended meanwhile
        GiveCreditLocked(CreditOf(*message));
        return;
      }
    }
    switch (message->message_case()) {
      case v1::PullResponse::kAccepted:
        return TakeAccepted(*message, *acceptance, *pulling);
      case v1::PullResponse::kPart:
        return TakePart(message->part(), acceptance, reach);
      case v1::PullResponse::kChunk:
        return TakeChunk(
            std::make_shared<HeldMessage>(shared_from_this(), stream->number(), std::move(message)),
            acceptance, pulling, reach);
      case v1::PullResponse::kDone:
        return acceptance->SourceDone(message->done().committed_tokens());
      case v1::PullResponse::kFailed:
        return TakeFailed(*message, *acceptance, reach);
      case v1::PullResponse::MESSAGE_NOT_SET:
        return acceptance->Fail(Refuse(Reason::MESSAGE_MALFORMED, "", "the source's message is of no kind"));
    }
  }

  void TakeFailed(const v1::PullResponse& message, Acceptance& acceptance,
                  const std::shared_ptr<Reach>& reach) {
    const absl::Status why = FromProto(message.failed());
    const bool by_ucx = reach != nullptr && !reach->ucx.peer.empty();
    if (by_ucx && RefusalReason(why) == ReasonName(Reason::PEER_UNREACHABLE)) {
      return FallBack(message.pull(), v1::HANDOFF_TRANSPORT_UCX, std::string(why.message()));
    }
    acceptance.Fail(why);
  }

  // Whether a way that the source has chosen was offered to it.
  bool Offered(std::uint32_t number, v1::HandoffTransport transport) {
    std::lock_guard lock(mutex_);
    const auto found = numbers_.find(number);
    if (found == numbers_.end()) return true;  // it has ended
    const Entry& entry = pulls_.at(found->second);
    return transport == v1::HANDOFF_TRANSPORT_GRPC ||
           (transport == v1::HANDOFF_TRANSPORT_SAME_HOST && entry.same_host) ||
           (transport == v1::HANDOFF_TRANSPORT_UCX && entry.ucx);
  }

  void TakeAccepted(const v1::PullResponse& message, Acceptance& acceptance, PullLinks::Pulling& pulling) {
    const v1::PullAccepted& accepted = message.accepted();
    if (!Offered(message.pull(), accepted.transport())) {
      return acceptance.Fail(Refuse(Reason::MESSAGE_MALFORMED, "accepted.transport",
                                    "the source takes a way that was not offered"));
    }
    if (!acceptance.Begin(FromProto(accepted)).ok()) return;
    pulling.transport_ = accepted.transport();
    if (accepted.transport() == v1::HANDOFF_TRANSPORT_GRPC) return;
    auto reach = std::make_shared<Reach>();
    if (accepted.transport() == v1::HANDOFF_TRANSPORT_UCX) {
      if (auto s = options_.peers.Check(accepted.ucx_address()); !s.ok()) {
        return FallBack(message.pull(), accepted.transport(),
                        absl::StrFormat("--peers does not allow its UCX at %s", accepted.ucx_address()));
      }
      reach->ucx = {accepted.ucx_address(), accepted.ucx_token(), accepted.ucx_staging()};
    } else if (OpenMemory(accepted, acceptance, *reach)) {
      pulling.mapped_ = true;
    } else {
      return FallBack(message.pull(), accepted.transport(), "its memory cannot be mapped");
    }
    std::lock_guard lock(mutex_);
    const auto number = numbers_.find(message.pull());
    if (number != numbers_.end()) pulls_.at(number->second).reach = std::move(reach);
  }

  // Whether the source's memory can be read here.
  bool OpenMemory(const v1::PullAccepted& accepted, Acceptance& acceptance, Reach& reach) {
    const v1::MemoryHandle& memory = accepted.memory();
    if (memory.kind() == v1::MEMORY_KIND_CUDA_IPC) {
      if (memory.size_bytes() <= 0) return false;
      reach.bytes = memory.size_bytes();
      std::lock_guard lock(mapping_mutex_);
      auto& known = opened_memory_[{memory.handle(), acceptance.device().name()}];
      if (known != nullptr && known->bytes() == memory.size_bytes()) {
        reach.memory = known;
        return true;
      }
      std::promise<absl::StatusOr<std::unique_ptr<Memory>>> opened;
      Device& device = acceptance.device();
      device.executor().SubmitFree(
          [&] { opened.set_value(device.OpenIpc(memory.handle(), 0, memory.size_bytes())); });
      auto result = opened.get_future().get();
      if (!result.ok()) return false;
      reach.memory = std::shared_ptr<const Memory>((*result).release(), [&device](const Memory* m) {
        device.executor().SubmitFree([m] { delete m; });
      });
      known = reach.memory;
      return true;
    }
    // A socket's path is looked for only where the source is known to be of this host.
    if (memory.kind() != v1::MEMORY_KIND_MEMFD || !absl::StartsWith(address_, "unix:")) return false;
    std::lock_guard lock(mapping_mutex_);
    if (!memory.handle().empty()) mapping_ = Redeem(accepted.descriptor_socket(), memory);
    reach.mapping = mapping_;
    if (reach.mapping == nullptr) return false;
    reach.bytes = reach.mapping->bytes();
    return true;
  }

  // Begins a pull again, over the stream alone.
  void FallBack(std::uint32_t number, v1::HandoffTransport failed, const std::string& why) {
    std::lock_guard lock(mutex_);
    const auto found = numbers_.extract(number);
    if (found.empty() || stream_ == nullptr) return;
    spdlog::warn("a hand-off from {} goes over gRPC: {}", address_, why);
    v1::PullRequest end;
    end.mutable_end()->set_pull(number);
    stream_->Send(std::move(end));
    Entry& entry = pulls_.at(found.mapped());
    const auto until = Clock::now() + kAvoidTransport;
    (failed == v1::HANDOFF_TRANSPORT_UCX ? no_ucx_until_ : no_same_host_until_) = until;
    entry.same_host = false;
    entry.ucx = false;
    BeginLocked(found.mapped(), entry);
  }

  void TakePart(const v1::PullPart& part, const std::shared_ptr<Acceptance>& acceptance,
                const std::shared_ptr<Reach>& reach) {
    const std::int32_t number = part.part();
    if (!acceptance->AddPart(number, FromProto(part)).ok() || reach == nullptr) return;
    if (!reach->ucx.peer.empty()) {
      if (part.offset_bytes() < 0 || part.offset_bytes() > kMaxOffset) {
        return acceptance->Fail(
            Refuse(Reason::MESSAGE_MALFORMED, "part.offset_bytes", "the source's part leaves its memory"));
      }
      reach->offsets[number] = part.offset_bytes();
      return;
    }
    const Part* known = acceptance->FindPart(number);
    if (part.offset_bytes() < 0 || part.offset_bytes() > reach->bytes - known->bytes()) {
      return acceptance->Fail(
          Refuse(Reason::MESSAGE_MALFORMED, "part.offset_bytes", "the source's part leaves its memory"));
    }
    if (reach->memory != nullptr) {
      return acceptance->WritePart(
          number, static_cast<const char*>(reach->memory->data()) + part.offset_bytes(), reach);
    }
    const char* data = reach->mapping->data() + part.offset_bytes();
    if (!acceptance->device().pins_host_memory()) return acceptance->WritePart(number, data, reach);
    for (std::int64_t c = 0; c < ChunkCount(*known); ++c) {
      acceptance->WriteFromHost(number, c, data + ChunkAt(*known, c).offset(*known), reach);
    }
  }

  void TakeChunk(const std::shared_ptr<HeldMessage>& held, const std::shared_ptr<Acceptance>& acceptance,
                 const std::shared_ptr<PullLinks::Pulling>& pulling, const std::shared_ptr<Reach>& reach) {
    const v1::PullChunk& chunk = held->message->chunk();
    const std::int64_t bytes = acceptance->BytesOfChunk(chunk.part(), chunk.chunk());
    const bool fetch = reach != nullptr && !reach->ucx.peer.empty();
    if (!fetch || bytes == 0) return CheckChunk(held, chunk.data(), *acceptance, *pulling);
    UcxTransport::Place place = reach->ucx;
    const Part& part = *acceptance->FindPart(chunk.part());
    place.offset = reach->offsets[chunk.part()] + ChunkAt(part, chunk.chunk()).offset(part);
    options_.ucx->Fetch(place, bytes,
                        [self = shared_from_this(), held, acceptance,
                         weak = std::weak_ptr(pulling)](absl::StatusOr<std::string> fetched) {
                          const auto still = weak.lock();
                          if (still == nullptr) return;
                          if (!fetched.ok()) {
                            return self->FallBack(held->message->pull(), v1::HANDOFF_TRANSPORT_UCX,
                                                  std::string(fetched.status().message()));
                          }
                          held->fetched = *std::move(fetched);
                          self->CheckChunk(held, held->fetched, *acceptance, *still);
                        });
  }

  // Writes a chunk's bytes, which `held` keeps, or asks for them again.
  void CheckChunk(const std::shared_ptr<HeldMessage>& held, const std::string& data, Acceptance& acceptance,
                  PullLinks::Pulling& pulling) {
    const v1::PullChunk& chunk = held->message->chunk();
    if (acceptance.BytesOfChunk(chunk.part(), chunk.chunk()) == static_cast<std::int64_t>(data.size()) &&
        ChunkChecksum(chunk.part(), chunk.chunk(), data.data(), data.size()) == chunk.checksum()) {
      return acceptance.WriteFromHost(chunk.part(), chunk.chunk(), data.data(), held);
    }
    ++stats_.handoff_damaged_chunks;
    if (++pulling.damaged_ > kMaxDamaged) {
      return acceptance.Fail(Refuse(Reason::CHUNK_DAMAGED, "handoff",
                                    absl::StrFormat("chunk %d of part %d, and %d before it, came damaged",
                                                    chunk.chunk(), chunk.part(), kMaxDamaged)));
    }
    v1::PullRequest again;
    again.mutable_again()->set_pull(held->message->pull());
    again.mutable_again()->set_part(chunk.part());
    again.mutable_again()->set_chunk(chunk.chunk());
    std::lock_guard lock(mutex_);
    if (stream_ != nullptr && numbers_.contains(held->message->pull())) stream_->Send(std::move(again));
  }

  // The stream is over, and nothing of it is left.
  void Ended(const grpc::Status& status, bool heard) {
    std::vector<std::pair<std::shared_ptr<Acceptance>, absl::Status>> failed;
    std::vector<std::shared_ptr<PullLinks::Pulling>> kept;  // the last hold of one ends without the lock
    {
      std::lock_guard lock(mutex_);
      --streams_;
      idle_.notify_all();
      if (stream_ != nullptr) return;  // another has taken its place
      for (auto& [key, entry] : pulls_) entry.number = 0;
      numbers_.clear();
      const absl::Status refused = FromGrpc(status);
      if (heard) heard_ = Clock::now();  // pings vouched for the source while it said nothing
      const bool for_good = closed_ || Clock::now() - heard_ > options_.give_up ||
                            status.error_code() == grpc::StatusCode::UNIMPLEMENTED ||
                            status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                            status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                            RefusalReason(refused) == ReasonName(Reason::MESSAGE_MALFORMED);
      for (auto& [key, entry] : pulls_) {
        if (for_good) {
          failed.emplace_back(entry.acceptance, Unreachable(address_, status.error_message()));
        } else if (const auto pulling = entry.pulling.lock()) {
          ++pulling->reconnects_;
          kept.push_back(pulling);
        }
      }
      if (!for_good && !pulls_.empty()) {
        ++stats_.handoff_reconnects;
        waiting_ = true;
        OnGrpcThreadAfter(delay_, [weak = weak_from_this()] {
          const auto self = weak.lock();
          if (self == nullptr) return;
          std::lock_guard again(self->mutex_);
          self->waiting_ = false;
          if (self->stream_ == nullptr && !self->pulls_.empty()) self->OpenLocked();
        });
        delay_ = std::min(delay_ * 2, kLongestDelay);
      }
    }
    for (const auto& [acceptance, why] : failed) acceptance->Fail(why);
  }

  const std::string address_;
  const PullLinks::Options options_;
  Stats& stats_;
  const std::string boot_id_ = BootId();
  const std::unique_ptr<v1::HandoffService::Stub> stub_;
  std::mutex mapping_mutex_;
  std::shared_ptr<MappedStaging> mapping_;  // with mapping_mutex_ held, as the next
  // CUDA memory of the source, by handle and device.
  std::map<std::pair<std::string, std::string>, std::shared_ptr<const Memory>> opened_memory_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  bool closed_ = false;
  bool waiting_ = false;  // for the time to open a stream again
  int streams_ = 0;       // that are not done
  Stream* stream_ = nullptr;
  std::uint64_t next_key_ = 1;
  std::uint32_t next_number_ = 1;
  std::map<std::uint64_t, Entry> pulls_;
  std::map<std::uint32_t, std::uint64_t> numbers_;  // of the present stream
  std::uint64_t opened_ = 0;                        // streams
  Clock::time_point no_same_host_until_;
  Clock::time_point no_ucx_until_;
  std::int64_t owed_ = 0;    // credit
  Clock::time_point heard_;  // when the source last said something
  std::chrono::milliseconds delay_ = kFirstDelay;
};

PullLinks::Pulling::~Pulling() {
  if (link_ != nullptr) link_->End(key_);
}

PullLinks::~PullLinks() {
  for (const auto& [address, link] : links_) link->Close();
  for (const auto& link : closing_) link->Close();
}

absl::StatusOr<std::shared_ptr<PullLink>> PullLinks::Find(const std::string& address) {
  std::lock_guard lock(mutex_);
  if (const auto found = links_.find(address); found != links_.end()) return found->second;
  std::erase_if(closing_, [](const auto& link) { return link->closed(); });
  for (auto link = links_.begin(); links_.size() >= kMaxLinks && link != links_.end();) {
    if (!link->second->CloseIfIdle()) {
      ++link;
      continue;
    }
    closing_.push_back(link->second);
    link = links_.erase(link);
  }
  if (links_.size() >= kMaxLinks) {
    return Refuse(Reason::HANDOFF_LIMIT, "handoff",
                  absl::StrFormat("the daemon pulls from %d others already", kMaxLinks));
  }
  return links_[address] = std::make_shared<PullLink>(address, options_, stats_);
}

absl::StatusOr<std::shared_ptr<PullLinks::Pulling>> PullLinks::Pull(const std::string& address,
                                                                    const std::string& secret,
                                                                    const std::string& transfer,
                                                                    std::shared_ptr<Acceptance> acceptance) {
  const auto link = Find(address);
  if (!link.ok()) return link.status();
  return (*link)->Pull(secret, transfer, std::move(acceptance));
}

void PullLinks::Acknowledge(const std::string& address, const std::string& secret,
                            const std::string& transfer, std::function<void(absl::Status)> done) {
  const auto link = Find(address);
  if (!link.ok()) return done(link.status());
  (*link)->Acknowledge(secret, transfer, std::move(done));
}

}  // namespace kvsummary
