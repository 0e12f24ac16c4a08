// Lives of a cache: owners, grace, mappers. The clock and the reaping are the test's.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>

#include "kernels/update.h"
#include "server/cache/cache.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kGeometry = {
    .layers = 2, .blocks = 10, .block_size = 16, .ring_blocks = 4, .capacity = 10, .k = 3};

// A process that does nothing until it is killed.
class Process {
 public:
  Process() : pid_(fork()) {
    if (pid_ == 0) {
      while (true) pause();
    }
  }
  ~Process() { Kill(); }
  void Kill() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    int state = 0;
    waitpid(pid_, &state, 0);
    pid_ = -1;
  }
  Descriptor Pidfd() const { return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0))); }

 private:
  pid_t pid_;
};

class CacheManagerTest : public ::testing::Test {
 protected:
  CacheManagerTest() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(ScalarKernels(), 1 << 20));
    caches_ = std::make_unique<CacheManager>(
        std::move(devices), 1000, CacheManager::Options{.grace = std::chrono::seconds(10), .now = [this] {
                                                          return CacheManager::Clock::time_point(now_);
                                                        }});
  }

  std::uint64_t Create(const std::string& name, std::uint64_t session) {
    std::promise<CacheManager::CacheOr> made;
    caches_->Create(
        {.name = name, .device = "", .geometry = kGeometry, .session = session}, [] { return false; },
        [&](CacheManager::CacheOr cache) { made.set_value(std::move(cache)); });
    const auto cache = made.get_future().get();
    EXPECT_TRUE(cache.ok()) << cache.status();
    return (*cache)->generation();
  }
  std::string Map(const std::string& name, std::uint64_t generation, std::uint64_t session,
                  Descriptor pidfd) {
    const auto mapped = caches_->MapMemory(name, generation, session, std::move(pidfd));
    return mapped.ok() ? "OK" : RefusalReason(mapped.status());
  }
  CacheManager::CacheOr Attach(const std::string& name, std::uint64_t session) {
    std::promise<CacheManager::CacheOr> attached;
    caches_->Attach(name, session,
                    [&](CacheManager::CacheOr cache) { attached.set_value(std::move(cache)); });
    return attached.get_future().get();
  }
  // Bytes in use, once what is queued for the device is done.
  std::int64_t Used() {
    std::promise<void> done;
    caches_->devices()[0]->executor().SubmitFree([&] { done.set_value(); });
    done.get_future().wait();
    return caches_->devices()[0]->budget().used_bytes();
  }
  bool SomethingToReap() {
    pollfd polled{caches_->reap_descriptor(), POLLIN, 0};
    return poll(&polled, 1, 0) == 1;
  }

  std::chrono::seconds now_{100};
  std::unique_ptr<CacheManager> caches_;
};

TEST_F(CacheManagerTest, AnExpiredCacheThatIsMappedCountsUntilItsMapperEnds) {
  Process mapper;
  const auto generation = Create("c", 7);
  const auto bytes = Used();
  ASSERT_EQ(Map("c", generation, 7, mapper.Pidfd()), "OK");
  caches_->EndSession(7);
  EXPECT_EQ(caches_->Reap(), std::chrono::seconds(10));
  now_ += std::chrono::seconds(10);
  EXPECT_EQ(caches_->Reap(), std::nullopt);
  EXPECT_FALSE(caches_->Find("c").ok());
  EXPECT_EQ(Used(), bytes);
  EXPECT_FALSE(SomethingToReap());
  mapper.Kill();
  EXPECT_TRUE(SomethingToReap());
  caches_->Reap();
  EXPECT_EQ(Used(), 0);
}

TEST_F(CacheManagerTest, AttachLooksForItselfWhetherTheMapperHasEnded) {
  Process mapper;
  const auto generation = Create("c", 7);
  ASSERT_EQ(Map("c", generation, 7, mapper.Pidfd()), "OK");
  caches_->EndSession(7);
  EXPECT_EQ(RefusalReason(Attach("c", 8).status()), "CACHE_STILL_MAPPED");
  mapper.Kill();
  const auto taken = Attach("c", 8);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_GT((*taken)->generation(), generation);
  EXPECT_EQ(RefusalReason(caches_->Find("c", generation).status()), "GENERATION_STALE");
}

// What one life has queued is done before the next one begins, or never: the next may map the memory and
// write to it without asking the daemon.
TEST_F(CacheManagerTest, WorkOfAnEarlierLifeEndsBeforeTheNextBegins) {
  Create("c", 7);
  Executor& executor = caches_->devices()[0]->executor();
  const auto old = *caches_->Find("c");
  const std::vector<char> page(512, 1);
  const Piece first_page{kGeometry.page_bytes(), kGeometry.page_bytes()};
  std::promise<void> release;
  std::string log;
  ASSERT_TRUE(executor.Submit([&] { release.get_future().wait(), log += "old;"; }).ok());
  caches_->EndSession(7);
  std::promise<void> attached;
  caches_->Attach("c", 8, [&](const CacheManager::CacheOr& cache) {
    EXPECT_TRUE(cache.ok()) << cache.status();
    log += "attached;";
    attached.set_value();
  });
  ASSERT_TRUE(
      executor  // a call that had found the cache before, and was slow to queue its work
          .Submit([&] {
            EXPECT_EQ(RefusalReason(old->CopyIn({&first_page, 1}, page.data())), "GENERATION_STALE");
            std::vector<char> read(page.size());
            EXPECT_EQ(RefusalReason(old->CopyOut({&first_page, 1}, read.data())), "GENERATION_STALE");
            EXPECT_EQ(RefusalReason(old->Apply({0, 2}, DecodeStep(), RowsIn::kHost)), "GENERATION_STALE");
          })
          .ok());
  release.set_value();
  attached.get_future().wait();
  EXPECT_EQ(log, "old;attached;");
  EXPECT_GT(Used(), 0);
}

TEST_F(CacheManagerTest, MappingsOfAllSessionsAreLimited) {
  const auto generation = Create("operators", 0);
  for (std::uint64_t i = 0; i < kMaxMappings; ++i) {
    ASSERT_EQ(Map("operators", generation, 1 + i / kMaxSessionMappings, Descriptor()), "OK");
  }
  EXPECT_EQ(Map("operators", generation, 1000, Descriptor()), "SESSION_LIMIT");
  caches_->EndSession(1);
  EXPECT_EQ(Map("operators", generation, 1000, Descriptor()), "OK");
}

TEST_F(CacheManagerTest, AnAttachedCacheDoesNotExpire) {
  Create("c", 7);
  caches_->EndSession(7);
  ASSERT_TRUE(Attach("c", 8).ok());
  now_ += std::chrono::seconds(100);
  EXPECT_EQ(caches_->Reap(), std::nullopt);
  EXPECT_TRUE((*caches_->Find("c"))->attached());
}

TEST_F(CacheManagerTest, TheEndOfAnotherSessionChangesNothing) {
  Create("c", 7);
  Create("operators", 0);
  caches_->EndSession(8);
  EXPECT_TRUE((*caches_->Find("c"))->attached());
  caches_->EndSession(7);
  EXPECT_FALSE((*caches_->Find("c"))->attached());
  EXPECT_TRUE((*caches_->Find("operators"))->attached());
  EXPECT_EQ(RefusalReason(Attach("operators", 8).status()), "CACHE_IN_USE");
}

TEST_F(CacheManagerTest, ADetachedCacheIsNotMappedByItsOldSession) {
  Process mapper;
  const auto generation = Create("c", 7);
  EXPECT_EQ(Map("c", generation, 8, mapper.Pidfd()), "CACHE_NOT_YOURS");
  caches_->EndSession(7);
  EXPECT_EQ(Map("c", generation, 7, mapper.Pidfd()), "CACHE_NOT_YOURS");
  EXPECT_EQ(Map("c", generation + 1, 7, mapper.Pidfd()), "GENERATION_STALE");
}

TEST_F(CacheManagerTest, AMappingWithoutPidfdEndsWithItsSession) {
  const auto generation = Create("c", 7);
  ASSERT_EQ(Map("c", generation, 7, Descriptor()), "OK");
  EXPECT_EQ(caches_->MappedBy(7), std::vector<std::string>{"c"});
  caches_->EndSession(7);
  EXPECT_TRUE(caches_->MappedBy(7).empty());
  EXPECT_TRUE(Attach("c", 8).ok());
}

TEST_F(CacheManagerTest, OnlyALivingOwnerIsToldOfALoss) {
  std::string told;
  caches_->set_on_lost([&](std::uint64_t session, const std::string& name, std::uint64_t) {
    told += name + " of " + std::to_string(session) + ";";
  });
  const auto a = Create("a", 7);
  const auto operators = Create("operators", 0);
  caches_->Delete("a", a, [](const absl::Status&) {});
  caches_->Delete("operators", operators, [](const absl::Status&) {});
  const auto b = Create("b", 7);
  caches_->EndSession(7);
  caches_->Delete("b", b, [](const absl::Status&) {});
  EXPECT_EQ(told, "a of 7;");
  EXPECT_EQ(Used(), 0);
}

}  // namespace
}  // namespace kvsummary
