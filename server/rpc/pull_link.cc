#include "server/rpc/pull_link.h"

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "client/tls_credentials.h"
#include "server/error.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/incoming_pull.h"
#include "server/rpc/pull_stream.h"
#include "server/rpc/ucx_transport.h"

namespace kvsummary {
namespace {

constexpr std::chrono::milliseconds kFirstDelay{20};
constexpr std::chrono::milliseconds kLongestDelay{500};
constexpr std::chrono::seconds kAvoidTransport{60};  // that has just failed
constexpr int kConnectMs = 1000;                     // what an attempt may take, without TLS
constexpr int kMaxMessageBytes = 64 << 20;

// The two ends notice within twice this time that the other, or the network, is gone.
constexpr int kKeepaliveMs = 1500;

std::shared_ptr<grpc::Channel> Dial(const std::string& address, const TlsFiles& tls,
                                    const std::shared_ptr<grpc::ChannelCredentials>& tcp) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, static_cast<int>(kFirstDelay.count()));
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, tls.ca.empty() ? kConnectMs : kTlsConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, static_cast<int>(kLongestDelay.count()));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // dials what was checked, and nothing else
  return grpc::CreateCustomChannel(address, CredentialsFor(address, tcp), arguments);
}

}  // namespace

PullLink::PullLink(std::string address, const PullLinks::Options& options,
                   const std::shared_ptr<grpc::ChannelCredentials>& tcp, Stats& stats)
    : address_(std::move(address)),
      options_(options),
      stats_(stats),
      boot_id_(BootId()),
      stub_(v1::HandoffService::NewStub(Dial(address_, options_.tls, tcp))),
      memory_(absl::StartsWith(address_, "unix:")),
      delay_(kFirstDelay) {}

std::shared_ptr<PullLinks::Pulling> PullLink::Pull(const std::string& secret, const std::string& transfer,
                                                   std::shared_ptr<Acceptance> acceptance) {
  const std::shared_ptr<PullLinks::Pulling> pulling(new PullLinks::Pulling());
  const std::string ucx_version = UcxVersion();
  const std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  pulling->link_ = shared_from_this();
  pulling->key_ = next_key_++;
  const auto now = Clock::now();
  if (pulls_.empty()) delay_ = kFirstDelay;
  if (pulls_.empty() && acknowledged_.empty()) stream_heard_ = now;  // nobody has listened
  Entry& entry = pulls_[pulling->key_];
  entry.secret = secret;
  entry.transfer = transfer;
  entry.acceptance = std::move(acceptance);
  entry.pulling = pulling;
  entry.went_on = now;
  entry.same_host = options_.same_host && now >= no_same_host_until_;
  entry.ucx = !ucx_version.empty() && now >= no_ucx_until_;
  if (stream_ != nullptr) {
    BeginLocked(pulling->key_, entry);
  } else if (!waiting_) {
    OpenLocked(ucx_version);
  }
  WatchLocked();
  return pulling;
}

void PullLink::End(std::uint64_t key) {
  Numbered ended;  // the last hold of it ends without the lock
  const std::lock_guard lock(mutex_);
  const auto entry = pulls_.extract(key);
  if (entry.empty() || stream_ == nullptr || entry.mapped().number == 0) return;
  ended = std::move(numbers_.extract(entry.mapped().number).mapped());
  v1::PullRequest end;
  end.mutable_end()->set_pull(entry.mapped().number);
  stream_->Send(std::move(end));
}

absl::Status PullLink::Unreachable(std::string_view why) const {
  return Refuse(Reason::PEER_UNREACHABLE, "handoff",
                absl::StrFormat("the daemon at %s is not reached%s: %s", address_,
                                HowDialled(address_, options_.tls), why));
}

void PullLink::Acknowledge(std::uint64_t key, std::function<void(absl::Status)> done) {
  Numbered ended;  // as in End
  Acknowledged acknowledged;
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    auto entry = pulls_.extract(key);
    acknowledged = {std::move(entry.mapped().secret), std::move(entry.mapped().transfer), std::move(done),
                    Clock::now() + options_.silence};
    const std::uint32_t number = entry.mapped().number;
    if (stream_ != nullptr && number != 0) {
      ended = std::move(numbers_.extract(number).mapped());
      acknowledged_[number] = std::move(acknowledged);
      v1::PullRequest end;
      end.mutable_end()->set_pull(number);
      end.mutable_end()->set_acknowledge(true);
      stream_->Send(std::move(end));
      return WatchLocked();
    }
    closed = closed_;
  }
  if (closed) return acknowledged.done(Unreachable("the daemon ends"));
  CallAcknowledge(std::move(acknowledged));
}

void PullLink::CallAcknowledge(Acknowledged acknowledged) {
  struct Call {
    grpc::ClientContext context;
    v1::AcknowledgeRequest request;
    v1::AcknowledgeResponse reply;
  };
  auto call = std::make_shared<Call>();
  call->request.set_offer_secret(acknowledged.secret);
  call->request.set_transfer_id(acknowledged.transfer);
  call->context.set_wait_for_ready(true);
  call->context.set_deadline(std::chrono::system_clock::now() + options_.silence);
  stub_->async()->Acknowledge(
      &call->context, &call->request, &call->reply,
      [self = shared_from_this(), call, done = std::move(acknowledged.done)](const grpc::Status& status) {
        if (status.ok()) return done(absl::OkStatus());
        const absl::Status answer = FromGrpc(status);
        done(RefusalReason(answer).empty() ? self->Unreachable(status.error_message()) : answer);
      });
}

bool PullLink::CloseIfIdle() {
  const std::lock_guard lock(mutex_);
  if (!pulls_.empty() || !acknowledged_.empty()) return false;
  closed_ = true;
  if (stream_ != nullptr) stream_->Cancel();
  return true;
}

bool PullLink::closed() const {
  const std::lock_guard lock(mutex_);
  return streams_ == 0;
}

void PullLink::Close() {
  std::vector<std::shared_ptr<Acceptance>> failed;  // of those that have no stream at the moment
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    if (stream_ != nullptr) stream_->Cancel();
    idle_.wait(lock, [this] { return streams_ == 0; });
    for (const auto& [key, entry] : pulls_) failed.push_back(entry.acceptance);
  }
  for (const auto& acceptance : failed) acceptance->Fail(Unreachable("the daemon ends"));
}

std::string PullLink::UcxVersion() const { return options_.ucx == nullptr ? "" : options_.ucx->version(); }

void PullLink::OpenLocked(const std::string& ucx_version) {
  if (closed_) return;
  ++streams_;
  stream_ = new PullStream(shared_from_this(), ++opened_, *stub_);
  opened_at_ = stream_heard_ = Clock::now();
  taking_ = probed_ = answered_ = silenced_ = overdrawn_ = false;
  owed_.clear();
  owed_bytes_ = held_bytes_ = 0;
  numbers_.clear();
  memory_.Forget();  // tickets are of a stream
  v1::PullRequest hello;
  hello.mutable_hello()->set_boot_id(boot_id_);
  hello.mutable_hello()->set_version(kPullVersion);
  hello.mutable_hello()->set_ucx_version(ucx_version);
  stream_->Send(std::move(hello));
  v1::PullRequest credit;
  credit.mutable_credit()->set_bytes(options_.credit_bytes);
  stream_->Send(std::move(credit));
  for (auto& [key, entry] : pulls_) BeginLocked(key, entry);
  stream_->Start();
  WatchLocked();
}

void PullLink::BeginLocked(std::uint64_t key, Entry& entry) {
  entry.number = next_number_++;
  const auto incoming = std::make_shared<IncomingPull>(
      shared_from_this(), memory_, entry.number,
      IncomingPull::Ways{.same_host = entry.same_host, .ucx = entry.ucx}, entry.acceptance, entry.pulling);
  numbers_[entry.number] = {key, incoming};
  stream_->Send(incoming->Begin(entry.secret, entry.transfer));
}

void PullLink::FallBack(std::uint32_t number, v1::HandoffTransport failed, const std::string& why) {
  const std::lock_guard lock(mutex_);
  const auto found = numbers_.extract(number);
  if (found.empty() || stream_ == nullptr) return;
  spdlog::warn("a hand-off from {} goes over gRPC: {}", address_, why);
  v1::PullRequest end;
  end.mutable_end()->set_pull(number);
  stream_->Send(std::move(end));
  Entry& entry = pulls_.at(found.mapped().key);
  const auto until = Clock::now() + kAvoidTransport;
  (failed == v1::HANDOFF_TRANSPORT_UCX ? no_ucx_until_ : no_same_host_until_) = until;
  entry.same_host = false;
  entry.ucx = false;
  BeginLocked(found.mapped().key, entry);
}

void PullLink::SendOf(std::uint32_t number, v1::PullRequest request) {
  const std::lock_guard lock(mutex_);
  if (stream_ != nullptr && numbers_.contains(number)) stream_->Send(std::move(request));
}

void PullLink::GiveCredit(std::uint64_t stream, std::uint32_t pull, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (stream_ == nullptr || stream_->number() != stream) return;
  owed_[numbers_.contains(pull) ? pull : 0] += bytes;  // 0: of the stream alone
  owed_bytes_ += bytes;
  if (owed_bytes_ < options_.credit_bytes / 8) return;
  for (const auto& [number, owed] : owed_) {
    v1::PullRequest credit;
    credit.mutable_credit()->set_pull(number);
    credit.mutable_credit()->set_bytes(owed);
    stream_->Send(std::move(credit));
  }
  held_bytes_ -= owed_bytes_;
  owed_.clear();
  owed_bytes_ = 0;
}

void PullLink::Take(PullStream* stream, std::shared_ptr<v1::PullResponse> message) {
  const auto held = std::make_shared<HeldMessage>(shared_from_this(), stream->number(), std::move(message));
  std::shared_ptr<IncomingPull> incoming;
  decltype(acknowledged_)::node_type acknowledged;
  {
    const std::lock_guard lock(mutex_);
    if (stream != stream_ || overdrawn_) return;
    held_bytes_ += held->credit();
    // The last that there is credit for may be larger.
    if (held_bytes_ >= options_.credit_bytes + kChunkBytes ||
        std::ssize((*held)->chunk().data()) > kChunkBytes) {
      overdrawn_ = true;
      return stream->Cancel();
    }
    stream_heard_ = Clock::now();
    if (std::exchange(probed_, false) && (*held)->has_alive()) answered_ = true;
    if ((*held)->has_ended()) acknowledged = acknowledged_.extract((*held)->pull());
    if (const auto number = numbers_.find((*held)->pull()); number != numbers_.end()) {
      incoming = number->second.incoming;
      taking_ = true;
    }
  }
  if (!acknowledged.empty()) {
    const v1::PullEnded& ended = (*held)->ended();
    acknowledged.mapped().done(ended.has_refused() ? FromProto(ended.refused()) : absl::OkStatus());
  }
  if (incoming == nullptr) return;  // it is of none, or of one that has ended meanwhile
  incoming->Take(held);
  const std::lock_guard lock(mutex_);
  if (stream != stream_) return;
  taking_ = false;
  stream_heard_ = Clock::now();
}

void PullLink::WatchLocked() {
  if (std::exchange(watching_, true)) return;
  OnGrpcThreadAfter(options_.silence / 4, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->Watch();
  });
}

void PullLink::Watch() {
  std::vector<Acknowledged> late;
  {
    const std::lock_guard lock(mutex_);
    watching_ = false;
    for (auto next = acknowledged_.begin(); next != acknowledged_.end();) {
      const auto acknowledged = next++;
      if (acknowledged->second.until > Clock::now()) continue;
      late.push_back(std::move(acknowledged->second));
      acknowledged_.erase(acknowledged);
    }
    LookLocked();
  }
  for (Acknowledged& acknowledged : late) CallAcknowledge(std::move(acknowledged));
}

void PullLink::LookLocked() {
  if (stream_ == nullptr || (pulls_.empty() && acknowledged_.empty())) return;
  const auto silent = taking_ ? Clock::duration(0) : Clock::now() - stream_heard_;
  if (silent >= options_.silence) {
    silenced_ = true;
    return stream_->Cancel();
  }
  if (silent >= options_.silence / 2 && !std::exchange(probed_, true)) {
    v1::PullRequest probe;
    probe.mutable_probe();
    stream_->Send(std::move(probe));
  }
  WatchLocked();
}

void PullLink::Broken(PullStream* stream) {
  std::map<std::uint32_t, Acknowledged> unanswered;
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    if (stream_ == stream) stream_ = nullptr;
    unanswered.swap(acknowledged_);
    closed = closed_;
  }
  for (auto& [number, acknowledged] : unanswered) {
    if (closed) {
      acknowledged.done(Unreachable("the daemon ends"));
    } else {
      CallAcknowledge(std::move(acknowledged));
    }
  }
}

void PullLink::Ended(std::uint64_t number, const grpc::Status& status, bool heard) {
  std::vector<std::pair<std::shared_ptr<Acceptance>, absl::Status>> failed;
  // The last hold of one ends without the lock.
  std::vector<std::shared_ptr<PullLinks::Pulling>> kept;
  std::map<std::uint32_t, Numbered> numbers;
  {
    const std::lock_guard lock(mutex_);
    --streams_;
    idle_.notify_all();
    if (number != opened_) return;  // another has taken its place
    numbers.swap(numbers_);
    const absl::Status refused = FromGrpc(status);
    // Pings vouched for the source while it said nothing.
    const auto there_until = heard && !silenced_ ? Clock::now() : stream_heard_;
    // Not one that ends soon, however often: a pull that waits for its source's engine has nothing else to
    // show.
    const bool stood = answered_ || there_until - opened_at_ > options_.give_up;
    const bool for_good = closed_ || overdrawn_ || status.error_code() == grpc::StatusCode::UNIMPLEMENTED ||
                          status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                          status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                          RefusalReason(refused) == ReasonName(Reason::MESSAGE_MALFORMED);
    const absl::Status why =
        overdrawn_
            ? Refuse(Reason::MESSAGE_MALFORMED, "chunk",
                     absl::StrFormat("the source at %s sends more than the %d bytes that it has credit for",
                                     address_, options_.credit_bytes))
            : Unreachable(silenced_
                              ? absl::StrFormat("it has said nothing for %d ms", options_.silence.count())
                              : status.error_message());
    bool go_on = false;
    for (auto& [key, entry] : pulls_) {
      const auto incoming = numbers.find(std::exchange(entry.number, 0));
      const IncomingPull* pull = incoming == numbers.end() ? nullptr : incoming->second.incoming.get();
      if (stood || (pull != nullptr && pull->has_brought())) {
        entry.went_on = std::max(entry.went_on, there_until);
        delay_ = kFirstDelay;
      }
      if (for_good || Clock::now() - entry.went_on >= options_.give_up) {
        failed.emplace_back(entry.acceptance, why);
        continue;
      }
      go_on = true;
      if (const auto pulling = entry.pulling.lock()) {
        ++pulling->reconnects_;
        kept.push_back(pulling);
      }
    }
    if (go_on) ReopenLocked();
  }
  for (const auto& [acceptance, status_of] : failed) acceptance->Fail(status_of);
}

void PullLink::Reopen() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    ++streams_;  // Close waits for what follows
  }
  const std::string ucx_version = UcxVersion();
  const std::lock_guard lock(mutex_);
  --streams_;
  idle_.notify_all();
  waiting_ = false;
  if (stream_ == nullptr && !pulls_.empty()) OpenLocked(ucx_version);
}

void PullLink::ReopenLocked() {
  ++stats_.handoff_reconnects;
  waiting_ = true;
  OnGrpcThreadAfter(delay_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->Reopen();
  });
  delay_ = std::min(delay_ * 2, kLongestDelay);
}

}  // namespace kvsummary
