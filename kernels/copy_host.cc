// HostPages(): page by page, view by view.
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

class Host final : public PageMover {
  int Move(const PageMove& move, const Launch& launch) const override {
    unsigned long long skipped = 0;
    if (GoodViews(move)) {
      for (std::int64_t page = 0; page < move.pages; ++page) skipped += MovePage(move, page) ? 0 : 1;
    } else {
      skipped = static_cast<unsigned long long>(move.pages);
    }
    if (launch.skipped) *launch.skipped += skipped;
    return 0;
  }

  // False for a bad page.
  static bool MovePage(const PageMove& move, std::int64_t page) {
    const std::int64_t from = move.from_block(page);
    const std::int64_t to = move.to_block(page);
    const PageState state = ClassifyPage(move, from, to);
    if (state != PageState::kLive) return state == PageState::kPadding;
    std::int64_t in_page = 0;
    for (int v = 0; v < move.view_count; ++v) {
      const std::int64_t bytes = move.shape()[v].bytes;
      std::memcpy(Begin(move.to, v, to, in_page, move.page_bytes),
                  Begin(move.from, v, from, in_page, move.page_bytes), static_cast<std::size_t>(bytes));
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
