#include "server/memory/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "server/error.h"
#include "server/memory/budget.h"

namespace kvsummary {
namespace {

TEST(Budget, ReservesUpToItsLimitAndTakesBack) {
  Budget budget("host", 100);
  {
    auto first = budget.Reserve(60);
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(budget.used_bytes(), 60);
    const auto second = budget.Reserve(41);
    EXPECT_EQ(RefusalReason(second.status()), "MEMORY_BUDGET_EXCEEDED");
    EXPECT_EQ(budget.used_bytes(), 60);
    EXPECT_TRUE(budget.Reserve(40).ok());  // and given back at once
    auto moved = *std::move(first);
    EXPECT_EQ(budget.used_bytes(), 60);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(Budget, MovingAssignsAndFreesTheOldOne) {
  Budget budget("host", 100);
  auto a = *budget.Reserve(10);
  {
    auto b = *budget.Reserve(20);
    a = std::move(b);
  }
  EXPECT_EQ(budget.used_bytes(), 20);
}

TEST(Budget, HugeRequestsDoNotOverflow) {
  Budget budget("host", 100);
  auto taken = *budget.Reserve(50);
  EXPECT_FALSE(budget.Reserve(INT64_MAX).ok());
}

TEST(Budget, LimitNeverFallsBelowUse) {
  Budget budget("host", 100);
  auto taken = *budget.Reserve(50);
  budget.set_limit_bytes(10);
  EXPECT_EQ(budget.limit_bytes(), 50);
}

TEST(HostMemory, IsZeroedAndWritable) {
  auto memory = AllocateHostMemory(1 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto* bytes = static_cast<unsigned char*>((*memory)->data());
  EXPECT_TRUE(std::all_of(bytes, bytes + (1 << 20), [](unsigned char b) { return b == 0; }));
  bytes[(1 << 20) - 1] = 7;
  EXPECT_EQ((*memory)->bytes(), 1 << 20);
}

TEST(HostMemory, MoreThanThereIsIsRefused) {
  const auto memory = AllocateHostMemory(std::int64_t{1} << 52);
  EXPECT_EQ(RefusalReason(memory.status()), "OUT_OF_MEMORY");
}

TEST(HostMemory, SomeIsAvailable) {
  const auto pages = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  EXPECT_GT(AvailableHostBytes(), 0);
  EXPECT_LE(AvailableHostBytes(), pages);
}

}  // namespace
}  // namespace kvsummary
