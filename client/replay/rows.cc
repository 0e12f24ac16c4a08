#include "client/replay/rows.h"

#include <bit>
#include <cstring>

namespace kvsummary {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;

// What a RowKey's source is an id of, in its lowest bits.
enum SourceKind : std::uint64_t { kPrompt = 0, kOutput = 1, kWrongDraft = 2 };

constexpr std::uint64_t Source(std::int64_t id, SourceKind kind) {
  return static_cast<std::uint64_t>(id) * 4 + kind;
}

constexpr std::uint64_t Scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// 256 bf16 values of either sign, with magnitudes from 2^low up to 2^(low + 4). Four a word: a random
// sign, two random exponent bits and seven fraction bits in each lane, to which the exponent is added.
void FillHalf(std::uint64_t state, int low, std::uint16_t* out) {
  const std::uint64_t exponent = static_cast<std::uint64_t>(127 + low) << 7;
  const std::uint64_t lanes = exponent * 0x0001000100010001;
  for (int i = 0; i < kChannels; i += 4) {
    std::uint64_t x = state + static_cast<std::uint64_t>(i) * kGolden;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
    x ^= x >> 32;
    x = (x & 0x81ff81ff81ff81ff) + lanes;
    std::memcpy(out + i, &x, sizeof(x));
  }
}

}  // namespace

std::uint64_t MixBits(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t x = Scramble(a + kGolden);
  x = Scramble(x + b * kGolden);
  x = Scramble(x + c * kGolden);
  return Scramble(x + d * kGolden);
}

RowKey TokenRow(const TraceRequest& request, std::int64_t request_index, std::int64_t position) {
  if (position >= request.input_length) {
    return {Source(request_index, kOutput), static_cast<std::uint64_t>(position)};
  }
  return {Source(request.hash_ids[static_cast<std::size_t>(position / kTraceChunkTokens)], kPrompt),
          static_cast<std::uint64_t>(position % kTraceChunkTokens)};
}

RowKey WrongDraftRow(std::int64_t request_index, std::int64_t position, std::int64_t attempt) {
  return {Source(request_index, kWrongDraft),
          static_cast<std::uint64_t>(attempt) << 32 | static_cast<std::uint64_t>(position)};
}

std::uint64_t PromptBlockKey(const TraceRequest& request, std::int64_t block, std::int64_t block_size) {
  const std::int64_t blocks_per_chunk = kTraceChunkTokens / block_size;
  const std::int64_t id = request.hash_ids[static_cast<std::size_t>(block / blocks_per_chunk)];
  return static_cast<std::uint64_t>(id * blocks_per_chunk + block % blocks_per_chunk);
}

void FillRow(std::uint64_t seed, RowKey key, std::int32_t layer, std::uint16_t* out) {
  const std::uint64_t state = MixBits(seed, key.source, key.index, static_cast<std::uint64_t>(layer));
  // Most rows: |z| below 1 to 16, so every weight counts; one in 64: up to 128, where many underflow.
  const int spread = static_cast<int>(state & 63);
  const int z_low = spread == 63 ? 3 : spread % 5 - 4;
  FillHalf(state, -2, out);
  FillHalf(Scramble(state), z_low, out + kChannels);
}

}  // namespace kvsummary
