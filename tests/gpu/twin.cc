#include "tests/gpu/twin.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numbers>

namespace kvsummary::gpu {
namespace {

constexpr std::int64_t kGuardBytes = 64 << 10;
constexpr std::int64_t kWideElements = 1536;  // a wide matrix row: something, key, something, z, something
constexpr std::int64_t kWideKey = 256, kWideZ = 1024;

std::uint16_t ToBf16(double x) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::int64_t RowsBytes(std::int64_t rows, std::int64_t layers, Arrangement a) {
  return rows * layers * (a == Arrangement::kWide ? 2 * kWideElements : kRowBytes);
}

}  // namespace

RowSource::RowSource(double key_spread, double z_spread, bool specials, Random& random)
    : key_(std::make_unique<Table>()), z_(std::make_unique<Table>()), specials_(specials) {
  const auto fill = [&random](Table& table, double spread) {
    for (auto& value : table) {
      const double radius = std::sqrt(-2.0 * std::log(1.0 - random.Uniform()));
      value = ToBf16(spread * radius * std::cos(2.0 * std::numbers::pi * random.Uniform()));
    }
  };
  fill(*key_, key_spread);
  fill(*z_, z_spread);
}

void RowSource::Fill(std::uint16_t* key, std::uint16_t* z, Random& random) const {
  for (int i = 0; i < kChannels; i += 2) {
    const std::uint64_t bits = random.Next();
    key[i] = (*key_)[bits & 0xffff];
    key[i + 1] = (*key_)[bits >> 16 & 0xffff];
    z[i] = (*z_)[bits >> 32 & 0xffff];
    z[i + 1] = (*z_)[bits >> 48];
  }
  if (!specials_ || !random.OneIn(64)) return;
  constexpr std::uint16_t kSpecials[] = {0x7fc0, 0xffc1, 0x7f80, 0xff80, 0x0001,
                                         0x8003, 0x7f7f, 0xff7f, 0x8000};
  std::uint16_t* row = random.OneIn(2) ? key : z;
  row[random.In(0, kChannels - 1)] = kSpecials[random.In(0, std::size(kSpecials) - 1)];
  if (random.OneIn(4)) std::fill(z, z + kChannels, 0xff80);  // a whole row of -infinity
}

void Indices::Add(std::int64_t slot, std::int64_t position, std::int64_t base) {
  slots.push_back(slot);
  positions.push_back(position);
  bases.push_back(base);
  if (slot >= 0 && base >= 0 && position % kRegionTokens == kRegionTokens - 1) ++closing;
}
void Indices::EndRequest(std::int32_t seq_len) {
  query_start_loc.push_back(rows());
  seq_lens.push_back(seq_len);
}

Twin::Twin(const CacheGeometry& geometry, int first_layer, int layers, std::int64_t rows, std::uint64_t seed)
    : geometry_(geometry),
      first_layer_(first_layer),
      layers_(layers),
      host_(static_cast<std::size_t>(geometry.total_bytes() + 2 * kGuardBytes)),
      copy_(host_.size()),
      device_(host_.size()),
      device_image_(static_cast<std::size_t>(RowsBytes(rows, layers, Arrangement::kWide) + rows * 40 + 4096)),
      device_skipped_(sizeof(unsigned long long)),
      host_view_(MakeView(geometry_, host_.data() + kGuardBytes, {first_layer, layers})),
      device_view_(MakeView(geometry_, static_cast<std::uint8_t*>(device_.get()) + kGuardBytes,
                            {first_layer, layers})) {
  Random random(seed);
  for (std::size_t i = 0; i + 8 <= host_.size(); i += 8) {
    const std::uint64_t bits = random.Next();
    std::memcpy(&host_[i], &bits, 8);
  }
  device_.Upload(host_.data(), host_.size(), stream_);
  device_skipped_.Upload(&host_skipped_, sizeof(host_skipped_), stream_);
}

void Twin::Stage(const Indices& x, Arrangement arrangement, const RowSource& source, Random& random) {
  Staged s = {};
  s.kind = x.kind;
  s.rows = x.rows();
  s.requests = x.requests();
  const std::int64_t rows = x.rows();
  switch (arrangement) {
    case Arrangement::kPacked:
      s.strides = PackedRows(nullptr, rows);
      s.z = kChannels * 2;
      break;
    case Arrangement::kSeparate:
      s.strides = {nullptr, nullptr, kChannels, kChannels, rows * kChannels, rows * kChannels};
      s.z = layers_ * rows * kChannels * 2;
      break;
    case Arrangement::kWide:
      s.strides = {nullptr,       nullptr,      layers_ * kWideElements, layers_ * kWideElements,
                   kWideElements, kWideElements};
      s.key = kWideKey * 2;
      s.z = kWideZ * 2;
      break;
  }
  std::int64_t end = RowsBytes(rows, layers_, arrangement);
  const auto place = [&end](std::int64_t bytes) {
    const std::int64_t at = end;
    end += (bytes + 15) / 16 * 16;
    return at;
  };
  s.slots = place(rows * 8);
  s.positions = place(rows * 8);
  s.bases = place(rows * 8);
  s.query_start_loc = place((s.requests + 1) * 4);
  s.seq_lens = place(s.requests * 4);
  image_.resize(static_cast<std::size_t>(end));

  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto row = [&](std::int64_t offset, std::int64_t stride, std::int64_t layer_stride) {
        return reinterpret_cast<std::uint16_t*>(image_.data() + offset) + r * stride + layer * layer_stride;
      };
      source.Fill(row(s.key, s.strides.key_stride, s.strides.key_layer_stride),
                  row(s.z, s.strides.z_stride, s.strides.z_layer_stride), random);
    }
  }
  const auto copy = [this](std::int64_t at, const auto& v) {
    if (!v.empty()) std::memcpy(image_.data() + at, v.data(), v.size() * sizeof(v[0]));
  };
  copy(s.slots, x.slots);
  copy(s.positions, x.positions);
  copy(s.bases, x.bases);
  copy(s.query_start_loc, x.query_start_loc);
  copy(s.seq_lens, x.seq_lens);
  staged_ = s;
  device_image_.Upload(image_.data(), image_.size(), stream_);
}

int Twin::Update(const UpdateKernels& kernels, const CacheView& view, const std::uint8_t* image,
                 const Launch& launch) const {
  const auto longs = [image](std::int64_t at) { return reinterpret_cast<const std::int64_t*>(image + at); };
  const auto ints = [image](std::int64_t at) { return reinterpret_cast<const std::int32_t*>(image + at); };
  const Staged& s = staged_;
  RowsView in = s.strides;
  in.key = reinterpret_cast<const std::uint16_t*>(image + s.key);
  in.z = reinterpret_cast<const std::uint16_t*>(image + s.z);
  switch (s.kind) {
    case Kind::kDecode:
      return kernels.Decode(view, {s.rows, in, longs(s.slots), longs(s.positions), longs(s.bases)}, launch);
    case Kind::kVerify:
      return kernels.Verify(
          view,
          {s.rows, s.requests, in, longs(s.slots), ints(s.query_start_loc), ints(s.seq_lens), longs(s.bases)},
          launch);
    case Kind::kPrefill:
      return kernels.Prefill(view,
                             {s.rows, s.requests, in, longs(s.slots), longs(s.positions),
                              ints(s.query_start_loc), longs(s.bases)},
                             launch);
  }
  std::abort();
}

void Twin::UpdateHost() {
  Check(Update(HostKernels(), host_view_, image_.data(), {nullptr, &host_skipped_}), "host update");
}

void Twin::QueueDevice() {
  const Launch launch = {stream_.get(), static_cast<unsigned long long*>(device_skipped_.get())};
  Check(Update(*CudaKernels(), device_view_, static_cast<const std::uint8_t*>(device_image_.get()), launch),
        "CUDA update");
}

void Twin::Apply(const Indices& x, Arrangement arrangement, const RowSource& source, Random& random) {
  Stage(x, arrangement, source, random);
  QueueDevice();
  UpdateHost();
}

std::string Twin::Name(std::int64_t at) const {
  std::string where = "guard zone or gap";
  if (at >= geometry_.ring_offset() && at < geometry_.total_bytes()) {
    const std::int64_t row = (at - geometry_.ring_offset()) / kRowBytes;
    where = "ring block " + std::to_string(row / geometry_.rows_per_block()) + ", layer " +
            std::to_string(row % geometry_.rows_per_block() / geometry_.rows_per_layer) + ", row " +
            std::to_string(row % geometry_.rows_per_layer);
  } else if (at >= 0 && at < geometry_.pages_bytes()) {
    const std::int64_t byte = at % geometry_.block_stride;
    where = "block " + std::to_string(at / geometry_.block_stride) + ", layer " +
            std::to_string(byte / geometry_.page_bytes()) + ", summary " +
            std::to_string(byte % geometry_.page_bytes() / kSummaryBytes);
  }
  char text[64];
  const std::size_t i = static_cast<std::size_t>(at + kGuardBytes);
  std::snprintf(text, sizeof(text), "byte %lld: host %02x, CUDA %02x, in ", static_cast<long long>(at),
                host_[i], copy_[i]);
  return text + where;
}

bool Twin::Writable(std::int64_t at) const {
  const auto in_view = [this](std::int64_t layer) {
    return layer >= first_layer_ && layer < first_layer_ + layers_;
  };
  if (at >= geometry_.ring_offset() && at < geometry_.total_bytes()) {
    const std::int64_t row = (at - geometry_.ring_offset()) / kRowBytes;
    return row >= geometry_.rows_per_block() &&
           in_view(row % geometry_.rows_per_block() / geometry_.rows_per_layer) &&
           row % geometry_.rows_per_layer < geometry_.capacity;
  }
  if (at < geometry_.block_stride || at >= geometry_.pages_bytes()) return false;
  return in_view(at % geometry_.block_stride / geometry_.page_bytes());
}

std::string Twin::Difference() {
  device_.Download(copy_.data(), copy_.size(), stream_);
  unsigned long long skipped = 0;
  device_skipped_.Download(&skipped, sizeof(skipped), stream_);
  if (skipped != host_skipped_) {
    return "skipped rows: host " + std::to_string(host_skipped_) + ", CUDA " + std::to_string(skipped);
  }
  const auto [a, b] = std::mismatch(host_.begin(), host_.end(), copy_.begin());
  return a == host_.end() ? "" : Name(a - host_.begin() - kGuardBytes);
}

std::string Twin::DifferenceOutside() {
  device_.Download(copy_.data(), copy_.size(), stream_);
  for (std::size_t i = 0; i < host_.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) - kGuardBytes;
    if (host_[i] != copy_[i] && !Writable(at)) return Name(at);
  }
  return "";
}

}  // namespace kvsummary::gpu
