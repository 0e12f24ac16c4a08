// The store's calls of ClientSession.
#include <utility>

#include "client/client_impl.h"
#include "client/session.h"
#include "client/status.h"
#include "client/unary_call.h"

namespace kvsummary {
namespace {

using Stub = v1::PrefixService::Stub;

void FillRef(const Cache& cache, v1::CacheRef* ref) {
  ref->set_name(cache.name);
  ref->set_generation(cache.generation);
}

void FillCounter(const SharedCounter& counter, v1::CounterValue* value) {
  value->set_buffer_id(counter.buffer_id);
  value->set_offset_bytes(counter.offset_bytes);
  value->set_value(counter.value);
}

void FillBlocks(std::span<const std::int64_t> from, google::protobuf::RepeatedField<std::int64_t>* to) {
  to->Add(from.begin(), from.end());
}

StoreEvent FromProto(const v1::WatchEventsResponse& message) {
  StoreEvent event;
  event.sequence = message.sequence();
  const auto pages = [&event](StoreEvent::Kind kind, const v1::PageEvent& from) {
    event.kind = kind;
    event.group = from.group();
    event.hashes = from.hashes();
    event.parent_hash = from.parent_hash();
    event.first_block_index = from.first_block_index();
  };
  switch (message.event_case()) {
    case v1::WatchEventsResponse::kStored:
      pages(StoreEvent::Kind::kStored, message.stored());
      break;
    case v1::WatchEventsResponse::kRemoved:
      pages(StoreEvent::Kind::kRemoved, message.removed());
      break;
    case v1::WatchEventsResponse::kGap:
      event.kind = StoreEvent::Kind::kGap;
      event.gap_from = message.gap().from_sequence();
      event.gap_to = message.gap().to_sequence();
      break;
    case v1::WatchEventsResponse::EVENT_NOT_SET:
      break;
  }
  return event;
}

}  // namespace

absl::StatusOr<std::uint64_t> ClientSession::DeclareNamespace(const Namespace& declared) {
  v1::DeclareNamespaceRequest request;
  request.set_session_id(id());
  v1::NamespaceIdentity* identity = request.mutable_identity();
  identity->set_model(declared.identity.model);
  identity->set_layers(declared.identity.layers);
  identity->set_block_size(declared.identity.block_size);
  identity->set_layout_version(declared.identity.layout_version);
  identity->set_salt(declared.identity.salt);
  identity->set_shard_rank(declared.identity.shard_rank);
  identity->set_shard_count(declared.identity.shard_count);
  request.set_hash_width(declared.hash_width);
  for (const PageGroup& group : declared.groups) {
    v1::PageGroup* to = request.add_groups();
    to->set_kind(static_cast<v1::GroupKind>(group.kind));
    to->set_window_tokens(group.window_tokens);
    to->set_lookahead_blocks(group.lookahead_blocks);
    to->set_bytes_per_block(group.bytes_per_block);
  }
  v1::DeclareNamespaceResponse response;
  const auto status = Call(client().options, client().prefixes, &Stub::DeclareNamespace, request, &response);
  if (!status.ok()) return status;
  return response.namespace_id();
}

absl::Status ClientSession::BindCache(const Cache& cache, std::uint64_t namespace_id,
                                      std::span<const GroupViews> groups) {
  v1::BindCacheRequest request;
  request.set_session_id(id());
  FillRef(cache, request.mutable_cache());
  request.set_namespace_id(namespace_id);
  for (const GroupViews& group : groups) {
    v1::GroupViews* to = request.add_groups();
    to->set_group(group.group);
    for (const BlockView& view : group.views) {
      v1::BlockView* v = to->add_views();
      v->set_buffer_id(view.buffer_id);
      v->set_offset_bytes(view.offset_bytes);
      v->set_block_stride_bytes(view.block_stride_bytes);
      v->set_bytes_per_block(view.bytes_per_block);
    }
  }
  v1::BindCacheResponse response;
  return Call(client().options, client().prefixes, &Stub::BindCache, request, &response);
}

absl::StatusOr<PublishResult> ClientSession::Publish(const Cache& cache, std::uint64_t namespace_id,
                                                     const PublishBlocks& blocks) {
  v1::PublishRequest request;
  request.set_session_id(id());
  FillRef(cache, request.mutable_cache());
  request.set_namespace_id(namespace_id);
  request.set_request_id(blocks.request_id);
  request.set_committed_tokens(blocks.committed_tokens);
  request.set_first_block_index(blocks.first_block_index);
  request.set_parent_hash(blocks.parent_hash.data(), blocks.parent_hash.size());
  request.set_hashes(blocks.hashes.data(), blocks.hashes.size());
  for (const GroupBlocks& group : blocks.groups) {
    v1::PublishGroup* to = request.add_groups();
    to->set_group(group.group);
    FillBlocks(group.blocks, to->mutable_block_ids());
  }
  if (blocks.ready.buffer_id != 0) FillCounter(blocks.ready, request.mutable_ready());
  v1::PublishResponse response;
  const auto status = Call(client().options, client().prefixes, &Stub::Publish, request, &response);
  if (!status.ok()) return status;
  return PublishResult{
      .stored = response.stored(), .present = response.present(), .dropped = response.dropped()};
}

absl::StatusOr<PrefixHit> ClientSession::Lookup(std::uint64_t namespace_id, std::string_view hashes,
                                                const std::string& device, std::chrono::milliseconds lease) {
  v1::LookupRequest request;
  request.set_session_id(id());
  request.set_namespace_id(namespace_id);
  request.set_hashes(hashes.data(), hashes.size());
  request.set_device(device);
  request.set_lease_milliseconds(lease.count());
  v1::LookupResponse response;
  const auto status = Call(client().options, client().prefixes, &Stub::Lookup, request, &response);
  if (!status.ok()) return status;
  PrefixHit hit{.hit_blocks = response.hit_blocks(),
                .lease_id = response.lease_id(),
                .lease_milliseconds = response.lease_milliseconds(),
                .groups = {}};
  for (const v1::GroupHit& group : response.groups()) {
    hit.groups.push_back({.group = group.group(),
                          .first_block_index = group.first_block_index(),
                          .device_pages = group.device_pages(),
                          .host_pages = group.host_pages(),
                          .other_device_pages = group.other_device_pages()});
  }
  return hit;
}

absl::StatusOr<LoadResult> ClientSession::Load(const Cache& cache, std::uint64_t namespace_id,
                                               const LoadBlocks& blocks) {
  v1::LoadRequest request;
  request.set_session_id(id());
  request.set_namespace_id(namespace_id);
  request.set_lease_id(blocks.lease_id);
  FillRef(cache, request.mutable_cache());
  for (const GroupBlocks& group : blocks.groups) {
    v1::LoadGroup* to = request.add_groups();
    to->set_group(group.group);
    to->set_first_block_index(group.first_block_index);
    FillBlocks(group.blocks, to->mutable_block_ids());
  }
  if (blocks.ready.buffer_id != 0) FillCounter(blocks.ready, request.mutable_ready());
  if (blocks.done.buffer_id != 0) FillCounter(blocks.done, request.mutable_done());
  v1::LoadResponse response;
  const auto status = Call(client().options, client().prefixes, &Stub::Load, request, &response);
  if (!status.ok()) return status;
  LoadResult result{.loaded = response.loaded(), .loaded_bytes = response.loaded_bytes(), .bad = {}};
  for (const v1::LoadedGroup& group : response.groups()) {
    result.bad.push_back(
        {group.group(), {group.bad_block_indexes().begin(), group.bad_block_indexes().end()}});
  }
  return result;
}

absl::StatusOr<std::chrono::milliseconds> ClientSession::RenewLease(std::uint64_t lease_id,
                                                                    std::chrono::milliseconds lease) {
  v1::RenewLeaseRequest request;
  request.set_session_id(id());
  request.set_lease_id(lease_id);
  request.set_lease_milliseconds(lease.count());
  v1::RenewLeaseResponse response;
  const auto status = Call(client().options, client().prefixes, &Stub::RenewLease, request, &response);
  if (!status.ok()) return status;
  return std::chrono::milliseconds(response.lease_milliseconds());
}

absl::Status ClientSession::ReleaseLease(std::uint64_t lease_id) {
  v1::ReleaseLeaseRequest request;
  request.set_session_id(id());
  request.set_lease_id(lease_id);
  v1::ReleaseLeaseResponse response;
  return Call(client().options, client().prefixes, &Stub::ReleaseLease, request, &response);
}

struct EventWatch::Impl {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>> stream;
  bool ended = false;
};

EventWatch::EventWatch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EventWatch::~EventWatch() {
  Cancel();
  while (Next().ok()) {
  }
}

absl::StatusOr<StoreEvent> EventWatch::Next() {
  if (impl_->ended) return absl::OutOfRangeError("the stream has ended");
  v1::WatchEventsResponse message;
  if (impl_->stream->Read(&message)) return FromProto(message);
  impl_->ended = true;
  const auto status = FromGrpc(impl_->stream->Finish());
  return status.ok() ? absl::OutOfRangeError("the daemon has ended the stream") : status;
}

void EventWatch::Cancel() { impl_->context.TryCancel(); }

std::unique_ptr<EventWatch> ClientSession::WatchEvents(std::uint64_t namespace_id,
                                                       std::uint64_t from_sequence) {
  v1::WatchEventsRequest request;
  request.set_session_id(id());
  request.set_namespace_id(namespace_id);
  request.set_from_sequence(from_sequence);
  auto impl = std::make_unique<EventWatch::Impl>();
  impl->stream = client().prefixes.WatchEvents(&impl->context, request);
  return std::unique_ptr<EventWatch>(new EventWatch(std::move(impl)));
}

}  // namespace kvsummary
