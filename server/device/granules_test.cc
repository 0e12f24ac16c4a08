#include "server/device/granules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace kvsummary {
namespace {

constexpr std::int64_t kMemory = 4 << 20;

std::string RandomBytes(std::int64_t bytes) {
  std::mt19937 random(3);
  std::string text(static_cast<std::size_t>(bytes), 0);
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// Pieces of `unit` bytes' multiples that do not overlap, in any order.
std::vector<Piece> RandomPieces(std::mt19937& random, std::int64_t unit) {
  std::vector<Piece> pieces;
  for (std::int64_t at = 0; at < kMemory - 40 * unit;) {
    const auto bytes = static_cast<std::int64_t>(random() % 20) * unit;
    pieces.push_back({at, bytes});
    at += bytes + static_cast<std::int64_t>(random() % 20) * unit;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

// The bytes of pieces by gathering at most `most` granules at a time.
std::string Gather(std::string& memory, std::span<const Piece> pieces, std::int64_t most) {
  Granules granules(pieces);
  std::string out(static_cast<std::size_t>(granules.left() * granules.bytes()), 0);
  char* to = out.data();
  while (granules.left() > 0) {
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(std::min(most, granules.left())));
    PageView view;
    const PageSet set = granules.Set(memory.data(), kMemory, view, &view);
    const auto count = static_cast<std::int64_t>(numbers.size());
    granules.Next(count, numbers.data());
    unsigned long long skipped = 0;
    EXPECT_EQ(HostPages().Gather(set, numbers.data(), count, to, {.skipped = &skipped}), 0);
    EXPECT_EQ(skipped, 0u);
    to += count * granules.bytes();
  }
  return out;
}

TEST(Granules, GatherThePiecesBytesInOrderHoweverManyAtATime) {
  std::string memory = RandomBytes(kMemory);
  std::mt19937 random(5);
  for (const std::int64_t unit : {16, 256, 2048, 47104}) {
    const auto pieces = RandomPieces(random, unit);
    std::string want;
    for (const Piece& p : pieces)
      want += memory.substr(static_cast<std::size_t>(p.offset), static_cast<std::size_t>(p.bytes));
    for (const std::int64_t most : {1, 7, 1 << 20}) EXPECT_EQ(Gather(memory, pieces, most), want);
  }
}

TEST(Granules, TheWholeMemoryIsCutIntoSeveral) {
  std::string memory = RandomBytes(kMemory);
  const Piece all{0, kMemory};
  EXPECT_GT(Granules({&all, 1}).left(), 8);
  EXPECT_EQ(Gather(memory, {&all, 1}, 3), memory);
}

TEST(Granules, ScatterReachesTheFirstByteAndTheLast) {
  std::string memory(kMemory, 0);
  const std::vector<Piece> pieces = {{kMemory - 512, 512}, {0, 256}};
  Granules granules(pieces);
  EXPECT_EQ(granules.bytes(), 256);
  ASSERT_EQ(granules.left(), 3);
  std::int64_t numbers[3];
  granules.Next(3, numbers);
  PageView view;
  unsigned long long skipped = 0;
  const std::string bytes = RandomBytes(768);
  const PageSet set = granules.Set(memory.data(), kMemory, view, &view);
  ASSERT_EQ(HostPages().Scatter(bytes.data(), set, numbers, 3, {.skipped = &skipped}), 0);
  EXPECT_EQ(skipped, 0u);
  EXPECT_EQ(memory.substr(kMemory - 512) + memory.substr(0, 256), bytes);
  EXPECT_EQ(std::count(memory.begin() + 256, memory.end() - 512, 0), kMemory - 768);
}

TEST(Granules, NoBytesAreNoGranules) {
  const Piece nothing{4096, 0};
  EXPECT_EQ(Granules({&nothing, 1}).left(), 0);
  EXPECT_EQ(Granules({}).left(), 0);
}

}  // namespace
}  // namespace kvsummary
