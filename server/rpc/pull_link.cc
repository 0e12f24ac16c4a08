#include "server/rpc/pull_link.h"

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
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
constexpr std::chrono::seconds kAcknowledgeTimeout{5};
constexpr std::chrono::seconds kAvoidTransport{60};  // that has just failed
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

}  // namespace

PullLink::PullLink(std::string address, const PullLinks::Options& options, Stats& stats)
    : address_(std::move(address)),
      options_(options),
      stats_(stats),
      boot_id_(BootId()),
      stub_(v1::HandoffService::NewStub(Dial(address_))),
      memory_(absl::StartsWith(address_, "unix:")),
      delay_(kFirstDelay) {}

std::shared_ptr<PullLinks::Pulling> PullLink::Pull(const std::string& secret, const std::string& transfer,
                                                   std::shared_ptr<Acceptance> acceptance) {
  const std::shared_ptr<PullLinks::Pulling> pulling(new PullLinks::Pulling());
  pulling->link_ = shared_from_this();
  const std::lock_guard lock(mutex_);
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

void PullLink::Acknowledge(const std::string& secret, const std::string& transfer,
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

bool PullLink::CloseIfIdle() {
  const std::lock_guard lock(mutex_);
  if (!pulls_.empty()) return false;
  closed_ = true;
  if (stream_ != nullptr) stream_->Cancel();
  return true;
}

bool PullLink::closed() const {
  const std::lock_guard lock(mutex_);
  return streams_ == 0;
}

void PullLink::Close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  if (stream_ != nullptr) stream_->Cancel();
  idle_.wait(lock, [this] { return streams_ == 0; });
}

void PullLink::OpenLocked() {
  if (closed_) return;
  ++streams_;
  stream_ = new PullStream(shared_from_this(), ++opened_, *stub_);
  owed_ = 0;
  v1::PullRequest hello;
  hello.mutable_hello()->set_boot_id(boot_id_);
  if (options_.ucx != nullptr) hello.mutable_hello()->set_ucx_version(options_.ucx->version());
  stream_->Send(std::move(hello));
  v1::PullRequest credit;
  credit.set_credit_bytes(options_.credit_bytes);
  stream_->Send(std::move(credit));
  memory_.Forget();  // tickets are of a stream
  numbers_.clear();
  for (auto& [key, entry] : pulls_) BeginLocked(key, entry);
  stream_->Start();
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

void PullLink::GiveCredit(std::uint64_t stream, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (stream_ == nullptr || stream_->number() != stream) return;
  owed_ += bytes;
  if (owed_ < options_.credit_bytes / 8) return;
  v1::PullRequest credit;
  credit.set_credit_bytes(std::exchange(owed_, 0));
  stream_->Send(std::move(credit));
}

void PullLink::Take(PullStream* stream, std::shared_ptr<v1::PullResponse> message) {
  const auto held = std::make_shared<HeldMessage>(shared_from_this(), stream->number(), std::move(message));
  std::shared_ptr<IncomingPull> incoming;
  {
    const std::lock_guard lock(mutex_);
    if (stream != stream_) return;
    heard_ = Clock::now();
    delay_ = kFirstDelay;
    const auto number = numbers_.find((*held)->pull());
    if (number == numbers_.end()) return;  // ended meanwhile
    incoming = number->second.incoming;
  }
  incoming->Take(held);
}

void PullLink::Broken(PullStream* stream) {
  const std::lock_guard lock(mutex_);
  if (stream_ == stream) stream_ = nullptr;
}

void PullLink::Ended(const grpc::Status& status, bool heard) {
  std::vector<std::pair<std::shared_ptr<Acceptance>, absl::Status>> failed;
  // The last hold of one ends without the lock.
  std::vector<std::shared_ptr<PullLinks::Pulling>> kept;
  std::map<std::uint32_t, Numbered> numbers;
  {
    const std::lock_guard lock(mutex_);
    --streams_;
    idle_.notify_all();
    if (stream_ != nullptr) return;  // another has taken its place
    for (auto& [key, entry] : pulls_) entry.number = 0;
    numbers.swap(numbers_);
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
    if (!for_good && !pulls_.empty()) ReopenLocked();
  }
  for (const auto& [acceptance, why] : failed) acceptance->Fail(why);
}

void PullLink::ReopenLocked() {
  ++stats_.handoff_reconnects;
  waiting_ = true;
  OnGrpcThreadAfter(delay_, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    const std::lock_guard lock(self->mutex_);
    self->waiting_ = false;
    if (self->stream_ == nullptr && !self->pulls_.empty()) self->OpenLocked();
  });
  delay_ = std::min(delay_ * 2, kLongestDelay);
}

}  // namespace kvsummary
