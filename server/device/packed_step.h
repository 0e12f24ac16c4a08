// A step in one piece of memory: its arrays, each on a boundary of 256 bytes, and then its rows, packed. So
// one copy brings a whole step to a device, or several bring it part by part.
#pragma once

#include <cstdint>

#include "kernels/update.h"
#include "server/device/device.h"

namespace kvsummary {

class PackedStep {
 public:
  // Parts of the packed form begin and end at multiples of this.
  static constexpr std::int64_t kPartAlignment = kRowBytes;

  // Of rows in host memory for `layers` layers; `with_rows` false: they stay where they are, and only the
  // arrays are packed. What the step points to must outlive this.
  PackedStep(const Step& step, std::int64_t layers, bool with_rows);

  std::int64_t bytes() const { return rows_offset_ + layers_ * rows_ * kRowBytes; }
  std::int64_t rows_offset() const { return rows_offset_; }
  // Writes bytes [begin, end) of the packed form to `to`.
  void Write(std::int64_t begin, std::int64_t end, char* to) const;
  // The step with its arrays (and packed rows) in the packed form at `base`, which may be a device's address.
  Step At(const char* base) const;

 private:
  struct Array {
    const char* from;
    std::int64_t offset;
    std::int64_t bytes;
  };
  void WriteRows(std::int64_t first, std::int64_t count, char* to) const;

  const Step step_;
  Array arrays_[4];
  int array_count_ = 0;
  std::int64_t layers_ = 0;  // 0: without rows
  std::int64_t rows_ = 0;
  std::int64_t rows_offset_ = 0;
};

}  // namespace kvsummary
