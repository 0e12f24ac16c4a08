#include "server/ucx/source.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvsummary {
namespace {

// Shorter messages go with their header; longer ones are fetched by the receiver into their place.
constexpr std::int64_t kEagerBytes = 16384;

constexpr std::chrono::seconds kCloseTime{1};

}  // namespace

absl::Status UcxSource::Serve(UcxWorker& worker) {
  worker_ = &worker;
  return worker.SetHandler(kUcxFetchMessage, OnFetch, this);
}

void UcxSource::CloseAll() {
  std::vector<ucp_ep_h> all;
  for (const auto& [endpoint, peer] : peers_) all.push_back(endpoint);
  for (ucp_ep_h endpoint : all) ClosePeer(endpoint);
}

void UcxSource::Lend(const UcxCommand& command) {
  loans_[command.token].push_back({command.staging, command.from, command.bytes});
}

void UcxSource::Revoke(const UcxCommand& command, Time now) {
  loans_.erase(command.token);
  revocations_.push_back({command.id, command.token, now + deadline_});
}

void UcxSource::Pump(Time now) {
  std::vector<ucp_ep_h> closing;
  if (std::exchange(has_lost_, false)) {
    for (const auto& [endpoint, peer] : peers_) {
      if (peer.lost) closing.push_back(endpoint);
    }
  }
  for (const Revocation& r : revocations_) {
    if (r.deadline > now) break;
    for (const Send& send : sends_) {
      if (send.token == r.token) closing.push_back(send.endpoint);
    }
  }
  for (ucp_ep_h endpoint : closing) ClosePeer(endpoint);
  std::erase_if(revocations_, [&](const Revocation& r) {
    if (sends_of_token_.contains(r.token)) {
      // The last sends end a moment after their connection.
      if (r.deadline + kCloseTime < now) UcxFatal("sends go on after their connection has been closed");
      return false;
    }
    control_.Answer(r.id, absl::OkStatus());
    return true;
  });
}

UcxSource::Time UcxSource::NextDeadline() const {
  return revocations_.empty() ? Time::max() : revocations_.front().deadline;
}

void UcxSource::OnConnect(ucp_conn_request_h request, void* self) {
  auto& source = *static_cast<UcxSource*>(self);
  if (source.peers_.size() >= kMaxUcxPeers) {
    ucp_listener_reject(source.worker_->listener(), request);
    return;
  }
  ucp_ep_params_t parameters{};
  parameters.field_mask =
      UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  parameters.conn_request = request;
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler = {OnLost, self};
  ucp_ep_h endpoint = nullptr;
  if (ucp_ep_create(source.worker_->get(), &parameters, &endpoint) == UCS_OK) {
    source.peers_.emplace(endpoint, Peer());
  }
}

void UcxSource::OnLost(void* self, ucp_ep_h endpoint, ucs_status_t /*status*/) {
  auto& source = *static_cast<UcxSource*>(self);
  const auto found = source.peers_.find(endpoint);
  if (found == source.peers_.end()) return;
  found->second.lost = true;  // Pump closes it: not allowed here
  source.has_lost_ = true;
}

ucs_status_t UcxSource::OnFetch(void* self, const void* header, std::size_t header_bytes, void* /*data*/,
                                std::size_t /*bytes*/, const ucp_am_recv_param_t* parameters) {
  UcxFetchHeader fetch;
  if (header_bytes == sizeof(fetch) && (parameters->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0) {
    std::memcpy(&fetch, header, sizeof(fetch));
    static_cast<UcxSource*>(self)->Reply(fetch, parameters->reply_ep);
  }
  return UCS_OK;
}

absl::StatusCode UcxSource::Check(const UcxFetchHeader& fetch, const Peer& peer) const {
  const auto loan = loans_.find(fetch.token);
  if (loan == loans_.end()) return absl::StatusCode::kNotFound;
  const bool lent = std::any_of(loan->second.begin(), loan->second.end(), [&](const Range& r) {
    return fetch.staging == r.staging && fetch.bytes > 0 && fetch.bytes <= kMaxUcxFetchBytes &&
           fetch.bytes <= r.bytes && fetch.from >= r.from && fetch.from - r.from <= r.bytes - fetch.bytes;
  });
  if (!lent || staging_.Find(fetch.staging, fetch.from, fetch.bytes) == nullptr) {
    return absl::StatusCode::kOutOfRange;
  }
  return peer.sends < kMaxUcxSends ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted;
}

void UcxSource::Reply(const UcxFetchHeader& fetch, ucp_ep_h endpoint) {
  const auto peer = peers_.find(endpoint);
  if (peer == peers_.end() || peer->second.lost) return;
  const absl::StatusCode code = Check(fetch, peer->second);
  const bool granted = code == absl::StatusCode::kOk;
  // An answer that refuses is not a send of the token's ranges.
  Send& send = sends_.emplace_front(Send{
      this, granted ? fetch.token : 0, endpoint, {fetch.request, static_cast<std::int32_t>(code), 0}, {}});
  send.self = sends_.begin();
  ++peer->second.sends;
  if (granted) ++sends_of_token_[fetch.token];
  ucp_request_param_t parameters{};
  parameters.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  parameters.cb.send = OnSent;
  parameters.user_data = &send;
  parameters.flags = granted && fetch.bytes > kEagerBytes ? UCP_AM_SEND_FLAG_RNDV : 0;
  void* request = ucp_am_send_nbx(endpoint, kUcxChunkMessage, &send.header, sizeof(send.header),
                                  granted ? staging_.Find(fetch.staging, fetch.from, fetch.bytes) : nullptr,
                                  granted ? static_cast<std::size_t>(fetch.bytes) : 0, &parameters);
  if (!UCS_PTR_IS_PTR(request)) End(send);  // it has ended, well or not: no callback comes
}

void UcxSource::OnSent(void* request, ucs_status_t /*status*/, void* send) {
  ucp_request_free(request);
  const Send& ended = *static_cast<Send*>(send);
  ended.source->End(ended);
}

void UcxSource::End(const Send& send) {
  if (const auto peer = peers_.find(send.endpoint); peer != peers_.end()) --peer->second.sends;
  if (send.header.code == 0) {
    const auto count = sends_of_token_.find(send.token);
    if (--count->second == 0) sends_of_token_.erase(count);
  }
  sends_.erase(send.self);
}

void UcxSource::ClosePeer(ucp_ep_h endpoint) {
  if (peers_.erase(endpoint) != 0) worker_->Close(endpoint);
}

}  // namespace kvsummary
