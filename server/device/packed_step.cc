#include "server/device/packed_step.h"

#include <algorithm>
#include <cstring>

namespace kvsummary {
namespace {

constexpr std::int64_t kArrayAlignment = 256;

std::int64_t Aligned(std::int64_t bytes, std::int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Calls f(array, count) for each array of a step, in the order in which they are packed.
template <typename F>
void ForEachArray(DecodeStep& s, const F& f) {
  f(s.slots, s.rows);
  f(s.positions, s.rows);
  f(s.ring_bases, s.rows);
}
template <typename F>
void ForEachArray(VerifyStep& s, const F& f) {
  f(s.slots, s.rows);
  f(s.query_start_loc, s.requests + 1);
  f(s.seq_lens, s.requests);
  f(s.ring_bases, s.rows);
}
template <typename F>
void ForEachArray(PrefillStep& s, const F& f) {
  f(s.slots, s.rows);
  f(s.positions, s.rows);
  f(s.query_start_loc, s.requests + 1);
  f(s.ring_bases, s.rows);
}

const RowsView& RowsOf(const Step& step) {
  return std::visit([](const auto& s) -> const RowsView& { return s.in; }, step);
}

}  // namespace

PackedStep::PackedStep(const Step& step, std::int64_t layers, bool with_rows) : step_(step) {
  Step copy = step;
  std::int64_t offset = 0;
  std::visit(
      [&](auto& s) {
        ForEachArray(s, [&](const auto* array, std::int64_t count) {
          const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(*array));
          arrays_[array_count_++] = {reinterpret_cast<const char*>(array), offset, bytes};
          offset = Aligned(offset + bytes, kArrayAlignment);
        });
        rows_ = s.rows;
      },
      copy);
  rows_offset_ = Aligned(offset, kPartAlignment);
  if (with_rows) layers_ = layers;
}

void PackedStep::Write(std::int64_t begin, std::int64_t end, char* to) const {
  for (int i = 0; i < array_count_; ++i) {
    const Array& a = arrays_[i];
    const std::int64_t first = std::max(begin, a.offset);
    const std::int64_t last = std::min(end, a.offset + a.bytes);
    if (first < last)
      std::memcpy(to + first - begin, a.from + first - a.offset, static_cast<std::size_t>(last - first));
  }
  const std::int64_t first = std::max(begin, rows_offset_);
  if (first < end)
    WriteRows((first - rows_offset_) / kRowBytes, (end - first) / kRowBytes, to + first - begin);
}

void PackedStep::WriteRows(std::int64_t first, std::int64_t count, char* to) const {
  const RowsView& in = RowsOf(step_);
  if (in.z == in.key + kChannels && in.key_stride == kRowElements && in.z_stride == kRowElements &&
      (layers_ == 1 ||
       (in.key_layer_stride == rows_ * kRowElements && in.z_layer_stride == in.key_layer_stride))) {
    std::memcpy(to, in.key + first * kRowElements, static_cast<std::size_t>(count * kRowBytes));
    return;
  }
  for (std::int64_t i = first; i < first + count; ++i, to += kRowBytes) {
    const std::int64_t layer = i / rows_;
    const std::int64_t row = i % rows_;
    std::memcpy(to, in.key + layer * in.key_layer_stride + row * in.key_stride, kRowBytes / 2);
    std::memcpy(to + kRowBytes / 2, in.z + layer * in.z_layer_stride + row * in.z_stride, kRowBytes / 2);
  }
}

Step PackedStep::At(const char* base) const {
  Step step = step_;
  std::visit(
      [&](auto& s) {
        int i = 0;
        ForEachArray(s, [&](auto& array, std::int64_t /*count*/) {
          array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + arrays_[i++].offset);
        });
        if (layers_ > 0) s.in = PackedRows(base + rows_offset_, rows_);
      },
      step);
  return step;
}

}  // namespace kvsummary
