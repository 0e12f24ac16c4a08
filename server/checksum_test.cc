#include "server/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvsummary {
namespace {

// Around the lengths at which XXH3 takes another way, at every place within a vector.
TEST(ChecksumTest, IsXxh3WhateverTheProcessorHas) {
  std::vector<unsigned char> bytes((1 << 20) + 64);
  std::mt19937 random(1);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  for (const std::size_t count :
       {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 256, 1024, 1025, 4096, 65537, 1 << 20}) {
    for (const std::size_t at : {0, 1, 31, 32, 63}) {
      for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
        EXPECT_EQ(Checksum(&bytes[at], count, seed), XXH3_64bits_withSeed(&bytes[at], count, seed))
            << count << " bytes at " << at;
      }
      EXPECT_EQ(Checksum(&bytes[at], count), XXH3_64bits(&bytes[at], count));
    }
  }
}

TEST(ChecksumTest, ChunksOfTheSameBytesDiffer) {
  const std::vector<char> bytes(4096, 1);
  const auto first = ChunkChecksum(0, 1, bytes.data(), bytes.size());
  EXPECT_EQ(first, ChunkChecksum(0, 1, bytes.data(), bytes.size()));
  EXPECT_NE(first, ChunkChecksum(1, 1, bytes.data(), bytes.size()));
  EXPECT_NE(first, ChunkChecksum(0, 2, bytes.data(), bytes.size()));
}

}  // namespace
}  // namespace kvsummary
