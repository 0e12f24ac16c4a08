#include "server/session/references.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kHalfRowBytes = kRowBytes / 2;  // a row's key, or its z
constexpr std::uintptr_t kHostAlignment = sizeof(std::uint16_t);
constexpr std::uintptr_t kDeviceAlignment = 16;

// No sum of products of two non-negative 64-bit numbers that is formed here reaches 2^127.
using Wide = __int128;

absl::Status Outside(const std::string& field, const std::string& what) {
  return Refuse(Reason::BUFFER_RANGE, field, what);
}

absl::Status CheckAligned(const std::string& field, std::uintptr_t value, std::uintptr_t alignment) {
  if (value % alignment == 0) return absl::OkStatus();
  return Outside(field, absl::StrFormat("%s is not aligned to %d bytes", field, alignment));
}

// Where the keys, or the z, of rows begin.
absl::StatusOr<const std::uint16_t*> FindHalves(const Buffer& buffer, std::int64_t offset,
                                                const RowsPlace& place, std::int64_t layers,
                                                std::int64_t rows, std::uintptr_t alignment,
                                                const std::string& field) {
  if (offset < 0) return Outside(field, absl::StrFormat("%s = %d is negative", field, offset));
  const Wide end = rows == 0 ? Wide{offset}
                             : Wide{offset} + Wide{layers - 1} * place.layer_stride +
                                   Wide{rows - 1} * place.row_stride + kHalfRowBytes;
  if (end > buffer.bytes()) {
    return Outside(
        field,
        absl::StrFormat("%d layers of %d rows from %s = %d on, %d bytes from row to row and "
                        "%d from layer to layer, leave the buffer of %d bytes",
                        layers, rows, field, offset, place.row_stride, place.layer_stride, buffer.bytes()));
  }
  const char* first = buffer.data() + offset;
  if (auto s = CheckAligned(field, reinterpret_cast<std::uintptr_t>(first), alignment); !s.ok()) return s;
  return reinterpret_cast<const std::uint16_t*>(first);
}

absl::Status CheckHost(const Buffer& buffer, const std::string& field) {
  if (buffer.device().empty()) return absl::OkStatus();
  return Refuse(Reason::BUFFER_DEVICE, field,
                absl::StrFormat("%s needs memory of the host, not of %s", field, buffer.device()));
}

}  // namespace

absl::StatusOr<RowsView> FindRows(const Buffer& buffer, const RowsPlace& place, std::int64_t layers,
                                  std::int64_t rows) {
  const std::string row_field = "rows.reference.row_stride_bytes";
  const std::string layer_field = "rows.reference.layer_stride_bytes";
  if (place.row_stride < kHalfRowBytes || place.row_stride > kMaxRowStride) {
    return Outside(row_field, absl::StrFormat("%s = %d is not between %d and %d", row_field, place.row_stride,
                                              kHalfRowBytes, kMaxRowStride));
  }
  if (place.layer_stride < 0) {
    return Outside(layer_field, absl::StrFormat("%s = %d is negative", layer_field, place.layer_stride));
  }
  const auto alignment = buffer.device().empty() ? kHostAlignment : kDeviceAlignment;
  if (auto s = CheckAligned(row_field, static_cast<std::uintptr_t>(place.row_stride), alignment); !s.ok()) {
    return s;
  }
  if (auto s = CheckAligned(layer_field, static_cast<std::uintptr_t>(place.layer_stride), alignment);
      !s.ok()) {
    return s;
  }
  const auto key =
      FindHalves(buffer, place.key_offset, place, layers, rows, alignment, "rows.reference.key_offset_bytes");
  if (!key.ok()) return key.status();
  const auto z =
      FindHalves(buffer, place.z_offset, place, layers, rows, alignment, "rows.reference.z_offset_bytes");
  if (!z.ok()) return z.status();
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(std::uint16_t));
  const std::int64_t row = place.row_stride / kElement;
  const std::int64_t layer = place.layer_stride / kElement;
  return RowsView{*key, *z, row, row, layer, layer};
}

absl::StatusOr<const char*> FindArray(const Buffer& buffer, std::int64_t offset, std::int64_t count,
                                      std::int64_t size, const std::string& field) {
  if (auto s = CheckHost(buffer, field); !s.ok()) return s;
  if (offset < 0) return Outside(field, absl::StrFormat("offset_bytes = %d is negative", offset));
  if (count < 0 || count > kMaxArrayElements) {
    return Outside(field, absl::StrFormat("count = %d is not between 0 and %d", count, kMaxArrayElements));
  }
  if (Wide{offset} + Wide{count} * size > buffer.bytes()) {
    return Outside(field, absl::StrFormat("%d elements of %d bytes at byte %d leave the buffer of %d bytes",
                                          count, size, offset, buffer.bytes()));
  }
  const char* first = buffer.data() + offset;
  const auto address = reinterpret_cast<std::uintptr_t>(first);
  if (auto s = CheckAligned(field, address, static_cast<std::uintptr_t>(size)); !s.ok()) return s;
  return first;
}

absl::StatusOr<Counter> Counter::Find(std::shared_ptr<Buffer> buffer, std::int64_t offset,
                                      std::uint64_t value, const std::string& field) {
  const auto found = FindArray(*buffer, offset, 1, sizeof(std::uint64_t), field);
  if (!found.ok()) return found.status();
  auto* word = reinterpret_cast<std::uint64_t*>(buffer->data() + offset);
  return Counter(std::move(buffer), word, value);
}

bool Counter::Reached() const {
  return std::atomic_ref<std::uint64_t>(*word_).load(std::memory_order_acquire) >= value_;
}

void Counter::Set() const { std::atomic_ref<std::uint64_t>(*word_).store(value_, std::memory_order_release); }

}  // namespace kvsummary
