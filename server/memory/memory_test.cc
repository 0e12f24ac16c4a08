#include "server/memory/memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

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

constexpr std::int64_t kHugeBytes = 2 << 20;

void ExpectZeroedSealedAndWritable(const absl::StatusOr<std::unique_ptr<Memory>>& memory,
                                   std::int64_t bytes) {
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->bytes(), bytes);
  EXPECT_EQ((*memory)->kind(), MemoryKind::kMemfd);
  auto* data = static_cast<unsigned char*>((*memory)->data());
  EXPECT_TRUE(std::all_of(data, data + bytes, [](unsigned char b) { return b == 0; }));
  data[bytes - 1] = 7;
  EXPECT_NE(ftruncate((*memory)->descriptor(), 0), 0);
  EXPECT_NE(ftruncate((*memory)->descriptor(), 2 * bytes), 0);
  struct stat info {};
  ASSERT_EQ(fstat((*memory)->descriptor(), &info), 0);
  EXPECT_GE(info.st_blocks * 512, bytes) << "every page is there";
}

TEST(StagingMemory, IsThereWhateverPagesTheMachineHas) {
  for (const std::int64_t bytes : {std::int64_t{4096}, kHugeBytes, kHugeBytes + 4096, 4 * kHugeBytes}) {
    ExpectZeroedSealedAndWritable(AllocateStagingMemory(bytes), bytes);
  }
  EXPECT_EQ(RefusalReason(AllocateStagingMemory(std::int64_t{1} << 52).status()), "OUT_OF_MEMORY");
}

bool CanBeMappedForWriting(int fd, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return false;
  munmap(data, size);
  return true;
}

// As somebody who was lent the descriptor for reading could: its mode lets it be opened for anything.
Descriptor Reopened(int fd, int flags) {
  return Descriptor(open(("/proc/self/fd/" + std::to_string(fd)).c_str(), flags | O_CLOEXEC));
}

void ExpectOnlyItsOwnerWrites(const Memory& memory) {
  const Descriptor lent = Reopened(memory.descriptor(), O_RDONLY);
  ASSERT_TRUE(lent);
  for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR}) {
    SCOPED_TRACE(flags);
    const Descriptor again = Reopened(lent.get(), flags);
    if (!again) continue;
    EXPECT_LT(pwrite(again.get(), "x", 1, 0), 0);
    EXPECT_NE(fallocate(again.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, memory.bytes()), 0);
    EXPECT_NE(ftruncate(again.get(), 0), 0);
    EXPECT_FALSE(CanBeMappedForWriting(again.get(), memory.bytes()));
  }
  const auto size = static_cast<std::size_t>(memory.bytes());
  auto* read = static_cast<char*>(mmap(nullptr, size, PROT_READ, MAP_SHARED, lent.get(), 0));
  ASSERT_NE(read, MAP_FAILED);
  EXPECT_NE(mprotect(read, size, PROT_READ | PROT_WRITE), 0);
  static_cast<char*>(memory.data())[0] = 'o';
  EXPECT_EQ(read[0], 'o');
  munmap(read, size);
}

TEST(StagingMemory, NobodyWhoIsLentItWritesToIt) {
  for (const std::int64_t bytes : {std::int64_t{4096}, kHugeBytes}) {
    const auto memory = AllocateStagingMemory(bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    ExpectOnlyItsOwnerWrites(**memory);
  }
}

// Needs pages that are set aside.
TEST(StagingMemory, NobodyWhoIsLentHugePagesWritesToThem) {
  bool huge = true;
  PageCalls calls = SystemPageCalls();
  calls.create = [&](unsigned flags) {
    huge = (flags & MFD_HUGETLB) != 0;
    return memfd_create("test", flags);
  };
  const auto memory = AllocateStagingMemory(kHugeBytes, calls);
  ASSERT_TRUE(memory.ok()) << memory.status();
  if (!huge) GTEST_SKIP() << "no huge pages are set aside";
  ExpectOnlyItsOwnerWrites(**memory);
}

TEST(StagingMemory, LandingMemoryIsWrittenToByWhoIsLentIt) {
  const auto memory = AllocateLandingMemory(kHugeBytes);
  ExpectZeroedSealedAndWritable(memory, kHugeBytes);
  EXPECT_TRUE(CanBeMappedForWriting((*memory)->descriptor(), kHugeBytes));
}

// Stand-ins for the kernel's calls that write down what they are asked, and fail when they are told to.
class StagingMemoryFailureTest : public ::testing::Test {
 protected:
  PageCalls Calls() {
    PageCalls calls = SystemPageCalls();
    calls.create = [this](unsigned flags) {
      const bool huge = (flags & MFD_HUGETLB) != 0;
      asked_.emplace_back(huge ? "create huge" : "create");
      if (huge ? fail_create_huge_ : fail_create_) return -1;
      return memfd_create("test",
                          flags & ~(MFD_HUGETLB | (63u << 26)));  // this machine may have no huge ones
    };
    calls.allocate = [this](int fd, std::int64_t bytes) {
      asked_.emplace_back("allocate");
      if (fail_allocate_-- > 0) return ENOMEM;
      return posix_fallocate(fd, 0, bytes);
    };
    calls.advise = [this](void* data, std::int64_t bytes, int advice) {
      asked_.emplace_back(advice == MADV_HUGEPAGE ? "transparent" : "populate");
      if (fail_advise_) return EINVAL;
      return madvise(data, static_cast<std::size_t>(bytes), advice) == 0 ? 0 : errno;
    };
    return calls;
  }
  using Asked = std::vector<std::string>;

  Asked asked_;
  bool fail_create_huge_ = false;
  bool fail_create_ = false;
  int fail_allocate_ = 0;  // so many times
  bool fail_advise_ = false;
};

TEST_F(StagingMemoryFailureTest, PagesThatAreSetAsideComeFirst) {
  ExpectZeroedSealedAndWritable(AllocateStagingMemory(kHugeBytes, Calls()), kHugeBytes);
  EXPECT_EQ(asked_, (Asked{"create huge", "allocate", "populate"}));
}

TEST_F(StagingMemoryFailureTest, ThenTransparentOnes) {
  fail_allocate_ = 1;
  ExpectZeroedSealedAndWritable(AllocateStagingMemory(kHugeBytes, Calls()), kHugeBytes);
  EXPECT_EQ(asked_, (Asked{"create huge", "allocate", "create", "transparent", "populate", "allocate"}));
}

TEST_F(StagingMemoryFailureTest, ThenOrdinaryOnes) {
  fail_create_huge_ = true;
  fail_advise_ = true;
  ExpectZeroedSealedAndWritable(AllocateStagingMemory(kHugeBytes, Calls()), kHugeBytes);
  EXPECT_EQ(asked_, (Asked{"create huge", "create", "transparent", "populate", "allocate"}));
}

TEST_F(StagingMemoryFailureTest, PartsOfHugePagesAreNotAskedFor) {
  ExpectZeroedSealedAndWritable(AllocateStagingMemory(kHugeBytes + 4096, Calls()), kHugeBytes + 4096);
  EXPECT_EQ(asked_, (Asked{"create", "transparent", "populate", "allocate"}));
}

TEST_F(StagingMemoryFailureTest, NoPagesAtAllAreOutOfMemory) {
  fail_allocate_ = 2;
  EXPECT_EQ(RefusalReason(AllocateStagingMemory(kHugeBytes, Calls()).status()), "OUT_OF_MEMORY");
  fail_create_ = true;
  EXPECT_EQ(RefusalReason(AllocateStagingMemory(4096, Calls()).status()), "OUT_OF_MEMORY");
}

TEST(HostMemory, SomeIsAvailable) {
  const auto pages = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  EXPECT_GT(AvailableHostBytes(), 0);
  EXPECT_LE(AvailableHostBytes(), pages);
}

}  // namespace
}  // namespace kvsummary
