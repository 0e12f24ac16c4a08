// Any bytes as an update, down to the kernels: what the checks let pass must not be skipped by a kernel, must
// not write outside the summaries and ring rows of its live rows, and must do what its effect says. What they
// refuse never reaches a kernel.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <span>

#include "kernels/update.h"
#include "kvsummary/v1/update.pb.h"
#include "server/cache/geometry.h"
#include "server/cache/validate.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kGeometries[] = {
    {.layers = 2,
     .blocks = 6,
     .block_size = 16,
     .block_stride = 1280,
     .ring_blocks = 4,
     .capacity = 10,
     .rows_per_layer = 12,
     .k = 3},
    {.layers = 1,
     .blocks = 12,
     .block_size = 8,
     .block_stride = 256,
     .ring_blocks = 3,
     .capacity = 8,
     .rows_per_layer = 8,
     .k = 1},
    {.layers = 3,
     .blocks = 3,
     .block_size = 64,
     .block_stride = 6144,
     .ring_blocks = 6,
     .capacity = 7,
     .rows_per_layer = 7,
     .k = 0},
};
constexpr std::uint8_t kUntouched = 0xA5;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

template <typename T, typename Field>
std::span<const T> Span(const Field& field) {
  return {field.data(), static_cast<std::size_t>(field.size())};
}

// The bytes of a cache, on the heap and of the exact size: the sanitizer guards both ends.
class Guarded {
 public:
  explicit Guarded(const CacheGeometry& g)
      : geometry_(g), size_(static_cast<std::size_t>(g.total_bytes())), bytes_(new std::uint8_t[size_]) {
    std::memset(bytes_.get(), kUntouched, size_);
  }
  CacheView View(LayerSpan layers) { return MakeView(geometry_, bytes_.get(), layers); }

  // Marks what one live row may change as untouched; whether any of it had changed.
  void Allow(std::int64_t offset, std::int64_t bytes) {
    std::memset(bytes_.get() + offset, kUntouched, static_cast<std::size_t>(bytes));
  }
  bool Untouched() const {
    for (std::size_t i = 0; i < size_; ++i) {
      if (bytes_[i] != kUntouched) return false;
    }
    return true;
  }

 private:
  const CacheGeometry& geometry_;
  const std::size_t size_;
  const std::unique_ptr<std::uint8_t[]> bytes_;
};

// Rows live by the letter of the contract: neither index negative.
template <typename S, typename Request, typename Position>
void Run(const CacheGeometry& g, const Request& request, const StepArrays& a,
         const absl::StatusOr<StepEffect>& effect, S step,
         int (UpdateKernels::*apply)(const CacheView&, const S&, const Launch&) const, Position position) {
  if (!effect.ok()) return;
  const LayerSpan layers{request.layers().first(), request.layers().count()};
  step.rows = static_cast<std::int32_t>(a.slots.size());
  // A copy of the exact size, aligned as gRPC's strings are: reads beyond it are seen.
  const std::string& sent = request.rows().inline_();
  const std::unique_ptr<char[]> rows(new char[sent.size()]);
  std::memcpy(rows.get(), sent.data(), sent.size());
  step.in = PackedRows(rows.get(), step.rows);
  step.slots = a.slots.data();
  step.ring_bases = a.ring_bases.data();

  Guarded cache(g);
  unsigned long long skipped = 0;
  (HostKernels().*apply)(cache.View(layers), step, {.skipped = &skipped});

  std::int64_t live = 0;
  std::int64_t closed = 0;
  for (std::size_t row = 0; row < a.slots.size(); ++row) {
    if (a.slots[row] < 0 || a.ring_bases[row] < 0) continue;
    const std::int64_t p = position(row);
    ++live;
    closed += p % kRegionTokens == kRegionTokens - 1;
    for (int l = layers.first; l < layers.first + layers.count; ++l) {
      if (p % kRegionTokens == kRegionTokens - 1) {
        cache.Allow(g.page_offset(a.slots[row] / g.block_size, l) +
                        a.slots[row] % g.block_size / kRegionTokens * kSummaryBytes,
                    kSummaryBytes);
      }
      cache.Allow(g.ring_row_offset(a.ring_bases[row] / g.rows_per_block(), l, p % g.capacity), kRowBytes);
    }
  }
  Require(cache.Untouched(), "a step writes nothing but the summaries and ring rows of its live rows");
  Require(live == effect->rows, "the effect counts the live rows");
  Require(closed == effect->regions_closed, "the effect counts the closing rows");
  // A request of nothing but padding may have any length: the kernels count it and go on.
  unsigned long long odd_padding = 0;
  for (std::size_t i = 0; i < a.seq_lens.size(); ++i) {
    const std::int32_t rows_of = a.query_start_loc[i + 1] - a.query_start_loc[i];
    odd_padding += rows_of > 0 && a.seq_lens[i] < rows_of;
  }
  Require(skipped == odd_padding * static_cast<unsigned>(layers.count), "a kernel skips no live row");
}

void Apply(const CacheGeometry& g, const v1::UpdateDecodeRequest& r) {
  const StepArrays a{.slots = Span<std::int64_t>(r.slots()),
                     .positions = Span<std::int64_t>(r.positions()),
                     .ring_bases = Span<std::int64_t>(r.ring_bases())};
  DecodeStep step;
  step.positions = a.positions.data();
  Run(g, r, a, CheckDecode(g, {r.layers().first(), r.layers().count()}, a, r.rows().inline_().size()), step,
      &UpdateKernels::Decode, [&](std::size_t row) { return a.positions[row]; });
}

void Apply(const CacheGeometry& g, const v1::UpdateVerifyRequest& r) {
  const StepArrays a{.slots = Span<std::int64_t>(r.slots()),
                     .query_start_loc = Span<std::int32_t>(r.query_start_loc()),
                     .seq_lens = Span<std::int32_t>(r.seq_lens()),
                     .ring_bases = Span<std::int64_t>(r.ring_bases())};
  VerifyStep step;
  step.requests = r.seq_lens_size();
  step.query_start_loc = a.query_start_loc.data();
  step.seq_lens = a.seq_lens.data();
  Run(g, r, a, CheckVerify(g, {r.layers().first(), r.layers().count()}, a, r.rows().inline_().size()), step,
      &UpdateKernels::Verify, [&](std::size_t row) {
        std::size_t i = 0;
        while (a.query_start_loc[i + 1] <= static_cast<std::int64_t>(row)) ++i;
        return std::int64_t{a.seq_lens[i]} - (a.query_start_loc[i + 1] - static_cast<std::int64_t>(row));
      });
}

void Apply(const CacheGeometry& g, const v1::UpdatePrefillRequest& r) {
  const StepArrays a{.slots = Span<std::int64_t>(r.slots()),
                     .positions = Span<std::int64_t>(r.positions()),
                     .query_start_loc = Span<std::int32_t>(r.query_start_loc()),
                     .ring_bases = Span<std::int64_t>(r.ring_bases())};
  PrefillStep step;
  step.requests = r.query_start_loc_size() - 1;
  step.positions = a.positions.data();
  step.query_start_loc = a.query_start_loc.data();
  Run(g, r, a, CheckPrefill(g, {r.layers().first(), r.layers().count()}, a, r.rows().inline_().size()), step,
      &UpdateKernels::Prefill, [&](std::size_t row) { return a.positions[row]; });
}

// Bytes that choose a step near to a good one: most are refused by one rule or pass.
class Choices {
 public:
  explicit Choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  int Next(int count) {  // 0 to count - 1; 0 when the bytes are used up
    if (bytes_.empty()) return 0;
    const int value = bytes_[0] % count;
    bytes_ = bytes_.subspan(1);
    return value;
  }
  bool Rarely() { return Next(256) >= 250; }

 private:
  std::span<const std::uint8_t> bytes_;
};

// A step of a few requests in blocks and rings of their own, with now and then an index changed.
v1::StreamUpdatesRequest MakeStep(const CacheGeometry& g, Choices& choose) {
  constexpr std::int64_t kOdd[] = {-1, 0, 1, 7, 8, INT64_MIN, INT64_MAX, 0x7fffffff, 0x80000000, 24, 16};
  const int kind = choose.Next(3);
  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::int32_t> start = {0}, seq_lens;
  const int requests = choose.Next(4);
  std::int64_t slot = g.block_size;
  for (int i = 0; i < requests; ++i) {
    const int rows = kind == 0 ? 1 : choose.Next(kind == 1 ? g.k + 2 : 20);
    slot = (slot + 7) / 8 * 8;
    const int first = choose.Next(8);
    slot += first;
    for (int r = 0; r < rows; ++r) {
      slots.push_back(slot++);
      positions.push_back(first + r);
      bases.push_back((i + 1) * g.rows_per_block());
    }
    start.push_back(static_cast<std::int32_t>(slots.size()));
    seq_lens.push_back(first + rows);
  }
  for (auto* array : {&slots, &positions, &bases}) {
    for (auto& value : *array) {
      if (choose.Rarely()) value = kOdd[choose.Next(std::size(kOdd))];
    }
  }
  for (auto* array : {&start, &seq_lens}) {
    for (auto& value : *array) {
      if (choose.Rarely()) value = static_cast<std::int32_t>(kOdd[choose.Next(std::size(kOdd))]);
    }
  }
  v1::StreamUpdatesRequest message;
  const auto fill = [&](auto* r) {
    r->mutable_layers()->set_first(choose.Rarely() ? 1 : 0);
    r->mutable_layers()->set_count(g.layers);
    r->mutable_slots()->Add(slots.begin(), slots.end());
    r->mutable_ring_bases()->Add(bases.begin(), bases.end());
    std::string rows(static_cast<std::size_t>(g.layers) * slots.size() * kRowBytes, 0);
    for (std::size_t i = 0; i < rows.size(); i += 61) rows[i] = static_cast<char>(choose.Next(256));
    r->mutable_rows()->set_inline_(std::move(rows));
  };
  if (kind == 0) {
    fill(message.mutable_decode());
    message.mutable_decode()->mutable_positions()->Add(positions.begin(), positions.end());
  } else if (kind == 1) {
    fill(message.mutable_verify());
    message.mutable_verify()->mutable_query_start_loc()->Add(start.begin(), start.end());
    message.mutable_verify()->mutable_seq_lens()->Add(seq_lens.begin(), seq_lens.end());
  } else {
    fill(message.mutable_prefill());
    message.mutable_prefill()->mutable_positions()->Add(positions.begin(), positions.end());
    message.mutable_prefill()->mutable_query_start_loc()->Add(start.begin(), start.end());
  }
  return message;
}

void RunOne(std::span<const std::uint8_t> bytes) {
  Choices choose(bytes);
  const int how = choose.Next(6);
  const CacheGeometry& g = kGeometries[how % 3];
  v1::StreamUpdatesRequest message;
  if (how < 3) {
    message = MakeStep(g, choose);
  } else if (bytes.size() < 2 ||
             !message.ParseFromArray(bytes.data() + 1, static_cast<int>(bytes.size() - 1))) {
    return;
  }
  if (message.has_decode()) Apply(g, message.decode());
  if (message.has_verify()) Apply(g, message.verify());
  if (message.has_prefill()) Apply(g, message.prefill());
}

}  // namespace
}  // namespace kvsummary

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvsummary::RunOne({data, size});
  return 0;
}
