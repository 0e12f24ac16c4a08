// One cache twice: in host memory, updated by the host kernels, and in device memory, updated by the CUDA
// kernels. After any steps every byte of both must be equal: pages, rings, the gaps between them, and
// guard zones on both sides of the cache.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/update.h"
#include "tests/gpu/device.h"

namespace kvsummary::gpu {

// splitmix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  // In [low, high].
  std::int64_t In(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(Next() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool OneIn(int n) { return In(1, n) == 1; }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

// Random bf16 values: normal with a spread for keys and one for z, and on request a NaN, an infinity, a
// subnormal or a huge value in one of 64 rows.
class RowSource {
 public:
  RowSource(double key_spread, double z_spread, bool specials, Random& random);
  void Fill(std::uint16_t* key, std::uint16_t* z, Random& random) const;

 private:
  using Table = std::array<std::uint16_t, 65536>;
  std::unique_ptr<Table> key_, z_;
  bool specials_;
};

enum class Kind { kDecode, kVerify, kPrefill };

// The index arrays of a step, in the shape of kernels/update.h.
struct Indices {
  Kind kind = Kind::kDecode;
  std::vector<std::int64_t> slots, positions, bases;          // a row each; verify has no positions
  std::vector<std::int32_t> query_start_loc = {0}, seq_lens;  // verify and prefill; verify

  std::int64_t closing = 0;  // live rows that close a region

  std::int32_t rows() const { return static_cast<std::int32_t>(slots.size()); }
  std::int32_t requests() const { return static_cast<std::int32_t>(query_start_loc.size()) - 1; }
  void Add(std::int64_t slot, std::int64_t position, std::int64_t base);
  void EndRequest(std::int32_t seq_len);
};

// How a step's rows lie in memory.
enum class Arrangement { kPacked, kSeparate, kWide };

class Twin {
 public:
  // Random first state. `rows` is the most that a step may bring.
  Twin(const CacheGeometry& geometry, int first_layer, int layers, std::int64_t rows, std::uint64_t seed);

  const CacheGeometry& geometry() const { return geometry_; }
  int layers() const { return layers_; }

  // Brings the step's rows and indices to both sides and updates both.
  void Apply(const Indices& indices, Arrangement arrangement, const RowSource& source, Random& random);
  // The parts of Apply, for captured graphs: Queue launches on arrays that Stage has laid at addresses
  // which depend only on the counts and the arrangement.
  void Stage(const Indices& indices, Arrangement arrangement, const RowSource& source, Random& random);
  void UpdateHost();
  void QueueDevice();

  const Stream& stream() const { return stream_; }
  unsigned long long host_skipped() const { return host_skipped_; }
  // Empty, or where the two sides differ.
  std::string Difference();
  // Empty, or where the device side has changed a byte that no update may change: a guard zone, a null
  // block, a gap. For steps whose effect on the rest is undefined.
  std::string DifferenceOutside();

 private:
  struct Staged {
    Kind kind;
    std::int32_t rows, requests;
    std::int64_t slots, positions, bases, query_start_loc, seq_lens;  // byte offsets in the image
    std::int64_t key, z;
    RowsView strides;  // no pointers
  };
  std::string Name(std::int64_t at) const;
  bool Writable(std::int64_t at) const;
  int Update(const UpdateKernels& kernels, const CacheView& view, const std::uint8_t* image,
             const Launch& launch) const;

  CacheGeometry geometry_;
  int first_layer_, layers_;
  Stream stream_;
  std::vector<std::uint8_t> host_, copy_;  // guard, cache, guard
  std::vector<std::uint8_t> image_;        // rows and indices of a step
  DeviceMemory device_, device_image_, device_skipped_;
  CacheView host_view_, device_view_;
  Staged staged_ = {};
  unsigned long long host_skipped_ = 0;
};

}  // namespace kvsummary::gpu
