// References of updates into registered buffers: what a client sends as offsets, strides and counts becomes
// addresses here, and only what lies wholly inside the buffer does. Pure, and overflow is not possible.
//
// Everything wrong with an offset, a stride or a count is a BUFFER_RANGE with the field at fault; memory
// that is not the kind needed is a BUFFER_DEVICE.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/update.h"
#include "server/session/buffer.h"

namespace kvsummary {

// Most elements of an array by reference: twice the longest context. What is copied of a client's memory is
// bounded by this, not by how much it has registered.
inline constexpr std::int64_t kMaxArrayElements = std::int64_t{1} << 21;

// Largest row stride: what a strided copy to a CUDA device takes.
inline constexpr std::int64_t kMaxRowStride = 0x7fffffff;

// Where rows lie in a buffer; bytes, as in kvsummary/v1/update.proto.
struct RowsPlace {
  std::int64_t key_offset = 0;
  std::int64_t z_offset = 0;
  std::int64_t row_stride = 0;
  std::int64_t layer_stride = 0;
};

// The rows at `place`. The buffer is of the host or of a CUDA device, where kernels want 16-byte alignment.
// `layers` is positive, `rows` is not negative; of no rows nothing but the offsets has to be inside.
absl::StatusOr<RowsView> FindRows(const Buffer& buffer, const RowsPlace& place, std::int64_t layers,
                                  std::int64_t rows);

// Address of `count` elements of `size` bytes at `offset` of host memory. `field` is the reference's.
absl::StatusOr<const char*> FindArray(const Buffer& buffer, std::int64_t offset, std::int64_t count,
                                      std::int64_t size, const std::string& field);

// A copy of an array of host memory, which its owner may go on changing: check the copy, never the original.
template <typename T>
absl::StatusOr<std::vector<T>> CopyArray(const Buffer& buffer, std::int64_t offset, std::int64_t count,
                                         const std::string& field) {
  static_assert(std::is_integral_v<T>);
  const auto from = FindArray(buffer, offset, count, sizeof(T), field);
  if (!from.ok()) return from.status();
  const auto* first = reinterpret_cast<const T*>(*from);
  return std::vector<T>(first, first + count);
}

// A 64-bit counter that both processes see, and a value of it. Keeps its buffer.
class Counter {
 public:
  // `field` is the counter's.
  static absl::StatusOr<Counter> Find(std::shared_ptr<Buffer> buffer, std::int64_t offset,
                                      std::uint64_t value, const std::string& field);

  // Whether the counter is at its value or beyond; if so, all that its writer wrote before is visible.
  bool Reached() const;
  // Sets it to its value, after everything this thread wrote before.
  void Set() const;

 private:
  Counter(std::shared_ptr<Buffer> buffer, std::uint64_t* word, std::uint64_t value)
      : buffer_(std::move(buffer)), word_(word), value_(value) {}

  std::shared_ptr<Buffer> buffer_;
  std::uint64_t* word_;
  std::uint64_t value_;
};

}  // namespace kvsummary
