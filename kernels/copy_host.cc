// HostPages(): page by page, view by view.
#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "kernels/copy.h"

namespace kvsummary {
namespace {

bool GoodViews(const PageMove& move) {
  std::int64_t left = move.page_bytes;
  for (int v = 0; v < move.view_count; ++v) {
    if (!GoodView(move, v, 1)) return false;
    left -= move.shape()[v].bytes;
    if (left < 0) return false;
  }
  return left == 0;
}

// Where view v of a block begins; in a buffer, where the page's bytes from `in_page` on do.
std::uint8_t* Begin(const PageEnd& end, int v, std::int64_t block, std::int64_t in_page,
                    std::int64_t page_bytes) {
  if (!end.views) return end.base + block * page_bytes + in_page;
  return end.base + end.views[v].offset + block * end.views[v].block_stride;
}

// Moves of so much do not stay in the processor's caches: they are written around them, which saves reading
// every line that is written. Smaller ones would be slower so.
constexpr std::int64_t kStreamedBytes = 16 << 20;
constexpr std::int64_t kStreamedRun = 256;  // shorter ones leave too many lines half written

constexpr std::size_t kVector = sizeof(__m128i);

// memcpy around the cache.
void Stream(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kVector);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kVector <= bytes; at += kVector) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  std::memcpy(to + at, from + at, bytes - at);
}

class Host final : public PageMover {
  int Move(const PageMove& move, const Launch& launch) const override {
    unsigned long long skipped = 0;
    if (GoodViews(move)) {
      const bool streamed = move.pages * move.page_bytes >= kStreamedBytes;
      for (std::int64_t page = 0; page < move.pages; ++page)
        skipped += MovePage(move, page, streamed) ? 0 : 1;
      if (streamed) _mm_sfence();  // whoever is told that the pages are there sees them
    } else {
      skipped = static_cast<unsigned long long>(move.pages);
    }
    if (launch.skipped) *launch.skipped += skipped;
    return 0;
  }

  // False for a bad page.
  static bool MovePage(const PageMove& move, std::int64_t page, bool streamed) {
    const std::int64_t from = move.from_block(page);
    const std::int64_t to = move.to_block(page);
    const PageState state = ClassifyPage(move, from, to);
    if (state != PageState::kLive) return state == PageState::kPadding;
    std::int64_t in_page = 0;
    for (int v = 0; v < move.view_count; ++v) {
      const std::int64_t bytes = move.shape()[v].bytes;
      std::uint8_t* const target = Begin(move.to, v, to, in_page, move.page_bytes);
      const std::uint8_t* const source = Begin(move.from, v, from, in_page, move.page_bytes);
      if (streamed && bytes >= kStreamedRun) {
        Stream(target, source, static_cast<std::size_t>(bytes));
      } else {
        std::memcpy(target, source, static_cast<std::size_t>(bytes));
      }
      in_page += bytes;
    }
    return true;
  }
};

}  // namespace

const PageMover& HostPages() {
  static const Host mover;
  return mover;
}

}  // namespace kvsummary
