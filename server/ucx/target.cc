#include "server/ucx/target.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kCloseTime{1};

absl::Status Refused(std::int32_t code, const std::string& peer) {
  switch (static_cast<absl::StatusCode>(code)) {
    case absl::StatusCode::kNotFound:
      return absl::NotFoundError(peer + " lends nothing under this token");
    case absl::StatusCode::kOutOfRange:
      return absl::OutOfRangeError(peer + " does not lend this range under this token");
    case absl::StatusCode::kResourceExhausted:
      return absl::ResourceExhaustedError(peer + " has too many requests under way");
    default:
      return absl::InternalError(absl::StrFormat("%s refuses with the unknown code %d", peer, code));
  }
}

absl::Status Lost(const std::string& peer, ucs_status_t status) {
  return absl::UnavailableError(absl::StrFormat("%s: %s", peer, ucs_status_string(status)));
}

}  // namespace

UcxTarget::UcxTarget(const UcxMemories& landing, UcxControl& control, std::chrono::milliseconds deadline)
    : landing_(landing), control_(control), deadline_(deadline) {
  // Not from 0: an answer to a request of an earlier process must not fit one of this.
  std::random_device random;
  last_request_ = (std::uint64_t{random()} << 32) | random();
}

absl::Status UcxTarget::Serve(UcxWorker& worker) {
  worker_ = &worker;
  return worker.SetHandler(kUcxChunkMessage, OnChunk, this);
}

void UcxTarget::CloseAll() {
  for (auto& [address, link] : links_) Drop(link, absl::UnavailableError("the helper ends"));
  links_.clear();
}

void UcxTarget::Fetch(const UcxCommand& command) {
  if (landing_.Find(command.landing, command.to, command.bytes) == nullptr) {
    control_.Answer(command.id, absl::InvalidArgumentError("the place is not within the landing memory"));
    return;
  }
  Link& link = links_[{command.ipv4, command.port}];
  if (link.name.empty()) {
    char ip[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &command.ipv4, ip, sizeof(ip));
    link.name = absl::StrFormat("%s:%d", ip, command.port);
  }
  link.queued.push_back(command);
}

void UcxTarget::Pump(Time now) {
  for (auto i = links_.begin(); i != links_.end();) {
    auto& [address, link] = *i;
    if (link.endpoint == nullptr) link.lost = Connect(address, link);
    if (link.lost == UCS_OK) Post(link, now);
    if (link.lost != UCS_OK) {
      Drop(link, Lost(link.name, link.lost));
      i = links_.erase(i);
    } else if (link.under_way > 0 && now - link.progress >= deadline_) {
      Drop(link, absl::DeadlineExceededError(
                     absl::StrFormat("%s: nothing came for %d ms", link.name, deadline_.count())));
      i = links_.erase(i);
    } else {
      ++i;
    }
  }
}

UcxTarget::Time UcxTarget::NextDeadline() const {
  Time next = Time::max();
  for (const auto& [address, link] : links_) {
    if (link.under_way > 0) next = std::min(next, link.progress + deadline_);
  }
  return next;
}

ucs_status_t UcxTarget::Connect(const Address& address, Link& link) {
  sockaddr_in socket_address{};
  socket_address.sin_family = AF_INET;
  socket_address.sin_addr.s_addr = address.first;
  socket_address.sin_port = htons(static_cast<std::uint16_t>(address.second));
  ucp_ep_params_t parameters{};
  parameters.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  parameters.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  parameters.sockaddr = {reinterpret_cast<const sockaddr*>(&socket_address), sizeof(socket_address)};
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler = {OnLost, &link};
  return ucp_ep_create(worker_->get(), &parameters, &link.endpoint);
}

void UcxTarget::OnLost(void* link, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  static_cast<Link*>(link)->lost = status;  // Pump closes it: not allowed here
}

void UcxTarget::Post(Link& link, Time now) {
  while (link.lost == UCS_OK && link.under_way < kUcxPeerFetches && !link.queued.empty()) {
    const UcxCommand command = link.queued.front();
    link.queued.pop_front();
    if (link.under_way++ == 0) link.progress = now;
    const std::uint64_t number = ++last_request_;
    waiting_[number] = std::make_unique<Operation>(Operation{this, &link, command});
    auto* request =
        new Request{this, {number, command.token, command.from, command.bytes, command.staging, 0}};
    ucp_request_param_t parameters{};
    parameters.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    parameters.cb.send = OnRequestSent;
    parameters.user_data = request;
    void* sent = ucp_am_send_nbx(link.endpoint, kUcxFetchMessage, &request->header, sizeof(request->header),
                                 nullptr, 0, &parameters);
    if (UCS_PTR_IS_PTR(sent)) continue;
    delete request;  // it has ended, well or not: no callback comes
    if (UCS_PTR_IS_ERR(sent)) link.lost = UCS_PTR_STATUS(sent);
  }
}

void UcxTarget::OnRequestSent(void* request, ucs_status_t status, void* user) {
  ucp_request_free(request);
  const std::unique_ptr<Request> sent(static_cast<Request*>(user));
  if (status == UCS_OK) return;
  const auto found = sent->target->waiting_.find(sent->header.request);
  if (found != sent->target->waiting_.end()) found->second->link->lost = status;
}

ucs_status_t UcxTarget::OnChunk(void* self, const void* header, std::size_t header_bytes, void* data,
                                std::size_t bytes, const ucp_am_recv_param_t* parameters) {
  UcxChunkHeader chunk;
  if (header_bytes != sizeof(chunk)) return UCS_OK;
  std::memcpy(&chunk, header, sizeof(chunk));
  const bool rendezvous = (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  return static_cast<UcxTarget*>(self)->Receive(chunk, data, bytes, rendezvous);
}

// UCS_OK: UCX may drop the data. UCS_INPROGRESS: it is being received.
ucs_status_t UcxTarget::Receive(const UcxChunkHeader& header, void* data, std::size_t bytes,
                                bool rendezvous) {
  const auto found = waiting_.find(header.request);
  if (found == waiting_.end() || found->second->link->closing) return UCS_OK;  // of a fetch that was given up
  std::unique_ptr<Operation> operation = std::move(found->second);
  waiting_.erase(found);
  const UcxCommand& command = operation->command;
  if (header.code != 0) {
    absl::Status refused = Refused(header.code, operation->link->name);
    End(std::move(operation), refused);
    return UCS_OK;
  }
  if (bytes != static_cast<std::size_t>(command.bytes)) {
    absl::Status wrong = absl::DataLossError(
        absl::StrFormat("%s: %d bytes came instead of %d", operation->link->name, bytes, command.bytes));
    End(std::move(operation), wrong);
    return UCS_OK;
  }
  std::byte* place = landing_.Find(command.landing, command.to, command.bytes);
  if (!rendezvous) {
    std::memcpy(place, data, bytes);
    End(std::move(operation), absl::OkStatus());
    return UCS_OK;
  }
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.recv_am = OnReceived;
  // The callback's from here on: where the connection is being lost it comes before the call returns.
  Operation* const receiving = operation.release();
  Link& link = *receiving->link;
  ++link.receiving;
  parameters.user_data = receiving;
  void* request = ucp_am_recv_data_nbx(worker_->get(), data, place, bytes, &parameters);
  if (!UCS_PTR_IS_PTR(request)) {  // it has ended, well or not: no callback comes
    --link.receiving;
    const ucs_status_t s = UCS_PTR_STATUS(request);
    End(std::unique_ptr<Operation>(receiving), s == UCS_OK ? absl::OkStatus() : Lost(link.name, s));
  }
  return UCS_INPROGRESS;
}

void UcxTarget::OnReceived(void* request, ucs_status_t status, std::size_t /*bytes*/, void* operation) {
  ucp_request_free(request);
  std::unique_ptr<Operation> received(static_cast<Operation*>(operation));
  UcxTarget& target = *received->target;
  Link& link = *received->link;
  --link.receiving;
  if (status == UCS_OK) {
    target.End(std::move(received), absl::OkStatus());
    return;
  }
  if (link.closing) {
    // The reason is what Drop was told: it ends it with the others.
    target.waiting_.emplace(++target.last_request_, std::move(received));
    return;
  }
  link.lost = status;
  target.End(std::move(received), Lost(link.name, status));
}

void UcxTarget::End(std::unique_ptr<Operation> operation, const absl::Status& status) {
  Link& link = *operation->link;
  --link.under_way;
  link.progress = Clock::now();
  control_.Answer(operation->command.id, status);
}

void UcxTarget::Drop(Link& link, const absl::Status& why) {
  link.closing = true;
  if (link.endpoint != nullptr) worker_->Close(link.endpoint);
  // The last receives end a moment after the connection. Only then nothing is written to their places any
  // more.
  for (const Time end = Clock::now() + kCloseTime; link.receiving > 0;) {
    if (Clock::now() > end) UcxFatal("receives go on after their connection has been closed");
    worker_->Progress();
  }
  std::vector<std::unique_ptr<Operation>> left;
  for (auto i = waiting_.begin(); i != waiting_.end();) {
    const auto next = std::next(i);
    if (i->second->link == &link) {
      left.push_back(std::move(i->second));
      waiting_.erase(i);
    }
    i = next;
  }
  for (auto& operation : left) End(std::move(operation), why);
  for (const UcxCommand& command : link.queued) control_.Answer(command.id, why);
  link.queued.clear();
}

}  // namespace kvsummary
