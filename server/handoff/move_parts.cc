#include "server/handoff/move_parts.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

std::vector<PageMoves> PlanMoves(const PartPlace& place, const Part& part, const Chunk& chunk) {
  const CacheGeometry& g = place.cache->geometry();
  switch (part.kind) {
    case PartKind::kSummaries:
      return MoveSummaries(g, place.blocks, part, chunk, place.regions);
    case PartKind::kRows:
      return MoveRows(g, place.ring_block, part, chunk, place.rows_from, place.rows_to);
    case PartKind::kBlocks:
      break;
  }
  const auto group = place.groups.find(part.group);
  if (group == place.groups.end()) return {};
  const BoundCache::Group& bound = place.bound->groups[static_cast<std::size_t>(part.group)];
  return MoveBlocks(bound.views, place.bound->blocks, group->second, part, chunk);
}

PageSet SetOf(std::uint8_t* base, std::int64_t blocks, const std::vector<PageView>& views,
              std::int64_t page_bytes) {
  return {base, blocks, views.data(), static_cast<std::int32_t>(views.size()), page_bytes};
}

}  // namespace

absl::StatusOr<MovedPart> MovePart(Device& device, const PartPlace& place, const Part& part,
                                   const Chunk& chunk, char* dense, Toward toward) {
  if (auto s = place.cache->health(); !s.ok()) return s;
  auto* base = static_cast<std::uint8_t*>(place.cache->memory().data());
  if (part.kind == PartKind::kBlocks && place.groups.contains(part.group)) {
    base = place.bound->groups[static_cast<std::size_t>(part.group)].base;
  }
  MovedPart done;
  for (const PageMoves& move : PlanMoves(place, part, chunk)) {
    const PageSet cache = SetOf(base, move.cache_blocks, move.cache_views, move.page_bytes);
    const PageSet array = SetOf(reinterpret_cast<std::uint8_t*>(dense), move.dense_ids.back() + 1,
                                move.dense_views, move.page_bytes);
    const auto moved = toward == Toward::kDense
                           ? device.MovePages(cache, move.cache_ids, array, move.dense_ids)
                           : device.MovePages(array, move.dense_ids, cache, move.cache_ids);
    if (!moved.ok()) return moved.status();
    done.bytes += std::ssize(move.cache_ids) * move.page_bytes;
    done.time += *moved;
  }
  return done;
}

absl::Status CheckIds(std::span<const std::int64_t> ids, std::int64_t cache_blocks,
                      const std::string& field) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == 0) {
      return Refuse(Reason::NULL_BLOCK, absl::StrFormat("%s[%d]", field, i), "block 0 is the null block");
    }
    if (ids[i] < 0 || ids[i] >= cache_blocks) {
      return Refuse(Reason::BLOCK_OUT_OF_RANGE, absl::StrFormat("%s[%d]", field, i),
                    absl::StrFormat("block %d is not one of the cache's %d", ids[i], cache_blocks));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlocks(const CacheGeometry& geometry, const RequestBlocks& blocks, std::int64_t from,
                         std::int64_t to, const std::string& field) {
  if (auto s = CheckIds(blocks.ids, geometry.blocks, field); !s.ok()) return s;
  if (from >= to) return absl::OkStatus();
  const std::int64_t per_block = geometry.block_size / kRegionTokens;
  const std::int64_t first = from / per_block;
  const std::int64_t end = (to - 1) / per_block + 1;
  if (blocks.first < 0 || blocks.first > first || end - blocks.first > std::ssize(blocks.ids)) {
    return Refuse(Reason::SIZE_MISMATCH, field,
                  absl::StrFormat("%d blocks from block %d on; regions %d to %d are in blocks %d to %d",
                                  blocks.ids.size(), blocks.first, from, to - 1, first, end - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckRingBlock(const CacheGeometry& geometry, std::int64_t ring_block,
                            const std::string& field) {
  if (ring_block == 0) {
    return Refuse(Reason::NULL_RING_BLOCK, field, "ring block 0 is the null ring block");
  }
  if (ring_block < 0 || ring_block >= geometry.ring_blocks) {
    return Refuse(
        Reason::RING_OUT_OF_RANGE, field,
        absl::StrFormat("ring block %d is not one of the cache's %d", ring_block, geometry.ring_blocks));
  }
  return absl::OkStatus();
}

absl::Status CheckGroup(const BoundCache* bound, std::span<const GroupSpec> groups, std::int32_t group,
                        const std::string& field) {
  if (bound == nullptr) {
    return Refuse(Reason::FIELD_MISSING, "namespace_id", "groups are of a namespace: it is not named");
  }
  if (group < 0 || group >= std::ssize(groups)) {
    return Refuse(Reason::GROUP_OUT_OF_RANGE, field + ".group",
                  absl::StrFormat("group %d is not one of the namespace's %d", group, groups.size()));
  }
  if (groups[static_cast<std::size_t>(group)].kind == GroupKind::kRing) {
    return Refuse(Reason::RING_GROUP, field + ".group", "rows of rings are handed over as `ring`");
  }
  return absl::OkStatus();
}

}  // namespace kvsummary
