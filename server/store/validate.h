// What can be said of arguments without the store's pages. Pure; refusals as page_store.h lists them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/types.h"

namespace kvsummary {

absl::Status CheckSpec(const NamespaceSpec& spec);
absl::Status CheckBound(const NamespaceSpec& spec, const BoundCache& cache);
// Of `hashes`: how many there are.
absl::StatusOr<std::int64_t> CountHashes(const NamespaceSpec& spec, std::string_view hashes);
absl::Status CheckPublish(const NamespaceSpec& spec, const PublishArgs& args);
// But for what the lease covers.
absl::Status CheckLoad(const NamespaceSpec& spec, const LoadArgs& args);

}  // namespace kvsummary
