// Pieces of memory as pages of one size, which kernels/copy.h moves in one launch: their largest common
// divisor cuts every piece into whole *granules*, numbered by their place in the memory.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/copy.h"
#include "server/device/device.h"

namespace kvsummary {

class Granules {
 public:
  // Offsets and bytes of the pieces must be multiples of kCudaMoveAlignment for a CUDA device; some of them
  // positive. The span's memory must outlive this.
  explicit Granules(std::span<const Piece> pieces);

  std::int64_t bytes() const { return bytes_; }  // of one; 0: the pieces have none
  // Granules that have not been taken by Next.
  std::int64_t left() const { return left_; }
  // The set of all granules of `memory_bytes` at `memory`, of which `view` becomes the only view; `view_at`
  // is its address for the kernel. Blocks are numbered from 1: block 0 would be the null block.
  PageSet Set(void* memory, std::int64_t memory_bytes, PageView& view, const PageView* view_at) const;
  // Writes the numbers of the next `count` (at most left()) granules, in the order of the pieces' bytes.
  void Next(std::int64_t count, std::int64_t* numbers);

 private:
  const std::span<const Piece> pieces_;
  std::int64_t bytes_ = 0;
  std::int64_t left_ = 0;
  std::size_t piece_ = 0;      // the piece of the next granule,
  std::int64_t in_piece_ = 0;  // and its number there
};

}  // namespace kvsummary
