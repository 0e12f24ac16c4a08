#include "server/rpc/handoff_calls.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/rpc/prefix_calls.h"

namespace kvsummary {
namespace {

// The ring block that a place names.
absl::StatusOr<std::int64_t> RingBlock(const CacheGeometry& geometry, bool present,
                                       const v1::RingPlace& ring) {
  if (!present || ring.place_case() == v1::RingPlace::PLACE_NOT_SET) {
    return Refuse(Reason::FIELD_MISSING, "ring", "the request's ring block is not named");
  }
  if (ring.place_case() == v1::RingPlace::kBlock) return ring.block();
  if (ring.base() % geometry.rows_per_block() != 0) {
    return Refuse(
        Reason::RING_BASE_MISALIGNED, "ring.base",
        absl::StrFormat("ring base %d is not a multiple of %d rows", ring.base(), geometry.rows_per_block()));
  }
  return ring.base() / geometry.rows_per_block();
}

std::vector<Addition::Group> ToGroups(const google::protobuf::RepeatedPtrField<v1::HandoffGroup>& groups) {
  std::vector<Addition::Group> out;
  for (const v1::HandoffGroup& group : groups) {
    out.push_back(
        {group.group(), group.first_block_index(), {group.block_ids().begin(), group.block_ids().end()}});
  }
  return out;
}

LayerSpan ToLayers(bool present, const v1::LayerRange& layers, const CacheGeometry& geometry) {
  if (!present) return {0, geometry.layers};
  return {layers.first(), layers.count()};
}

template <typename Request>
absl::StatusOr<std::optional<Addition::Tail>> ToTail(const Request& request, bool last,
                                                     const CacheGeometry& geometry) {
  if (!last) {
    if (request.has_ring() || request.has_highest_stored_position()) {
      return Refuse(Reason::FIELD_MISSING, request.has_ring() ? "ring" : "highest_stored_position",
                    "it is of the last part alone");
    }
    return std::nullopt;
  }
  const auto block = RingBlock(geometry, request.has_ring(), request.ring());
  if (!block.ok()) return block.status();
  Addition::Tail tail{.ring_block = *block};
  if (request.has_highest_stored_position()) tail.highest_stored = request.highest_stored_position();
  return tail;
}

// The cache, which the session or the operator must have, and what it is bound to.
struct Bound {
  std::shared_ptr<Cache> cache;
  std::shared_ptr<const BoundCache> bound;
  std::vector<GroupSpec> specs;
};

template <typename Request>
absl::StatusOr<Bound> FindCache(const ServiceContext& context, const Session& session,
                                const Request& request) {
  Bound found;
  const std::uint64_t number = session.number();
  auto cache = context.caches.FindMappable(request.cache().name(), request.cache().generation(), number);
  if (!cache.ok()) return cache.status();
  found.cache = *std::move(cache);
  if (request.namespace_id() == 0) return found;
  const auto name_space = static_cast<NamespaceId>(request.namespace_id());
  auto specs = context.prefixes.Groups(number, name_space);
  if (!specs.ok()) return specs.status();
  found.specs = *std::move(specs);
  auto bound = FindBound({context, context.prefixes}, number, name_space, request.cache());
  if (!bound.ok()) return bound.status();
  found.bound = *std::move(bound);
  return found;
}

}  // namespace

absl::StatusOr<Offers::OpenArgs> ToOpenArgs(const ServiceContext& context, const Session& session,
                                            const v1::OfferRequest& request) {
  auto found = FindCache(context, session, request);
  if (!found.ok()) return found.status();
  const CacheGeometry& g = found->cache->geometry();
  if (!request.more() && request.has_layers()) {
    return Refuse(Reason::LAYERS_OUT_OF_RANGE, "layers", "layers are named only with `more`");
  }
  auto tail = ToTail(request, !request.more(), g);
  if (!tail.ok()) return tail.status();
  Offers::OpenArgs args;
  args.session = session.number();
  args.cache = std::move(found->cache);
  args.bound = std::move(found->bound);
  args.group_specs = std::move(found->specs);
  args.consumers = request.consumers() == 0 ? 1 : request.consumers();
  args.detached = request.detached();
  args.lifetime = std::chrono::milliseconds(request.lifetime_milliseconds());
  if (request.has_back_off_tokens()) args.back_off = request.back_off_tokens();
  args.part = {.layers = ToLayers(request.has_layers(), request.layers(), g),
               .committed_tokens = request.committed_tokens(),
               .blocks = {request.block_ids().begin(), request.block_ids().end()},
               .groups = ToGroups(request.groups()),
               .tail = *std::move(tail)};
  return args;
}

absl::StatusOr<Addition> ToPartArgs(const ServiceContext& context, std::uint64_t session,
                                    const v1::AppendRequest& request) {
  const auto geometry = context.offers.GeometryOf(session, request.offer_id());
  if (!geometry.ok()) return geometry.status();
  auto tail = ToTail(request, request.last(), *geometry);
  if (!tail.ok()) return tail.status();
  return Addition{.layers = ToLayers(request.has_layers(), request.layers(), *geometry),
                  .committed_tokens = request.committed_tokens(),
                  .first_block = request.first_block_index(),
                  .blocks = {request.block_ids().begin(), request.block_ids().end()},
                  .groups = ToGroups(request.groups()),
                  .tail = *std::move(tail)};
}

absl::StatusOr<AcceptTarget> ToTarget(const ServiceContext& context, const Session& session,
                                      const v1::AcceptRequest& request) {
  auto found = FindCache(context, session, request);
  if (!found.ok()) return found.status();
  const auto ring = RingBlock(found->cache->geometry(), request.has_ring(), request.ring());
  if (!ring.ok()) return ring.status();
  AcceptTarget target{.cache = std::move(found->cache),
                      .blocks = {request.block_ids().begin(), request.block_ids().end()},
                      .ring_block = *ring,
                      .resume = request.resume_position(),
                      .bound = std::move(found->bound),
                      .group_specs = std::move(found->specs)};
  for (Addition::Group& group : ToGroups(request.groups())) {
    target.groups.push_back({group.group, group.first, std::move(group.blocks)});
  }
  if (auto s = Acceptance::Check(target); !s.ok()) return s;
  return target;
}

absl::Status CheckFits(const Handoff& handoff, const AcceptTarget& target) {
  const std::int32_t layers = target.cache->geometry().layers;
  if (handoff.layers != layers) {
    return Refuse(Reason::GEOMETRY_DIFFERS, "cache",
                  absl::StrFormat("the offer is of %d layers, the cache has %d", handoff.layers, layers));
  }
  if (handoff.committed_tokens >= 0 && target.resume > handoff.committed_tokens) {
    return Refuse(Reason::RESUME_OUT_OF_RANGE, "resume_position",
                  absl::StrFormat("the request has %d committed tokens: it cannot resume at %d",
                                  handoff.committed_tokens, target.resume));
  }
  return absl::OkStatus();
}

absl::Status CancelHandoff(const ServiceContext& context, const v1::CancelHandoffRequest& request) {
  if (request.handoff().empty()) {
    const auto session = context.sessions.NumberOf(request.session_id());
    if (!session.ok()) return session.status();
    context.offers.Cancel(*session, request.offer_id());
    return absl::OkStatus();
  }
  const auto handoff = ParseHandoff(request.handoff());
  if (!handoff.ok()) return handoff.status();
  if (handoff->instance != context.handoff.instance) {
    return Refuse(Reason::HANDOFF_NOT_FOUND, "handoff", "the hand-off is another daemon's");
  }
  context.offers.Cancel(handoff->secret);
  return absl::OkStatus();
}

void FillStats(const ServiceContext& context, v1::HandoffStats* out) {
  const Offers::Stats offers = context.offers.stats();
  const Stats& stats = context.stats;
  out->set_offers(offers.offers);
  out->set_staged_bytes(offers.staged_bytes);
  out->set_offered(offers.offered);
  out->set_completed(offers.completed);
  out->set_expired(offers.expired);
  out->set_cancelled(offers.cancelled);
  out->set_accepted(stats.handoffs_accepted);
  out->set_failed(stats.handoffs_failed);
  out->set_same_daemon_bytes(stats.handoff_same_daemon_bytes);
  out->set_same_host_bytes(stats.handoff_same_host_bytes);
  out->set_ucx_bytes(stats.handoff_ucx_bytes);
  out->set_grpc_bytes(stats.handoff_grpc_bytes);
  out->set_sent_bytes(stats.handoff_sent_bytes);
  out->set_damaged_chunks(stats.handoff_damaged_chunks);
  out->set_reconnects(stats.handoff_reconnects);
}

}  // namespace kvsummary
