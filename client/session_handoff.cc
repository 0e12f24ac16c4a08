// The calls of hand-offs of ClientSession.
#include <algorithm>

#include "client/client_impl.h"
#include "client/session.h"
#include "client/unary_call.h"

namespace kvsummary {
namespace {

using Stub = v1::HandoffService::Stub;

static_assert(v1::HANDOFF_TRANSPORT_SAME_DAEMON == static_cast<int>(HandoffTransport::kSameDaemon) &&
              v1::HANDOFF_TRANSPORT_SAME_HOST == static_cast<int>(HandoffTransport::kSameHost) &&
              v1::HANDOFF_TRANSPORT_UCX == static_cast<int>(HandoffTransport::kUcx) &&
              v1::HANDOFF_TRANSPORT_GRPC == static_cast<int>(HandoffTransport::kGrpc));

void FillRef(const Cache& cache, v1::CacheRef* ref) {
  ref->set_name(cache.name);
  ref->set_generation(cache.generation);
}

// Of an Offer, an Append or an Accept.
template <typename Request>
void FillReady(const SharedCounter& counter, Request* request) {
  if (counter.buffer_id == 0) return;
  request->mutable_ready()->set_buffer_id(counter.buffer_id);
  request->mutable_ready()->set_offset_bytes(counter.offset_bytes);
  request->mutable_ready()->set_value(counter.value);
}

template <typename Request>
void FillGroups(std::span<const GroupBlocks> groups, Request* request) {
  for (const GroupBlocks& group : groups) {
    v1::HandoffGroup* to = request->add_groups();
    to->set_group(group.group);
    to->set_first_block_index(group.first_block_index);
    to->mutable_block_ids()->Add(group.blocks.begin(), group.blocks.end());
  }
}

template <typename Request>
void FillLayers(const std::optional<LayerSpan>& layers, Request* request) {
  if (!layers) return;
  request->mutable_layers()->set_first(layers->first);
  request->mutable_layers()->set_count(layers->count);
}

// Ring block 0 is nobody's: it says that there is none.
template <typename Request>
void FillRing(std::int64_t ring_block, Request* request) {
  if (ring_block != 0) request->mutable_ring()->set_block(ring_block);
}

// Of a request's blocks those that hold the regions which are closed at `tokens` and were not at `before`.
struct NeededBlocks {
  std::int64_t first = 0;
  std::span<const std::int64_t> blocks;
};
NeededBlocks Needed(std::span<const std::int64_t> blocks, const Cache& cache, std::int64_t before,
                    std::int64_t tokens) {
  const std::int64_t regions = cache.geometry.block_size / kRegionTokens;  // of a block
  const std::int64_t count = std::ssize(blocks);
  if (regions <= 0) return {0, blocks};  // the daemon judges a cache that makes no sense
  const std::int64_t closed = std::max<std::int64_t>(tokens, 0) / kRegionTokens;
  const std::int64_t known = std::clamp<std::int64_t>(before / kRegionTokens, 0, closed);
  const std::int64_t end = std::min((closed + regions - 1) / regions, count);
  const std::int64_t first = known == closed ? end : std::min(known / regions, end);
  return {first, blocks.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first))};
}

}  // namespace

const char* NameOf(HandoffTransport transport) {
  switch (transport) {
    case HandoffTransport::kSameDaemon:
      return "same daemon";
    case HandoffTransport::kSameHost:
      return "same host";
    case HandoffTransport::kUcx:
      return "UCX";
    case HandoffTransport::kGrpc:
      return "gRPC";
    case HandoffTransport::kUnspecified:
      break;
  }
  return "unknown";
}

absl::StatusOr<HandoffOffer> ClientSession::Offer(const Cache& cache, const OfferedRequest& offered) {
  v1::OfferRequest request;
  request.set_session_id(id());
  FillRef(cache, request.mutable_cache());
  request.set_request_id(offered.request_id);
  request.set_committed_tokens(offered.committed_tokens);
  const auto [first, blocks] = Needed(offered.blocks, cache, 0, offered.committed_tokens);
  request.mutable_block_ids()->Add(blocks.begin(), blocks.end());
  FillRing(offered.ring_block, &request);
  if (offered.highest_stored_position) {
    request.set_highest_stored_position(*offered.highest_stored_position);
  }
  if (offered.back_off_tokens) request.set_back_off_tokens(*offered.back_off_tokens);
  request.set_namespace_id(offered.namespace_id);
  FillGroups(offered.groups, &request);
  FillReady(offered.ready, &request);
  request.set_consumers(offered.consumers);
  request.set_detached(offered.detached);
  request.set_lifetime_milliseconds(offered.lifetime.count());
  request.set_more(offered.more);
  FillLayers(offered.layers, &request);
  v1::OfferResponse response;
  const auto status = Call(client().options, client().handoffs, &Stub::Offer, request, &response);
  if (!status.ok()) return status;
  return HandoffOffer{.handoff = response.handoff(),
                      .offer_id = response.offer_id(),
                      .lifetime = std::chrono::milliseconds(response.lifetime_milliseconds()),
                      .staged_bytes = response.staged_bytes()};
}

absl::StatusOr<std::int64_t> ClientSession::Append(const Cache& cache, std::uint64_t offer_id,
                                                   const AppendedPart& part) {
  v1::AppendRequest request;
  request.set_session_id(id());
  request.set_offer_id(offer_id);
  request.set_request_id(part.request_id);
  FillLayers(part.layers, &request);
  request.set_committed_tokens(part.committed_tokens);
  const auto [first, blocks] = Needed(part.blocks, cache, part.offered_tokens, part.committed_tokens);
  request.set_first_block_index(first);
  request.mutable_block_ids()->Add(blocks.begin(), blocks.end());
  FillGroups(part.groups, &request);
  FillReady(part.ready, &request);
  request.set_last(part.last);
  FillRing(part.ring_block, &request);
  if (part.highest_stored_position) request.set_highest_stored_position(*part.highest_stored_position);
  v1::AppendResponse response;
  const auto status = Call(client().options, client().handoffs, &Stub::Append, request, &response);
  if (!status.ok()) return status;
  return response.staged_bytes();
}

absl::StatusOr<AcceptResult> ClientSession::Accept(const Cache& cache, const std::string& handoff,
                                                   const AcceptedRequest& accepted) {
  v1::AcceptRequest request;
  request.set_session_id(id());
  request.set_handoff(handoff);
  FillRef(cache, request.mutable_cache());
  const auto [first, blocks] = Needed(accepted.blocks, cache, 0, accepted.resume_position);
  request.mutable_block_ids()->Add(blocks.begin(), blocks.end());
  FillRing(accepted.ring_block, &request);
  request.set_resume_position(accepted.resume_position);
  request.set_namespace_id(accepted.namespace_id);
  FillGroups(accepted.groups, &request);
  FillReady(accepted.ready, &request);
  request.set_transfer_id(accepted.transfer_id);
  v1::AcceptResponse response;
  const auto status = Call(client().options, client().handoffs, &Stub::Accept, request, &response);
  if (!status.ok()) return status;
  return AcceptResult{.transport = static_cast<HandoffTransport>(response.transport()),
                      .bytes = response.bytes(),
                      .committed_tokens = response.committed_tokens(),
                      .reconnects = response.reconnects(),
                      .damaged_chunks = response.damaged_chunks(),
                      .device_time = std::chrono::nanoseconds(response.device_nanoseconds())};
}

absl::Status ClientSession::CancelHandoff(std::uint64_t offer_id) {
  v1::CancelHandoffRequest request;
  request.set_session_id(id());
  request.set_offer_id(offer_id);
  v1::CancelHandoffResponse response;
  return Call(client().options, client().handoffs, &Stub::CancelHandoff, request, &response);
}

absl::Status Client::CancelHandoff(const std::string& handoff) {
  v1::CancelHandoffRequest request;
  request.set_handoff(handoff);
  v1::CancelHandoffResponse response;
  return Call(impl_->options, impl_->handoffs, &Stub::CancelHandoff, request, &response);
}

}  // namespace kvsummary
