#include "server/handoff/arena.h"

#include <gtest/gtest.h>

#include <random>

#include "kernels/update.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kPages = 64;

class ArenaTest : public ::testing::Test {
 protected:
  ArenaTest()
      : device_(MakeHostDevice(ScalarKernels(), 1 << 20)), arena_(*device_, kPages * Arena::kGranule) {}
  std::unique_ptr<Device> device_;
  Arena arena_;
};

TEST_F(ArenaTest, ExtentsNeverOverlapAndAllOfItComesBack) {
  std::mt19937 random(1);
  std::vector<Arena::Extent> extents;
  for (int round = 0; round < 2000; ++round) {
    if (auto extent = arena_.Reserve(1 + random() % (9 * Arena::kGranule)); extent.ok()) {
      extents.push_back(*std::move(extent));
    } else {
      EXPECT_EQ(RefusalReason(extent.status()), "HANDOFF_BUDGET_EXCEEDED");
      std::swap(extents[random() % extents.size()], extents.back());
      extents.pop_back();
    }
    std::vector<int> owners(kPages);
    std::int64_t bytes = 0;
    for (const Arena::Extent& extent : extents) {
      bytes += extent.bytes();
      for (std::int64_t p = 0; p < extent.bytes(); p += Arena::kGranule) {
        ASSERT_EQ(++owners[static_cast<std::size_t>((extent.offset() + p) / Arena::kGranule)], 1);
      }
    }
    ASSERT_EQ(arena_.used_bytes(), bytes);
  }
  extents.clear();
  EXPECT_EQ(arena_.used_bytes(), 0);
  EXPECT_TRUE(arena_.Reserve(kPages * Arena::kGranule).ok());
}

TEST_F(ArenaTest, WhatIsLargerThanAllOfItIsRefused) {
  for (const std::int64_t bytes : {kPages * Arena::kGranule + 1, std::int64_t{1} << 62}) {
    EXPECT_EQ(RefusalReason(arena_.Reserve(bytes).status()), "HANDOFF_BUDGET_EXCEEDED");
  }
}

TEST_F(ArenaTest, MemoryIsTakenOnceAndOnlyWhenItIsNeeded) {
  EXPECT_EQ(device_->budget().used_bytes(), 0);
  absl::Status prepared;
  device_->executor().SubmitFree([&] { prepared = arena_.Prepare(); });
  device_->executor().SubmitFree([&] { prepared.Update(arena_.Prepare()); });
  device_->executor().Stop();
  EXPECT_TRUE(prepared.ok()) << prepared;
  EXPECT_EQ(device_->budget().used_bytes(), kPages * Arena::kGranule);
  EXPECT_EQ(arena_.memory()->bytes(), kPages * Arena::kGranule);
}

}  // namespace
}  // namespace kvsummary
