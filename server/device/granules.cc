#include "server/device/granules.h"

#include <algorithm>
#include <numeric>

namespace kvsummary {
namespace {

// Large granules are cut by a power of two: several must fit into staging memory.
constexpr std::int64_t kMaxGranuleBytes = 1 << 18;

}  // namespace

Granules::Granules(std::span<const Piece> pieces) : pieces_(pieces) {
  std::int64_t total = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    bytes_ = std::gcd(std::gcd(bytes_, piece.bytes), piece.offset);
    total += piece.bytes;
  }
  if (bytes_ > kMaxGranuleBytes) bytes_ = std::gcd(bytes_, kMaxGranuleBytes);
  left_ = bytes_ == 0 ? 0 : total / bytes_;
}

PageSet Granules::Set(void* memory, std::int64_t memory_bytes, PageView& view,
                      const PageView* view_at) const {
  view = {.offset = 0, .block_stride = bytes_, .bytes = bytes_};
  return {.base = static_cast<std::uint8_t*>(memory) - bytes_,
          .blocks = memory_bytes / bytes_ + 1,
          .views = view_at,
          .view_count = 1,
          .page_bytes = bytes_};
}

void Granules::Next(std::int64_t count, std::int64_t* numbers) {
  left_ -= count;
  while (count > 0) {
    const Piece& piece = pieces_[piece_];
    const std::int64_t first = piece.offset / bytes_ + 1 + in_piece_;
    const std::int64_t take = std::min(count, piece.bytes / bytes_ - in_piece_);
    std::iota(numbers, numbers + take, first);
    numbers += take;
    count -= take;
    in_piece_ += take;
    if (in_piece_ == piece.bytes / bytes_) {
      ++piece_;
      in_piece_ = 0;
    }
  }
}

}  // namespace kvsummary
