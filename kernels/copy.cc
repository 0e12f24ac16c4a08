#include "kernels/copy.h"

namespace kvsummary {
namespace {

PageEnd BlocksOf(const PageSet& set, const std::int64_t* blocks) {
  return {set.base, set.views, blocks, set.blocks};
}

// A buffer's pages are numbered as they lie: it needs no ids.
PageEnd Buffer(const void* buffer) {
  return {static_cast<std::uint8_t*>(const_cast<void*>(buffer)), nullptr, nullptr, 0};
}

bool GoodEnd(const PageEnd& end) {
  return end.base != nullptr && (end.views == nullptr || end.blocks != nullptr) && end.block_count >= 0 &&
         end.block_count <= kMaxIndex;
}

bool GoodSet(const PageSet& set) {
  return set.view_count >= 0 && set.view_count <= kMaxPageViews && set.page_bytes >= 0 &&
         set.page_bytes <= kMaxIndex && (set.views != nullptr || set.view_count == 0);
}

}  // namespace

int PageMover::Checked(const PageMove& move, const Launch& launch) const {
  if (move.pages < 0 || move.pages > kMaxIndex) return kInvalidMove;
  if (move.pages == 0 || move.page_bytes == 0) return 0;
  if (move.view_count == 0 || !GoodEnd(move.from) || !GoodEnd(move.to)) return kInvalidMove;
  return Move(move, launch);
}

int PageMover::Gather(const PageSet& from, const std::int64_t* blocks, std::int64_t pages, void* buffer,
                      const Launch& launch) const {
  if (!GoodSet(from)) return kInvalidMove;
  return Checked({BlocksOf(from, blocks), Buffer(buffer), pages, from.page_bytes, from.view_count}, launch);
}

int PageMover::Scatter(const void* buffer, const PageSet& to, const std::int64_t* blocks, std::int64_t pages,
                       const Launch& launch) const {
  if (!GoodSet(to)) return kInvalidMove;
  return Checked({Buffer(buffer), BlocksOf(to, blocks), pages, to.page_bytes, to.view_count}, launch);
}

int PageMover::Copy(const PageSet& from, const std::int64_t* from_blocks, const PageSet& to,
                    const std::int64_t* to_blocks, std::int64_t pages, const Launch& launch) const {
  if (!GoodSet(from) || !GoodSet(to) || from.view_count != to.view_count || from.page_bytes != to.page_bytes)
    return kInvalidMove;
  return Checked(
      {BlocksOf(from, from_blocks), BlocksOf(to, to_blocks), pages, from.page_bytes, from.view_count},
      launch);
}

}  // namespace kvsummary
