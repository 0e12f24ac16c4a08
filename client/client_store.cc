// What Client asks about the page store.
#include <nlohmann/json.hpp>

#include "client/client_impl.h"
#include "client/unary_call.h"

namespace kvsummary {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using Json = nlohmann::ordered_json;

StoreStats FromProto(const v1::StoreStats& s) {
  StoreStats stats{.pages = s.pages(),
                   .namespaces = s.namespaces(),
                   .leases = s.leases(),
                   .lookups = s.lookups(),
                   .lookup_blocks = s.lookup_blocks(),
                   .hit_blocks = s.hit_blocks(),
                   .stored_pages = s.stored_pages(),
                   .present_pages = s.present_pages(),
                   .dropped_pages = s.dropped_pages(),
                   .loaded_pages = s.loaded_pages(),
                   .loaded_bytes = s.loaded_bytes(),
                   .bad_pages = s.bad_pages(),
                   .tiers = {}};
  for (const v1::StoreTier& t : s.tiers()) {
    stats.tiers.push_back({.name = t.name(),
                           .capacity_bytes = t.capacity_bytes(),
                           .pinned_bytes = t.pinned_bytes(),
                           .unpinned_bytes = t.unpinned_bytes(),
                           .free_bytes = t.free_bytes(),
                           .pages = t.pages(),
                           .evicted_pages = t.evicted_pages(),
                           .demoted_pages = t.demoted_pages(),
                           .promoted_pages = t.promoted_pages()});
  }
  return stats;
}

// Fields of the kinds that AdminService's answers have.
Json ToJson(const Message& message) {
  const auto& reflection = *message.GetReflection();
  Json json = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    Json& value = json[field->name()];
    if (field->is_repeated()) {
      value = Json::array();
      for (int n = 0; n < reflection.FieldSize(message, field); ++n) {
        value.push_back(ToJson(reflection.GetRepeatedMessage(message, field, n)));
      }
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      value = ToJson(reflection.GetMessage(message, field));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      value = reflection.GetString(message, field);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
      value = reflection.GetDouble(message, field);
    } else {
      value = reflection.GetInt64(message, field);
    }
  }
  return json;
}

}  // namespace

absl::StatusOr<std::vector<NamespaceUsage>> Client::ListNamespaces() {
  v1::ListNamespacesResponse response;
  const auto status = Call(impl_->options, impl_->prefixes, &v1::PrefixService::Stub::ListNamespaces,
                           v1::ListNamespacesRequest(), &response);
  if (!status.ok()) return status;
  std::vector<NamespaceUsage> namespaces;
  for (const v1::NamespaceInfo& info : response.namespaces()) {
    const v1::NamespaceIdentity& id = info.identity();
    namespaces.push_back({.id = info.namespace_id(),
                          .identity = {.model = id.model(),
                                       .layers = id.layers(),
                                       .block_size = id.block_size(),
                                       .layout_version = id.layout_version(),
                                       .salt = {},
                                       .shard_rank = id.shard_rank(),
                                       .shard_count = id.shard_count()},
                          .pages = info.pages(),
                          .used_bytes = info.used_bytes(),
                          .quota_bytes = info.quota_bytes()});
  }
  return namespaces;
}

absl::StatusOr<v1::GetStatsResponse> Client::Impl::GetStats() {
  v1::GetStatsResponse response;
  const auto status =
      Call(options, admin, &v1::AdminService::Stub::GetStats, v1::GetStatsRequest(), &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<StoreStats> Client::GetStoreStats() {
  const auto stats = impl_->GetStats();
  if (!stats.ok()) return stats.status();
  return FromProto(stats->store());
}

absl::StatusOr<std::string> Client::GetStatsJson() {
  const auto stats = impl_->GetStats();
  if (!stats.ok()) return stats.status();
  return ToJson(*stats).dump();
}

absl::StatusOr<CheckReport> Client::Check() {
  v1::CheckResponse response;
  const auto status =
      Call(impl_->options, impl_->admin, &v1::AdminService::Stub::Check, v1::CheckRequest(), &response);
  if (!status.ok()) return status;
  return CheckReport{.faults = {response.faults().begin(), response.faults().end()},
                     .store = FromProto(response.store())};
}

}  // namespace kvsummary
