#include "server/cache/validate.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

std::string At(const char* array, std::size_t index) { return absl::StrCat(array, "[", index, "]"); }

absl::Status CheckLength(const char* field, std::size_t size, std::size_t want) {
  if (size == want) return absl::OkStatus();
  return Refuse(
      Reason::SIZE_MISMATCH, field,
      absl::StrFormat("%s has %d entries where the step's other arrays call for %d", field, size, want));
}

absl::Status CheckRowBytes(LayerSpan layers, std::size_t rows, std::size_t row_bytes) {
  // rows <= 2^31 (checked before) and layers < 2^31: no overflow in 64 bits unless both are absurd.
  const auto want =
      static_cast<unsigned __int128>(rows) * static_cast<std::uint32_t>(layers.count) * kRowBytes;
  if (want == row_bytes) return absl::OkStatus();
  return Refuse(
      Reason::SIZE_MISMATCH, "rows.inline",
      absl::StrFormat("%d bytes of rows, not %d layers * %d rows * 1024", row_bytes, layers.count, rows));
}

// The smallest index of a value that stands at a smaller index too. Values that rise, the common case,
// cost one pass.
std::optional<std::size_t> FirstRepeat(std::span<const std::int64_t> values) {
  if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end()) return {};
  absl::flat_hash_set<std::int64_t> seen;
  seen.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!seen.insert(values[i]).second) return i;
  }
  return {};
}

absl::Status CheckSlot(const CacheGeometry& g, std::int64_t slot, std::int64_t row) {
  if (slot >= g.blocks * g.block_size) {
    return Refuse(Reason::SLOT_OUT_OF_RANGE, At("slots", row),
                  absl::StrFormat("slot %d of row %d lies beyond the %d blocks of %d tokens", slot, row,
                                  g.blocks, g.block_size));
  }
  if (slot < g.block_size) {
    return Refuse(Reason::NULL_BLOCK, At("slots", row),
                  absl::StrFormat("slot %d of row %d lies in the null block", slot, row));
  }
  return absl::OkStatus();
}

absl::Status CheckRingBase(const CacheGeometry& g, std::int64_t base, std::int64_t row) {
  const std::int64_t per_block = g.rows_per_block();
  if (base % per_block != 0) {
    return Refuse(Reason::RING_BASE_MISALIGNED, At("ring_bases", row),
                  absl::StrFormat("ring base %d of row %d is not a multiple of rows_per_block = %d", base,
                                  row, per_block));
  }
  if (base / per_block >= g.ring_blocks) {
    return Refuse(Reason::RING_OUT_OF_RANGE, At("ring_bases", row),
                  absl::StrFormat("ring base %d of row %d lies beyond the %d ring blocks of %d rows", base,
                                  row, g.ring_blocks, per_block));
  }
  if (base == 0) {
    return Refuse(Reason::NULL_RING_BLOCK, At("ring_bases", row),
                  absl::StrFormat("the ring base of row %d is the null ring block's", row));
  }
  return absl::OkStatus();
}

absl::Status CheckPosition(std::int64_t position, std::int64_t slot, std::int64_t row) {
  if (position < 0 || position > kMaxIndex) {
    return Refuse(Reason::POSITION_OUT_OF_RANGE, At("positions", row),
                  absl::StrFormat("position %d of row %d is not between 0 and 2^31 - 1", position, row));
  }
  if (slot % kRegionTokens != position % kRegionTokens) {
    return Refuse(Reason::SLOT_POSITION_MISMATCH, At("slots", row),
                  absl::StrFormat("slot %d and position %d of row %d differ modulo 8", slot, position, row));
  }
  return absl::OkStatus();
}

bool Live(const StepArrays& a, std::size_t row) { return a.slots[row] >= 0 && a.ring_bases[row] >= 0; }

absl::Status CheckQueryStartLoc(const StepArrays& a) {
  const auto& loc = a.query_start_loc;
  const auto refuse = [](std::size_t index, const std::string& what) {
    return Refuse(Reason::QUERY_START_LOC_INVALID, At("query_start_loc", index), what);
  };
  if (loc.empty())
    return Refuse(Reason::QUERY_START_LOC_INVALID, "query_start_loc", "query_start_loc is empty");
  if (loc[0] != 0) return refuse(0, absl::StrFormat("query_start_loc starts at %d, not at 0", loc[0]));
  for (std::size_t i = 1; i < loc.size(); ++i) {
    if (loc[i] < loc[i - 1]) {
      return refuse(i, absl::StrFormat("query_start_loc falls from %d to %d", loc[i - 1], loc[i]));
    }
  }
  if (static_cast<std::size_t>(loc.back()) != a.slots.size()) {
    return refuse(loc.size() - 1, absl::StrFormat("query_start_loc ends at %d, not at the %d rows",
                                                  loc.back(), a.slots.size()));
  }
  return absl::OkStatus();
}

// Checks the rows of one request, [begin, end); `position` gives a row's position. Adds to `effect`, the
// live slots to `slots`, and the request's ring base to `bases` (with its row to `base_rows`).
class RequestChecker {
 public:
  RequestChecker(const CacheGeometry& geometry, const StepArrays& arrays)
      : geometry_(geometry), arrays_(arrays) {
    slots_.reserve(arrays.slots.size());
    slot_rows_.reserve(arrays.slots.size());
  }

  // The live rows must be one run of consecutive positions with one ring base.
  template <typename Position>
  absl::Status Add(std::size_t begin, std::size_t end, Position position) {
    std::optional<std::size_t> first;
    std::optional<std::size_t> last;
    for (std::size_t row = begin; row < end; ++row) {
      if (!Live(arrays_, row)) continue;
      const std::int64_t slot = arrays_.slots[row];
      const std::int64_t base = arrays_.ring_bases[row];
      const std::int64_t p = position(row);
      const auto index = static_cast<std::int64_t>(row);
      if (auto s = CheckSlot(geometry_, slot, index); !s.ok()) return s;
      if (!first) {
        if (auto s = CheckRingBase(geometry_, base, index); !s.ok()) return s;
        bases_.push_back(base);
        base_rows_.push_back(index);
      } else if (base != bases_.back()) {
        return Refuse(Reason::RING_BASE_DIFFERS, At("ring_bases", index),
                      absl::StrFormat("ring base %d of row %d, but %d of row %d of the same request", base,
                                      row, bases_.back(), *first));
      }
      if (auto s = CheckPosition(p, slot, index); !s.ok()) return s;
      if (last && *last + 1 != row) {
        return Refuse(
            Reason::PADDING_BETWEEN_ROWS, At("slots", static_cast<std::int64_t>(*last) + 1),
            absl::StrFormat("row %d is padding between rows %d and %d of a request", *last + 1, *last, row));
      }
      if (last && p != position(*last) + 1) {
        return Refuse(Reason::POSITIONS_NOT_CONSECUTIVE, At("positions", index),
                      absl::StrFormat("position %d of row %d follows position %d of the same request", p, row,
                                      position(*last)));
      }
      if (!first) first = row;
      last = row;
      slots_.push_back(slot);
      slot_rows_.push_back(index);
      ++effect_.rows;
      if (p % kRegionTokens == kRegionTokens - 1) ++effect_.regions_closed;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<StepEffect> Finish() const {
    if (const auto i = FirstRepeat(slots_)) {
      return Refuse(
          Reason::DUPLICATE_SLOT, At("slots", slot_rows_[*i]),
          absl::StrFormat("slot %d of row %d stands in an earlier row too", slots_[*i], slot_rows_[*i]));
    }
    if (const auto i = FirstRepeat(bases_)) {
      return Refuse(Reason::DUPLICATE_RING_BASE, At("ring_bases", base_rows_[*i]),
                    absl::StrFormat("ring base %d of row %d belongs to an earlier request of the step too",
                                    bases_[*i], base_rows_[*i]));
    }
    return effect_;
  }

 private:
  const CacheGeometry& geometry_;
  const StepArrays& arrays_;
  StepEffect effect_;
  std::vector<std::int64_t> slots_;
  std::vector<std::int64_t> slot_rows_;
  std::vector<std::int64_t> bases_;
  std::vector<std::int64_t> base_rows_;
};

// The kernels look at no ring base of a verify request but its first row's: a row that is padding by its
// own base alone would be live to them.
absl::Status CheckVerifyPadding(const StepArrays& a, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    if (a.slots[row] >= 0 && a.ring_bases[row] < 0 && a.ring_bases[begin] >= 0) {
      return Refuse(Reason::RING_BASE_DIFFERS, At("ring_bases", static_cast<std::int64_t>(row)),
                    absl::StrFormat("ring base %d of row %d, but %d of row %d of the same request",
                                    a.ring_bases[row], row, a.ring_bases[begin], begin));
    }
  }
  return absl::OkStatus();
}

// What all kinds have in common. `positions` is false for verify.
absl::Status CheckShapes(const CacheGeometry& g, LayerSpan layers, const StepArrays& a, bool positions,
                         std::size_t row_bytes) {
  if (auto s = CheckLayers(g, layers); !s.ok()) return s;
  const std::size_t rows = a.slots.size();
  if (rows > static_cast<std::size_t>(kMaxIndex)) {
    return Refuse(Reason::SIZE_MISMATCH, "slots", absl::StrFormat("%d rows exceed 2^31 - 1", rows));
  }
  if (positions) {
    if (auto s = CheckLength("positions", a.positions.size(), rows); !s.ok()) return s;
  }
  if (auto s = CheckLength("ring_bases", a.ring_bases.size(), rows); !s.ok()) return s;
  return CheckRowBytes(layers, rows, row_bytes);
}

absl::Status CheckIds(std::span<const std::int64_t> ids, std::int64_t count, Access access, const char* field,
                      Reason beyond, Reason null) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    if (ids[i] < 0 || ids[i] >= count) {
      return Refuse(beyond, At(field, index),
                    absl::StrFormat("%s[%d] is %d, not one of %d", field, index, ids[i], count));
    }
    if (ids[i] == 0 && access == Access::kWrite) {
      return Refuse(null, At(field, index), absl::StrFormat("%s[%d] is the null block", field, index));
    }
  }
  if (access == Access::kRead) return absl::OkStatus();
  if (const auto i = FirstRepeat(ids)) {
    return Refuse(Reason::DUPLICATE_BLOCK, At(field, static_cast<std::int64_t>(*i)),
                  absl::StrFormat("%s[%d] names %d again", field, *i, ids[*i]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLayers(const CacheGeometry& g, LayerSpan layers) {
  if (layers.first >= 0 && layers.count >= 1 && layers.count <= g.layers &&
      layers.first <= g.layers - layers.count) {
    return absl::OkStatus();
  }
  return Refuse(Reason::LAYERS_OUT_OF_RANGE, "layers",
                absl::StrFormat("layers %d to %d are not a range within the cache's %d", layers.first,
                                std::int64_t{layers.first} + layers.count - 1, g.layers));
}

absl::StatusOr<StepEffect> CheckDecode(const CacheGeometry& g, LayerSpan layers, const StepArrays& a,
                                       std::size_t row_bytes) {
  if (auto s = CheckShapes(g, layers, a, true, row_bytes); !s.ok()) return s;
  RequestChecker checker(g, a);
  for (std::size_t row = 0; row < a.slots.size(); ++row) {
    if (auto s = checker.Add(row, row + 1, [&](std::size_t r) { return a.positions[r]; }); !s.ok()) return s;
  }
  return checker.Finish();
}

absl::StatusOr<StepEffect> CheckVerify(const CacheGeometry& g, LayerSpan layers, const StepArrays& a,
                                       std::size_t row_bytes) {
  if (g.capacity < kMinVerifyCapacity) {
    return Refuse(
        Reason::VERIFY_CAPACITY, "cache",
        absl::StrFormat("verify needs a ring capacity of at least 8 rows; this cache has %d", g.capacity));
  }
  if (auto s = CheckShapes(g, layers, a, false, row_bytes); !s.ok()) return s;
  if (auto s = CheckQueryStartLoc(a); !s.ok()) return s;
  if (auto s = CheckLength("seq_lens", a.seq_lens.size(), a.query_start_loc.size() - 1); !s.ok()) return s;
  RequestChecker checker(g, a);
  for (std::size_t i = 0; i < a.seq_lens.size(); ++i) {
    const auto begin = static_cast<std::size_t>(a.query_start_loc[i]);
    const auto end = static_cast<std::size_t>(a.query_start_loc[i + 1]);
    const auto index = static_cast<std::int64_t>(i);
    const auto count = static_cast<std::int64_t>(end - begin);
    const auto all_padding = [&] {
      for (std::size_t row = begin; row < end; ++row) {
        if (Live(a, row)) return false;
      }
      return true;
    };
    if (all_padding()) {
      if (auto s = CheckVerifyPadding(a, begin, end); !s.ok()) return s;
      continue;
    }
    if (count > std::int64_t{g.k} + 1) {
      return Refuse(Reason::QUERY_TOO_LONG, At("query_start_loc", index + 1),
                    absl::StrFormat("request %d brings %d rows, above k + 1 = %d", i, count, g.k + 1));
    }
    if (a.seq_lens[i] < count) {
      return Refuse(Reason::SEQ_LEN_INVALID, At("seq_lens", index),
                    absl::StrFormat("request %d has seq_len %d, below its %d rows", i, a.seq_lens[i], count));
    }
    const auto position = [&](std::size_t row) {
      return std::int64_t{a.seq_lens[i]} - static_cast<std::int64_t>(end - row);
    };
    if (auto s = checker.Add(begin, end, position); !s.ok()) return s;
    // The request's ring base is its first row's, so that row must not be padding.
    if (!Live(a, begin)) {
      return Refuse(
          Reason::PADDING_BETWEEN_ROWS, At("slots", static_cast<std::int64_t>(begin)),
          absl::StrFormat("row %d, the first of request %d, is padding and a later one is not", begin, i));
    }
    if (auto s = CheckVerifyPadding(a, begin, end); !s.ok()) return s;
  }
  return checker.Finish();
}

absl::StatusOr<StepEffect> CheckPrefill(const CacheGeometry& g, LayerSpan layers, const StepArrays& a,
                                        std::size_t row_bytes) {
  if (auto s = CheckShapes(g, layers, a, true, row_bytes); !s.ok()) return s;
  if (auto s = CheckQueryStartLoc(a); !s.ok()) return s;
  RequestChecker checker(g, a);
  for (std::size_t i = 0; i + 1 < a.query_start_loc.size(); ++i) {
    const auto begin = static_cast<std::size_t>(a.query_start_loc[i]);
    const auto end = static_cast<std::size_t>(a.query_start_loc[i + 1]);
    if (auto s = checker.Add(begin, end, [&](std::size_t r) { return a.positions[r]; }); !s.ok()) return s;
  }
  return checker.Finish();
}

absl::Status CheckBlocks(const CacheGeometry& g, std::span<const std::int64_t> blocks, Access access) {
  return CheckIds(blocks, g.blocks, access, "blocks", Reason::BLOCK_OUT_OF_RANGE, Reason::NULL_BLOCK);
}

absl::Status CheckRingBlocks(const CacheGeometry& g, std::span<const std::int64_t> ring_blocks,
                             Access access) {
  return CheckIds(ring_blocks, g.ring_blocks, access, "ring_blocks", Reason::RING_OUT_OF_RANGE,
                  Reason::NULL_RING_BLOCK);
}

}  // namespace kvsummary
