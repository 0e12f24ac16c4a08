#include "server/handoff/addition.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/handoff/move_parts.h"

namespace kvsummary {
namespace {

// Each plans a kind of parts, and notes in `planned` what there is with them.

absl::Status PlanSummaries(const CacheGeometry& geometry, const Addition& addition,
                           PlannedAddition& planned) {
  const LayerSpan& layers = addition.layers;
  if (layers.first < 0 || layers.count < 1 || layers.first > geometry.layers - layers.count) {
    return Refuse(Reason::LAYERS_OUT_OF_RANGE, "layers",
                  absl::StrFormat("layers %d + %d are not a range of the cache's %d", layers.first,
                                  layers.count, geometry.layers));
  }
  const std::int64_t n = addition.committed_tokens;
  if (n < 0 || n > kMaxIndex) {
    return Refuse(Reason::POSITION_OUT_OF_RANGE, "committed_tokens",
                  absl::StrFormat("committed_tokens is %d, not between 0 and 2^31 - 1", n));
  }
  auto& by_layer = planned.progress.regions;
  const std::int64_t before = by_layer[static_cast<std::size_t>(layers.first)];
  const std::int64_t regions = n / kRegionTokens;
  for (int l = layers.first; l < layers.first + layers.count; ++l) {
    std::int64_t& has = by_layer[static_cast<std::size_t>(l)];
    if (has != before || has > regions) {
      return Refuse(Reason::HANDOFF_INCOMPLETE, "committed_tokens",
                    absl::StrFormat("layer %d has %d regions so far: a part of %d regions needs layers of as "
                                    "many, at most its own (layer %d: %d)",
                                    l, has, regions, layers.first, before));
    }
    has = regions;
  }
  const RequestBlocks blocks{addition.first_block, addition.blocks};
  if (auto s = CheckBlocks(geometry, blocks, before, regions, "block_ids"); !s.ok()) return s;
  if (regions > before) {
    planned.parts.push_back({.kind = PartKind::kSummaries,
                             .layers = layers,
                             .first = before,
                             .count = regions - before,
                             .unit_bytes = kSummaryBytes});
  }
  return absl::OkStatus();
}

absl::Status PlanGroups(const OfferedCache& from, const Addition& addition, PlannedAddition& planned) {
  std::set<std::int32_t> named;
  for (std::size_t i = 0; i < addition.groups.size(); ++i) {
    const Addition::Group& group = addition.groups[i];
    const std::string field = absl::StrFormat("groups[%d]", i);
    if (auto s = CheckGroup(from.bound, from.groups, group.group, field); !s.ok()) return s;
    if (auto s = CheckIds(group.blocks, from.bound->blocks, field + ".block_ids"); !s.ok()) return s;
    std::int64_t& end = planned.progress.group_ends[group.group];
    if (group.first < end || group.first > kMaxIndex) {
      return Refuse(
          Reason::COUNT_OUT_OF_RANGE, field + ".first_block_index",
          absl::StrFormat("first_block_index is %d; the group has blocks up to %d", group.first, end));
    }
    if (!named.insert(group.group).second) {
      return Refuse(Reason::GROUP_OUT_OF_RANGE, field + ".group", "the group is named twice");
    }
    if (group.blocks.empty()) continue;
    end = group.first + std::ssize(group.blocks);
    planned.parts.push_back({.kind = PartKind::kBlocks,
                             .first = group.first,
                             .count = std::ssize(group.blocks),
                             .unit_bytes = from.groups[static_cast<std::size_t>(group.group)].bytes_per_block,
                             .group = group.group});
  }
  return absl::OkStatus();
}

absl::Status PlanTail(const OfferedCache& from, const Addition& addition, PlannedAddition& planned) {
  const CacheGeometry& geometry = from.geometry;
  const std::int64_t n = addition.committed_tokens;
  const auto& by_layer = planned.progress.regions;
  const auto short_of = std::find_if(by_layer.begin(), by_layer.end(),
                                     [&](std::int64_t has) { return has != n / kRegionTokens; });
  if (short_of != by_layer.end()) {
    return Refuse(Reason::HANDOFF_INCOMPLETE, "committed_tokens",
                  absl::StrFormat("layer %d has %d regions; the request's last part ends with %d",
                                  short_of - by_layer.begin(), *short_of, n / kRegionTokens));
  }
  const Addition::Tail& tail = *addition.tail;
  if (auto s = CheckRingBlock(geometry, tail.ring_block, "ring"); !s.ok()) return s;
  const std::int64_t highest = tail.highest_stored.value_or(std::max<std::int64_t>(0, n - 1 + geometry.k));
  if (highest < n - 1 || highest > kMaxIndex) {
    return Refuse(
        Reason::POSITION_OUT_OF_RANGE, "highest_stored_position",
        absl::StrFormat("highest_stored_position is %d, not between %d and 2^31 - 1", highest, n - 1));
  }
  planned.progress.complete = true;
  auto positions = TailPositions(n, from.back_off, highest, geometry.capacity);
  if (positions.empty()) return absl::OkStatus();
  const std::int64_t count = std::ssize(positions);
  planned.parts.push_back({.kind = PartKind::kRows,
                           .layers = {0, geometry.layers},
                           .count = count,
                           .unit_bytes = kRowBytes,
                           .positions = std::move(positions)});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PlannedAddition> PlanAddition(const OfferedCache& from, const Progress& so_far,
                                             const Addition& addition) {
  PlannedAddition planned{.parts = {}, .progress = so_far};
  if (auto s = PlanSummaries(from.geometry, addition, planned); !s.ok()) return s;
  if (auto s = PlanGroups(from, addition, planned); !s.ok()) return s;
  if (addition.tail) {
    if (auto s = PlanTail(from, addition, planned); !s.ok()) return s;
  }
  const std::int64_t parts = so_far.parts + std::ssize(planned.parts);
  if (parts > kMaxOfferParts) {
    return Refuse(Reason::HANDOFF_LIMIT, "",
                  absl::StrFormat("an offer has at most %d parts", kMaxOfferParts));
  }
  planned.progress.parts = static_cast<std::int32_t>(parts);
  return planned;
}

}  // namespace kvsummary
