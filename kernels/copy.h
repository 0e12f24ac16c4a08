// Movement of pages: between a cache and a contiguous buffer (gather, scatter) and from cache to cache. One
// interface for host and CUDA memory, one launch for any number of blocks and views.
//
// A *page* is all bytes of one block: the concatenation of its bytes in each view of a list. Views are data:
// an engine's own layout, K and V pages beside summaries and layer-major or block-major memory are the same
// to these functions.
//
//   const PageView views[] = {{0, 2048, 2048}, {v_offset, 65536, 65536}};  // summaries and V, 67,584 bytes
//   const PageSet cache = {.base = base, .blocks = 4096, .views = views, .view_count = 2,
//                          .page_bytes = 67584};
//   HostPages().Gather(cache, blocks, 3, buffer, {});  // 3 * 67,584 bytes into `buffer`
//
// What is moved. Page i of a call comes from or goes to block blocks[i]. A negative id is padding: nothing
// is moved. An id beyond the set's blocks, or of the null block 0 as a destination, is bad: its page is
// skipped and counted once. Source bytes are only read; in a destination only bytes of live pages are
// written, never gaps between views, and of a gather's buffer only live pages.
//
// Overlap. No byte may be written by a call that the same call also reads or writes elsewhere: a destination
// id at most once in a list, no view over another, and within one cache no block both source and destination.
// A call that breaks this leaves unspecified bytes in the overlap and none outside the destination.
//
// Failure. A call that no memory could obey (negative sizes, missing pointers, sets of different pages)
// returns kInvalidMove and does nothing. What only the arrays tell is checked where they lie: views of
// negative bytes, views whose bytes differ on the two sides or do not add up to page_bytes, and, on CUDA,
// any that are not multiples of 16 make the call move nothing and count every page as skipped.
#pragma once

#include <cstdint>

#include "kernels/layout.h"
#include "kernels/update.h"

namespace kvsummary {

inline constexpr int kInvalidMove = 1;     // the value of cudaErrorInvalidValue
inline constexpr int kMaxPageViews = 512;  // of one set
inline constexpr int kCudaMoveAlignment =
    16;  // of pointers, offsets, strides and bytes on CUDA; the host takes any

// A view of a cache's blocks: `bytes` of block b lie at base + offset + b * block_stride.
struct PageView {
  std::int64_t offset = 0;
  std::int64_t block_stride = 0;
  std::int64_t bytes = 0;  // of one block; 0 is legal
};

// A cache's blocks. `views` lies in the kernel's memory, as block ids do.
struct PageSet {
  std::uint8_t* base = nullptr;
  std::int64_t blocks = 0;  // null block included, at most kMaxIndex
  const PageView* views = nullptr;
  std::int32_t view_count = 0;  // at most kMaxPageViews
  std::int64_t page_bytes = 0;  // the sum of the views' bytes, at most kMaxIndex
};

// One end of a movement: blocks of a set, or a buffer of whole pages one after the other.
struct PageEnd {
  std::uint8_t* base = nullptr;
  const PageView* views = nullptr;       // null: a buffer
  const std::int64_t* blocks = nullptr;  // ids of the pages; null for a buffer
  std::int64_t block_count = 0;
};

// What an implementation is asked to do; at least one end has views.
struct PageMove {
  PageEnd from;
  PageEnd to;
  std::int64_t pages = 0;
  std::int64_t page_bytes = 0;
  std::int32_t view_count = 0;

  KVSUMMARY_HOST_DEVICE const PageView* shape() const { return from.views ? from.views : to.views; }
  KVSUMMARY_HOST_DEVICE std::int64_t from_block(std::int64_t page) const {
    return from.blocks ? from.blocks[page] : page;
  }
  KVSUMMARY_HOST_DEVICE std::int64_t to_block(std::int64_t page) const {
    return to.blocks ? to.blocks[page] : page;
  }
};

enum class PageState : std::uint8_t { kLive, kPadding, kBad };

// The state of a page that goes from block `from` to block `to` (of a buffer: the page's number).
KVSUMMARY_HOST_DEVICE inline PageState ClassifyPage(const PageMove& move, std::int64_t from,
                                                    std::int64_t to) {
  if (from < 0 || to < 0) return PageState::kPadding;
  const bool good = (!move.from.views || from < move.from.block_count) &&
                    (!move.to.views || (to > 0 && to < move.to.block_count));
  return good ? PageState::kLive : PageState::kBad;
}

// Whether view v of a move can be moved where addresses must be multiples of `alignment`.
KVSUMMARY_HOST_DEVICE inline bool GoodView(const PageMove& move, int v, std::int64_t alignment) {
  const std::int64_t bytes = move.shape()[v].bytes;
  std::int64_t bits = bytes;
  if (move.from.views) bits |= move.from.views[v].offset | move.from.views[v].block_stride;
  if (move.to.views) bits |= move.to.views[v].offset | move.to.views[v].block_stride;
  const bool same = !move.from.views || !move.to.views || move.to.views[v].bytes == bytes;
  return bytes >= 0 && bytes <= move.page_bytes && same && (bits & (alignment - 1)) == 0;
}

// One implementation. Stateless; every function may be called from any thread. Returns 0, kInvalidMove or a
// cudaError_t of the launch. A host call is complete on return. A CUDA call is queued on the stream, can be
// captured, and needs every pointer valid until the stream has passed it; the memory of either end may be
// another device's, or the host's, as long as the stream's device can address it. Of two devices the
// destination's is the one to call: a link carries reads a little faster than writes.
class PageMover {
 public:
  virtual ~PageMover() = default;

  // Blocks blocks[0..pages) of `from` into `buffer`, page after page.
  int Gather(const PageSet& from, const std::int64_t* blocks, std::int64_t pages, void* buffer,
             const Launch& launch) const;
  // The reverse.
  int Scatter(const void* buffer, const PageSet& to, const std::int64_t* blocks, std::int64_t pages,
              const Launch& launch) const;
  // Block from_blocks[i] of `from` to block to_blocks[i] of `to`. The sets have as many views, each of as
  // many bytes; offsets, strides and memory may differ.
  int Copy(const PageSet& from, const std::int64_t* from_blocks, const PageSet& to,
           const std::int64_t* to_blocks, std::int64_t pages, const Launch& launch) const;

 private:
  // `move` has pages and bytes, and pointers for both ends.
  virtual int Move(const PageMove& move, const Launch& launch) const = 0;
  int Checked(const PageMove& move, const Launch& launch) const;
};

const PageMover& HostPages();
const PageMover* CudaPages();  // null in a build without CUDA

}  // namespace kvsummary
