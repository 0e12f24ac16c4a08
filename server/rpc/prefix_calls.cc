#include "server/rpc/prefix_calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

static_assert(v1::GROUP_KIND_FULL == 1 + static_cast<int>(GroupKind::kFull) &&
              v1::GROUP_KIND_WINDOW == 1 + static_cast<int>(GroupKind::kWindow) &&
              v1::GROUP_KIND_RING == 1 + static_cast<int>(GroupKind::kRing));

NamespaceId IdOf(std::uint64_t id) { return static_cast<NamespaceId>(id); }

absl::StatusOr<GroupSpec> FromProto(const v1::PageGroup& group, int index) {
  if (group.kind() < v1::GROUP_KIND_FULL || group.kind() > v1::GROUP_KIND_RING) {
    return Refuse(Reason::GROUP_INVALID, absl::StrFormat("groups[%d].kind", index),
                  absl::StrFormat("kind %d is not FULL, WINDOW or RING", group.kind()));
  }
  return GroupSpec{.kind = static_cast<GroupKind>(group.kind() - 1),
                   .window_tokens = group.window_tokens(),
                   .lookahead_blocks = group.lookahead_blocks(),
                   .bytes_per_block = group.bytes_per_block()};
}

v1::PageGroup ToProto(const GroupSpec& group) {
  v1::PageGroup out;
  out.set_kind(static_cast<v1::GroupKind>(1 + static_cast<int>(group.kind)));
  out.set_window_tokens(group.window_tokens);
  out.set_lookahead_blocks(group.lookahead_blocks);
  out.set_bytes_per_block(group.bytes_per_block);
  return out;
}

// Everything that the session has in the store ends with it.
void ForgetAtEnd(const PrefixContext& context, Session& session) {
  session.OnEnd(&context.sessions,
                [&store = context.service.store, &sessions = context.sessions, number = session.number()] {
                  store.EndSession(number);
                  sessions.EndSession(number);
                });
}

// Builds the views of a BindCache request: checked to lie within their memory, the rest is the store's to
// check.
class ViewBuilder {
 public:
  ViewBuilder(const Session& session, const Cache& cache) : session_(session), cache_(cache) {
    bound_.device = &cache.device();
    bound_.blocks = cache.geometry().blocks;
    bound_.block_size = cache.geometry().block_size;
  }

  absl::Status Build(const std::vector<GroupSpec>& groups, const v1::BindCacheRequest& request) {
    bound_.groups.resize(groups.size());
    for (auto& group : bound_.groups) group.base = base();
    std::vector<bool> named(groups.size());
    for (int i = 0; i < request.groups_size(); ++i) {
      const v1::GroupViews& views = request.groups(i);
      const auto group = static_cast<std::size_t>(views.group());
      const std::string field = absl::StrFormat("groups[%d]", i);
      if (views.group() < 0 || group >= groups.size() || named[group]) {
        return Refuse(Reason::GROUP_OUT_OF_RANGE, field + ".group",
                      absl::StrFormat("group %d is named twice, or not one of the namespace's %d",
                                      views.group(), groups.size()));
      }
      named[group] = true;
      for (int v = 0; v < views.views_size(); ++v) {
        auto view = FindView(views.views(v), absl::StrFormat("%s.views[%d]", field, v));
        if (!view.ok()) return view.status();
        bound_.groups[group].views.push_back(*view);
      }
    }
    const CacheGeometry& g = cache_.geometry();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      if (named[group] || groups[group].kind == GroupKind::kRing) continue;
      bound_.groups[group].views = {{g.page_offset(0, 0), g.block_stride, g.dense_block_stride()}};
    }
    return absl::OkStatus();
  }

  BoundCache Take() { return std::move(bound_); }
  std::vector<std::weak_ptr<Buffer>> TakeBuffers() { return std::move(buffers_); }

 private:
  std::uint8_t* base() const { return static_cast<std::uint8_t*>(cache_.memory().data()); }

  // Offsets of the answer count from the cache's memory, whatever memory they are in.
  absl::StatusOr<PageView> FindView(const v1::BlockView& view, const std::string& field) {
    const std::uint8_t* memory = base();
    std::int64_t bytes = cache_.memory().bytes();
    if (view.buffer_id() != 0) {
      const auto buffer = session_.FindBuffer(view.buffer_id());
      if (!buffer.ok()) return AtField(buffer.status(), field + ".buffer_id");
      const std::string& of_cache = cache_.device().name();
      const std::string of_buffer = (*buffer)->device().empty() ? "host" : (*buffer)->device();
      if (of_buffer != of_cache) {
        return Refuse(Reason::BUFFER_DEVICE, field + ".buffer_id",
                      absl::StrFormat("the buffer is in memory of %s, the cache of %s", of_buffer, of_cache));
      }
      memory = reinterpret_cast<const std::uint8_t*>((*buffer)->data());
      bytes = (*buffer)->bytes();
      buffers_.push_back(*buffer);
    }
    const __int128 end = __int128{view.offset_bytes()} +
                         __int128{cache_.geometry().blocks - 1} * view.block_stride_bytes() +
                         view.bytes_per_block();
    if (view.offset_bytes() < 0 || view.block_stride_bytes() < 0 || view.bytes_per_block() < 0 ||
        end > bytes) {
      return Refuse(Reason::BUFFER_RANGE, field,
                    absl::StrFormat("%d blocks of %d bytes from byte %d on, %d bytes from block to block, "
                                    "leave the memory of %d bytes",
                                    cache_.geometry().blocks, view.bytes_per_block(), view.offset_bytes(),
                                    view.block_stride_bytes(), bytes));
    }
    const auto from_base = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory) -
                                                     reinterpret_cast<std::uintptr_t>(base()));
    return PageView{from_base + view.offset_bytes(), view.block_stride_bytes(), view.bytes_per_block()};
  }

  const Session& session_;
  const Cache& cache_;
  BoundCache bound_;
  std::vector<std::weak_ptr<Buffer>> buffers_;
};

absl::StatusOr<Device*> FindDevice(const CacheManager& caches, const std::string& name) {
  if (name.empty()) return &caches.default_device();
  for (const auto& device : caches.devices()) {
    if (device->name() == name) return device.get();
  }
  return Refuse(Reason::DEVICE_NOT_FOUND, "device", absl::StrFormat("there is no device \"%s\"", name));
}

absl::StatusOr<std::chrono::milliseconds> LeaseTime(std::int64_t milliseconds) {
  if (milliseconds >= 0) return std::chrono::milliseconds(milliseconds);
  return Refuse(Reason::COUNT_OUT_OF_RANGE, "lease_milliseconds",
                absl::StrFormat("lease_milliseconds is %d, negative", milliseconds));
}

}  // namespace

absl::Status DeclareNamespace(const PrefixContext& context, const v1::DeclareNamespaceRequest& request,
                              v1::DeclareNamespaceResponse& reply) {
  const auto session = context.service.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  const v1::NamespaceIdentity& id = request.identity();
  NamespaceSpec spec{.key = {.model = id.model(),
                             .layers = id.layers(),
                             .block_size = id.block_size(),
                             .layout_version = id.layout_version(),
                             .salt = id.salt(),
                             .rank = id.shard_rank(),
                             .shards = id.shard_count() == 0 ? 1 : id.shard_count()},
                     .hash_width = request.hash_width(),
                     .groups = {}};
  for (int i = 0; i < request.groups_size(); ++i) {
    const auto group = FromProto(request.groups(i), i);
    if (!group.ok()) return group.status();
    spec.groups.push_back(*group);
  }
  const std::uint64_t number = (*session)->number();
  const auto name_space = context.service.store.Declare(number, spec);
  if (!name_space.ok()) return name_space.status();
  context.sessions.Declare(number, *name_space, std::move(spec.groups));
  ForgetAtEnd(context, **session);
  reply.set_namespace_id(static_cast<std::uint64_t>(*name_space));
  return absl::OkStatus();
}

absl::Status BindCache(const PrefixContext& context, const v1::BindCacheRequest& request) {
  const auto session = context.service.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  const std::uint64_t number = (*session)->number();
  const NamespaceId name_space = IdOf(request.namespace_id());
  const auto groups = context.sessions.Groups(number, name_space);
  if (!groups.ok()) return groups.status();
  const auto cache =
      context.service.caches.FindMappable(request.cache().name(), request.cache().generation(), number);
  if (!cache.ok()) return cache.status();
  ViewBuilder builder(**session, **cache);
  if (auto s = builder.Build(*groups, request); !s.ok()) return s;
  auto views = context.service.store.Bind(number, name_space, builder.Take());
  if (!views.ok()) return views.status();
  return context.sessions.Bind(
      number, name_space, {.views = *std::move(views), .cache = *cache, .buffers = builder.TakeBuffers()});
}

absl::Status Lookup(const PrefixContext& context, const v1::LookupRequest& request,
                    v1::LookupResponse& reply) {
  const auto session = context.service.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  const auto device = FindDevice(context.service.caches, request.device());
  if (!device.ok()) return device.status();
  const auto lease = LeaseTime(request.lease_milliseconds());
  if (!lease.ok()) return lease.status();
  const auto hit = context.service.store.Lookup({.session = (*session)->number(),
                                                 .name_space = IdOf(request.namespace_id()),
                                                 .hashes = request.hashes(),
                                                 .device = *device,
                                                 .lease = *lease});
  if (!hit.ok()) return hit.status();
  reply.set_hit_blocks(hit->blocks);
  if (hit->blocks == 0) return absl::OkStatus();
  reply.set_lease_id(static_cast<std::uint64_t>(hit->lease));
  reply.set_lease_milliseconds(hit->lease_time.count());
  for (const GroupHit& group : hit->groups) {
    v1::GroupHit* out = reply.add_groups();
    out->set_group(group.group);
    out->set_first_block_index(group.first_block_index);
    out->set_device_pages(group.device_pages);
    out->set_host_pages(group.host_pages);
    out->set_other_device_pages(group.elsewhere_pages);
  }
  return absl::OkStatus();
}

absl::Status RenewLease(const PrefixContext& context, const v1::RenewLeaseRequest& request,
                        v1::RenewLeaseResponse& reply) {
  const auto session = context.service.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  const auto lease = LeaseTime(request.lease_milliseconds());
  if (!lease.ok()) return lease.status();
  const auto granted =
      context.service.store.Renew((*session)->number(), static_cast<LeaseId>(request.lease_id()), *lease);
  if (!granted.ok()) return granted.status();
  reply.set_lease_milliseconds(granted->count());
  return absl::OkStatus();
}

absl::Status ReleaseLease(const PrefixContext& context, const v1::ReleaseLeaseRequest& request) {
  const auto session = context.service.sessions.Find(request.session_id());
  if (!session.ok()) return session.status();
  context.service.store.Release((*session)->number(), static_cast<LeaseId>(request.lease_id()));
  return absl::OkStatus();
}

void ListNamespaces(const PrefixContext& context, v1::ListNamespacesResponse& reply) {
  for (const NamespaceUsage& usage : context.service.store.ListNamespaces()) {
    v1::NamespaceInfo* info = reply.add_namespaces();
    info->set_namespace_id(static_cast<std::uint64_t>(usage.id));
    const NamespaceKey& key = usage.spec.key;
    v1::NamespaceIdentity* identity = info->mutable_identity();
    identity->set_model(key.model);
    identity->set_layers(key.layers);
    identity->set_block_size(key.block_size);
    identity->set_layout_version(key.layout_version);
    identity->set_shard_rank(key.rank);
    identity->set_shard_count(key.shards);
    info->set_hash_width(usage.spec.hash_width);
    for (const GroupSpec& group : usage.spec.groups) *info->add_groups() = ToProto(group);
    info->set_pages(usage.pages);
    info->set_used_bytes(usage.used_bytes);
    info->set_quota_bytes(usage.quota_bytes);
    info->set_sessions(usage.sessions);
    info->set_next_sequence(usage.next_sequence);
  }
}

absl::StatusOr<std::shared_ptr<const BoundCache>> FindBound(const PrefixContext& context,
                                                            std::uint64_t session, NamespaceId name_space,
                                                            const v1::CacheRef& cache) {
  const auto found = context.service.caches.FindMappable(cache.name(), cache.generation(), session);
  if (!found.ok()) return found.status();
  return context.sessions.FindBound(session, name_space, *found);
}

PublishArgs ToArgs(const v1::PublishRequest& request) {
  PublishArgs args;
  args.name_space = IdOf(request.namespace_id());
  args.committed_tokens = request.committed_tokens();
  args.first_block_index = request.first_block_index();
  args.parent_hash = request.parent_hash();
  args.hashes = request.hashes();
  for (const v1::PublishGroup& group : request.groups()) {
    args.groups.push_back({group.group(), {group.block_ids().begin(), group.block_ids().end()}});
  }
  return args;
}

LoadArgs ToArgs(const v1::LoadRequest& request) {
  LoadArgs args;
  args.lease = static_cast<LeaseId>(request.lease_id());
  for (const v1::LoadGroup& group : request.groups()) {
    args.groups.push_back(
        {group.group(), group.first_block_index(), {group.block_ids().begin(), group.block_ids().end()}});
  }
  return args;
}

void FillReply(const PublishResult& result, v1::PublishResponse* reply) {
  reply->set_stored(result.stored);
  reply->set_present(result.present);
  reply->set_dropped(result.dropped);
}

void FillReply(const LoadResult& result, const v1::LoadRequest& request, v1::LoadResponse* reply) {
  reply->set_loaded(result.pages);
  reply->set_loaded_bytes(result.bytes);
  for (std::size_t i = 0; i < result.bad.size(); ++i) {
    if (result.bad[i].empty()) continue;
    const v1::LoadGroup& asked = request.groups(static_cast<int>(i));
    v1::LoadedGroup* group = reply->add_groups();
    group->set_group(asked.group());
    for (const std::int64_t index : result.bad[i]) {
      group->add_bad_block_indexes(asked.first_block_index() + index);
    }
  }
}

void FillStats(const StoreStats& stats, v1::StoreStats* out) {
  out->set_pages(stats.pages);
  out->set_namespaces(stats.namespaces);
  out->set_leases(stats.leases);
  out->set_lookups(stats.lookups);
  out->set_lookup_blocks(stats.lookup_blocks);
  out->set_hit_blocks(stats.hit_blocks);
  out->set_stored_pages(stats.published_pages);
  out->set_present_pages(stats.present_pages);
  out->set_dropped_pages(stats.dropped_pages);
  out->set_loaded_pages(stats.loaded_pages);
  out->set_loaded_bytes(stats.loaded_bytes);
  out->set_bad_pages(stats.bad_pages);
  for (const TierUsage& tier : stats.tiers) {
    v1::StoreTier* t = out->add_tiers();
    t->set_name(tier.name);
    t->set_capacity_bytes(tier.capacity_bytes);
    t->set_pinned_bytes(tier.pinned_bytes);
    t->set_unpinned_bytes(tier.unpinned_bytes);
    t->set_free_bytes(tier.free_bytes);
    t->set_pages(tier.pages);
    t->set_evicted_pages(tier.evicted_pages);
    t->set_demoted_pages(tier.demoted_pages);
    t->set_promoted_pages(tier.promoted_pages);
  }
}

}  // namespace kvsummary
