#include "kernels/update_host.h"

#include <algorithm>
#include <cstring>

#include "kernels/update_avx2.h"

namespace kvsummary {
namespace {

constexpr int kLast = kRegionTokens - 1;

// One layer of a step: its input rows and its part of the cache.
class Layer {
 public:
  Layer(const CacheView& view, const RowsView& in, int layer)
      : view_(view),
        layer_(layer),
        in_(in),
        key_(in.key + layer * in.key_layer_stride),
        z_(in.z + layer * in.z_layer_stride) {}

  void StoreInRing(int row, std::int64_t base, std::int64_t position) const {
    std::uint16_t* to = view_.ring_row(layer_, base, position);
    std::memcpy(to, key_ + row * in_.key_stride, kRowBytes / 2);
    std::memcpy(to + kChannels, z_ + row * in_.z_stride, kRowBytes / 2);
  }

  // Closes the region whose last row, at `position`, is input row `row`. Its rows from input row
  // `first_input` on come from the inputs, those before them from the ring.
  void Close(CloseRegion close, int row, int first_input, std::int64_t base, std::int64_t position,
             std::int64_t slot) const {
    RegionRows rows;
    for (int t = 0; t < kRegionTokens; ++t) {
      const int source = row - kLast + t;
      if (source >= first_input) {
        rows.key[t] = key_ + source * in_.key_stride;
        rows.z[t] = z_ + source * in_.z_stride;
      } else {
        rows.key[t] = view_.ring_row(layer_, base, position - kLast + t);
        rows.z[t] = rows.key[t] + kChannels;
      }
    }
    close(rows, view_.summary(layer_, slot));
  }

 private:
  const CacheView& view_;
  const int layer_;
  const RowsView& in_;
  const std::uint16_t* const key_;
  const std::uint16_t* const z_;
};

// Classifies rows and counts the bad ones; they are skipped like padding.
class Rows {
 public:
  explicit Rows(const CacheView& view) : view_(view) {}

  bool Live(std::int64_t slot, std::int64_t position, std::int64_t base) {
    const RowState state = ClassifyRow(view_, slot, position, base);
    bad_ += state == RowState::kBad;
    return state == RowState::kLive;
  }
  // Whether rows start to end - 1 are a request's of a step of `rows` rows; a bad range counts as one.
  bool GoodRange(std::int32_t start, std::int32_t end, std::int32_t rows) {
    const bool good = 0 <= start && start <= end && end <= rows;
    bad_ += !good;
    return good;
  }
  void CountBadRequest() { ++bad_; }
  void Report(const Launch& launch) const {
    if (launch.skipped != nullptr) *launch.skipped += bad_;
  }

 private:
  const CacheView& view_;
  unsigned long long bad_ = 0;
};

bool Closes(std::int64_t position) { return position % kRegionTokens == kLast; }

}  // namespace

int HostUpdateKernels::Decode(const CacheView& view, const DecodeStep& step, const Launch& launch) const {
  Rows rows(view);
  for (int l = 0; l < view.layers; ++l) {
    const Layer layer(view, step.in, l);
    for (int r = 0; r < step.rows; ++r) {
      const std::int64_t slot = step.slots[r], position = step.positions[r], base = step.ring_bases[r];
      if (!rows.Live(slot, position, base)) continue;
      if (Closes(position)) {
        layer.Close(close_, r, r, base, position, slot);
      } else {
        layer.StoreInRing(r, base, position);
      }
    }
  }
  rows.Report(launch);
  return 0;
}

int HostUpdateKernels::Verify(const CacheView& view, const VerifyStep& step, const Launch& launch) const {
  Rows rows(view);
  for (int l = 0; l < view.layers; ++l) {
    const Layer layer(view, step.in, l);
    for (int i = 0; i < step.requests; ++i) {
      const std::int32_t start = step.query_start_loc[i], end = step.query_start_loc[i + 1];
      if (!rows.GoodRange(start, end, step.rows) || start == end) continue;
      const std::int64_t first_position = std::int64_t{step.seq_lens[i]} - (end - start);
      if (first_position < 0) {
        rows.CountBadRequest();
        continue;
      }
      const std::int64_t base = step.ring_bases[start];
      for (int r = start; r < end; ++r) {
        const std::int64_t position = first_position + (r - start);
        if (!rows.Live(step.slots[r], position, base)) continue;
        layer.StoreInRing(r, base, position);
        // All eight rows from the ring: a step of many rows has overwritten nothing that it still needs.
        if (Closes(position)) layer.Close(close_, r, r + 1, base, position, step.slots[r]);
      }
    }
  }
  rows.Report(launch);
  return 0;
}

int HostUpdateKernels::Prefill(const CacheView& view, const PrefillStep& step, const Launch& launch) const {
  Rows rows(view);
  for (int l = 0; l < view.layers; ++l) {
    const Layer layer(view, step.in, l);
    for (int i = 0; i < step.requests; ++i) {
      const std::int32_t start = step.query_start_loc[i], end = step.query_start_loc[i + 1];
      if (!rows.GoodRange(start, end, step.rows)) continue;
      std::int32_t first = end, last = start - 1;  // live rows
      for (int r = start; r < end; ++r) {
        const std::int64_t slot = step.slots[r], position = step.positions[r], base = step.ring_bases[r];
        if (!rows.Live(slot, position, base)) continue;
        first = std::min(first, r);
        last = r;
        if (Closes(position)) layer.Close(close_, r, first, base, position, slot);
      }
      // After every read of the ring. Of rows that share a ring row only the last is stored.
      for (std::int64_t r = std::max<std::int64_t>(first, std::int64_t{last} - view.capacity + 1); r <= last;
           ++r) {
        const std::int64_t base = step.ring_bases[r], position = step.positions[r];
        if (ClassifyRow(view, step.slots[r], position, base) == RowState::kLive) {
          layer.StoreInRing(static_cast<int>(r), base, position);
        }
      }
    }
  }
  rows.Report(launch);
  return 0;
}

const UpdateKernels& ScalarKernels() {
  static const HostUpdateKernels kernels("scalar", CloseRegionScalar);
  return kernels;
}

const UpdateKernels* Avx2Kernels() {
  static const HostUpdateKernels kernels("avx2", CloseRegionAvx2);
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return supported ? &kernels : nullptr;
}

const UpdateKernels& HostKernels() {
  const UpdateKernels* avx2 = Avx2Kernels();
  return avx2 != nullptr ? *avx2 : ScalarKernels();
}

}  // namespace kvsummary
