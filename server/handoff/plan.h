// The arithmetic of hand-offs: what is handed over of a request, how its bytes are cut into parts and chunks,
// and where they lie in a cache. Pure.
//
// A *part* is what an offer gains at once, as a dense array: [layers][regions][256] summaries,
// [layers][rows][1024] tail rows, or [blocks][unit_bytes] whole blocks of another group. It knows nothing of
// block sizes, strides or ring blocks: so the two caches may differ in them. A *chunk* is what travels at
// once, at most 1 MiB: a run of whole outer elements (layers or blocks), or a part of one.
//
// A request of n committed tokens has floor(n / 8) closed regions. One that resumes at position r needs the
// regions below floor(r / 8) and the rows of positions 8 * floor(r / 8) ... r - 1.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/copy.h"
#include "kernels/layout.h"

namespace kvsummary {

inline constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
inline constexpr int kMaxBackOff = 64;     // tokens
inline constexpr int kDefaultBackOff = 2;  // tokens
inline constexpr int kMaxOfferParts = 65536;

// Values as in kvsummary.v1.HandoffPartKind.
enum class PartKind { kSummaries = 1, kRows = 2, kBlocks = 3 };

struct Part {
  PartKind kind = PartKind::kSummaries;
  LayerSpan layers = {};                     // of kSummaries and kRows
  std::int64_t first = 0;                    // region or block, counted from the request's first
  std::int64_t count = 0;                    // regions, rows or blocks
  std::int64_t unit_bytes = 0;               // of one of them in one layer
  std::int32_t group = 0;                    // of kBlocks
  std::vector<std::int64_t> positions = {};  // of kRows: count of them, rising

  // The array is [outers][outer_bytes].
  std::int64_t outers() const { return kind == PartKind::kBlocks ? count : layers.count; }
  std::int64_t outer_bytes() const { return kind == PartKind::kBlocks ? unit_bytes : count * unit_bytes; }
  std::int64_t bytes() const { return outers() * outer_bytes(); }
};

// A contiguous piece of a part: bytes [begin, end) of each of `outers` outer elements from `outer` on. When
// there is more than one, it is whole.
struct Chunk {
  std::int64_t outer = 0;
  std::int64_t outers = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t offset(const Part& part) const { return outer * part.outer_bytes() + begin; }
  std::int64_t bytes() const { return outers * (end - begin); }
};

std::int64_t ChunkCount(const Part& part);
Chunk ChunkAt(const Part& part, std::int64_t index);
// All of it.
Chunk WholePart(const Part& part);

// Refuses a part that no offer of a cache of so many layers has: MESSAGE_MALFORMED. After it, sums and
// products of its fields do not overflow.
absl::Status CheckPart(const Part& part, std::int32_t layers);

// Positions whose rows go with a request: those that a resume position from n - back_off to n can need and a
// ring of `capacity` rows still holds when `highest_stored` has been written. Rising.
std::vector<std::int64_t> TailPositions(std::int64_t committed_tokens, std::int64_t back_off,
                                        std::int64_t highest_stored, std::int64_t capacity);
// Whether a request of n tokens can resume at r with the rows of these (rising) positions.
bool CanResume(std::int64_t resume, std::int64_t committed_tokens, std::span<const std::int64_t> positions);
// The position nearest to `resume` where it can; of two the lower. 0 always can.
std::int64_t NearestResume(std::int64_t resume, std::int64_t committed_tokens,
                           std::span<const std::int64_t> positions);

// What a consumer wants of an offer, besides all rows.
struct Wanted {
  struct Run {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  std::int64_t regions = 0;            // of every layer, from the first on
  std::map<std::int32_t, Run> blocks;  // by group
};
// Whether there is anything wanted in a chunk.
bool IsWanted(const Wanted& wanted, const Part& part, const Chunk& chunk);

// One movement between blocks of a cache and a dense array, as Device::MovePages wants it. Offsets of the
// dense views count from the array's first byte that moves at all.
struct PageMoves {
  std::vector<PageView> cache_views;
  std::vector<PageView> dense_views;
  std::vector<std::int64_t> cache_ids;
  std::vector<std::int64_t> dense_ids;
  std::int64_t cache_blocks = 0;  // of the cache's set: every id is below
  std::int64_t page_bytes = 0;
};

// Blocks of a request in a cache: ids[i] has its block first + i.
struct RequestBlocks {
  std::int64_t first = 0;
  std::span<const std::int64_t> ids;
};

// Where chunk `chunk` of a kSummaries part lies, but for its regions from `regions` on, whose bytes do not
// move. The blocks have all that do.
std::vector<PageMoves> MoveSummaries(const CacheGeometry& geometry, const RequestBlocks& blocks,
                                     const Part& part, const Chunk& chunk, std::int64_t regions);
// Of a kRows part: the rows of positions [from, to).
std::vector<PageMoves> MoveRows(const CacheGeometry& geometry, std::int64_t ring_block, const Part& part,
                                const Chunk& chunk, std::int64_t from, std::int64_t to);
// Of a kBlocks part, in a group's views of a cache of so many blocks: the blocks that `blocks` has and whose
// id is not negative.
std::vector<PageMoves> MoveBlocks(std::span<const PageView> views, std::int64_t cache_blocks,
                                  const RequestBlocks& blocks, const Part& part, const Chunk& chunk);

}  // namespace kvsummary
