#include "server/cache/cache.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
Cache::Cache(std::string name, std::uint64_t generation, CacheGeometry geometry, Device& device,
             std::shared_ptr<Segment> segment, std::uint64_t session)
    : name_(std::move(name)),
      generation_(generation),
      geometry_(geometry),
      device_(device),
      segment_(std::move(segment)),
      session_(session) {}

absl::Status Cache::health() const {
  if (!superseded_) return device_.health();
  return Refuse(
      Reason::GENERATION_STALE, "cache.generation",
      absl::StrFormat("cache \"%s\" has been taken over: generation %d is past", name_, generation_));
}

void Cache::OnDeleted(const void* key, std::function<void()> listener) {
  {
    const std::lock_guard lock(listeners_mutex_);
    if (!deleted_) {
      listeners_[key] = std::move(listener);
      return;
    }
  }
  listener();
}

void Cache::Forget(const void* key) {
  const std::lock_guard lock(listeners_mutex_);
  listeners_.erase(key);
}

void Cache::TellDeleted() {
  decltype(listeners_) listeners;
  {
    const std::lock_guard lock(listeners_mutex_);
    deleted_ = true;
    listeners.swap(listeners_);
  }
  for (const auto& [key, listener] : listeners) listener();
}

absl::Status Cache::Apply(LayerSpan layers, const Step& step, RowsIn rows_in) {
  if (auto s = health(); !s.ok()) return s;
  return device_.Apply(MakeView(geometry_, segment_->memory().data(), layers), step, rows_in);
}

absl::Status Cache::CopyOut(std::span<const Piece> pieces, char* host) {
  if (auto s = health(); !s.ok()) return s;
  return device_.CopyOut(segment_->memory(), pieces, host);
}

absl::Status Cache::CopyIn(std::span<const Piece> pieces, const char* host) {
  if (auto s = health(); !s.ok()) return s;
  return device_.CopyIn(segment_->memory(), pieces, host);
}

void AppendPagePieces(const CacheGeometry& g, std::int64_t block, LayerSpan layers,
                      std::vector<Piece>& pieces) {
  pieces.push_back({g.page_offset(block, layers.first), layers.count * g.page_bytes()});
}

void AppendTailPieces(const CacheGeometry& g, std::int64_t ring_block, LayerSpan layers,
                      std::vector<Piece>& pieces) {
  const std::int64_t tail_bytes = std::int64_t{g.capacity} * kRowBytes;
  if (g.rows_per_layer == g.capacity) {
    pieces.push_back({g.ring_row_offset(ring_block, layers.first, 0), layers.count * tail_bytes});
    return;
  }
  for (std::int32_t i = 0; i < layers.count; ++i) {
    pieces.push_back({g.ring_row_offset(ring_block, layers.first + i, 0), tail_bytes});
  }
}

}  // namespace kvsummary
