// Memory of caches that clients map: tickets, the descriptor socket, and who still has it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "server/rpc/session_fixture.h"
#include "server/session/tickets.h"

namespace kvsummary {
namespace {

using MapCallsTest = SessionTest;

TEST_F(MapCallsTest, OperatorsCachesAreMappedByAnySessionAndAttachedByNone) {
  auto a = Open();
  auto b = Open();
  const auto info = MustCreate(*a, "c", false);
  const auto owned = MustCreate(*a, "owned");
  char* in_a = a->Map(info.cache());
  char* in_b = b->Map(info.cache());
  ASSERT_NE(in_a, nullptr);
  ASSERT_NE(in_b, nullptr);
  in_a[7] = 42;
  EXPECT_EQ(in_b[7], 42);
  v1::CacheInfo taken;
  EXPECT_EQ(ReasonOf(b->Attach("c", &taken)), "CACHE_IN_USE");
  v1::MemoryHandle handle;
  EXPECT_EQ(ReasonOf(b->Export(owned.cache(), &handle)), "CACHE_NOT_YOURS");
}

TEST_F(MapCallsTest, MappedMemoryIsTheCachesOwn) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  char* data = a->Map(info.cache());
  ASSERT_NE(data, nullptr);
  const auto& page = info.layout().views(0);
  data[page.offset_bytes() + page.block_stride_bytes()] = 0x11;  // first byte of block 1
  v1::ReadPagesRequest read;
  *read.mutable_cache() = info.cache();
  read.mutable_layers()->set_count(1);
  read.add_blocks(1);
  grpc::ClientContext context;
  auto reader = a->caches->ReadPages(&context, read);
  v1::ReadPagesResponse part;
  ASSERT_TRUE(reader->Read(&part));
  EXPECT_EQ(part.data()[0], 0x11);
  while (reader->Read(&part)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(MapCallsTest, ExportAnswersWhatTheHandleIs) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  EXPECT_EQ(handle.kind(), v1::MEMORY_KIND_MEMFD);
  EXPECT_EQ(handle.handle().size(), 32u);
  EXPECT_EQ(handle.size_bytes(), info.layout().total_bytes());
  EXPECT_EQ(handle.generation(), info.cache().generation());
  EXPECT_NE(handle.pid_namespace(), 0u);
  const Descriptor self = PidfdOf(getpid());
  const auto redeemed = Redeem(a->descriptor_socket, handle.handle(), self.get());
  ASSERT_EQ(redeemed.reason, "OK");
  EXPECT_EQ(redeemed.size_bytes, handle.size_bytes());
  EXPECT_NE(ftruncate(redeemed.descriptor.get(), 0), 0);  // sealed
  EXPECT_NE(ftruncate(redeemed.descriptor.get(), 1 << 30), 0);
}

TEST_F(MapCallsTest, ATicketRedeemedTwiceIsUnknown) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "OK");
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "TICKET_UNKNOWN");
}

TEST_F(MapCallsTest, ATicketEndsWithItsSession) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  a->Close();
  AwaitDetached("c");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "TICKET_UNKNOWN");
}

TEST_F(MapCallsTest, ATicketOfADeletedCacheIsRefused) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  ASSERT_EQ(ReasonOf(a->Delete(info.cache())), "OK");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "CACHE_NOT_FOUND");
}

TEST_F(MapCallsTest, OnlyAPidfdOfTheLivingPeerMaps) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  const Descriptor ended = PidfdOf(dead);
  int state = 0;
  waitpid(dead, &state, 0);
  const Descriptor memfd = MakeMemfd(4096);
  // One that may outlive the mapper by any time, and one that may end before it.
  const Descriptor parent = PidfdOf(getppid());
  const pid_t child_pid = fork();
  if (child_pid == 0) {
    while (true) pause();
  }
  const Descriptor child = PidfdOf(child_pid);
  for (const int descriptor : {ended.get(), memfd.get(), parent.get(), child.get()}) {
    v1::MemoryHandle handle;
    EXPECT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
    EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), descriptor).reason, "DESCRIPTOR_MISSING");
  }
  EXPECT_TRUE(a->ListSessions().sessions(0).mapped_caches().empty());
  kill(child_pid, SIGKILL);
  waitpid(child_pid, &state, 0);
}

TEST_F(MapCallsTest, AMappedCacheIsNotTakenOverUntilItsMapperReleases) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  ASSERT_NE(a->Map(info.cache()), nullptr);
  EXPECT_EQ(a->ListSessions().sessions(0).mapped_caches(0), "c");
  ASSERT_EQ(ReasonOf(a->Release(info.cache())), "OK");
  EXPECT_TRUE(a->ListSessions().sessions(0).mapped_caches().empty());
  ASSERT_NE(a->Map(info.cache()), nullptr);
  a->Close();
  AwaitDetached("c");
  auto b = Open();
  v1::CacheInfo taken;
  EXPECT_EQ(ReasonOf(b->Attach("c", &taken)), "CACHE_STILL_MAPPED");  // this process lives
  v1::MemoryHandle handle;
  EXPECT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "SESSION_ENDED");
  EXPECT_EQ(ReasonOf(b->Release(info.cache())), "OK");  // of nothing
  EXPECT_EQ(ReasonOf(b->Attach("c", &taken)), "CACHE_STILL_MAPPED");
  ASSERT_EQ(ReasonOf(a->Release(info.cache())), "OK");  // by the id of the session that has ended
  EXPECT_EQ(ReasonOf(b->Attach("c", &taken)), "OK");
}

TEST_F(MapCallsTest, DeletedMemoryCountsUntilItIsReleased) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  ASSERT_NE(a->Map(info.cache()), nullptr);
  const auto used = Used();
  ASSERT_EQ(ReasonOf(a->Delete(info.cache())), "OK");
  EXPECT_EQ(Used(), used);
  ASSERT_EQ(ReasonOf(a->Release(info.cache())), "OK");
  AwaitUsed(0);
}

TEST_F(MapCallsTest, MapAndUnmapInALoopLeavesNothing) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator{});
  };
  const auto before = open_files();
  for (int i = 0; i < 300; ++i) {
    char* data = a->Map(info.cache());
    ASSERT_NE(data, nullptr) << i;
    munmap(data, static_cast<std::size_t>(info.layout().total_bytes()));
    ASSERT_EQ(ReasonOf(a->Release(info.cache())), "OK");
  }
  while (open_files() > before + 1) std::this_thread::yield();  // the last connection is closed in its time
}

TEST_F(MapCallsTest, MappingsAndTicketsOfASessionAreLimited) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  for (std::size_t i = 0; i < kMaxSessionMappings; ++i) {
    char* data = a->Map(info.cache());
    ASSERT_NE(data, nullptr);
    munmap(data, static_cast<std::size_t>(info.layout().total_bytes()));
  }
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "SESSION_LIMIT");
  for (std::size_t i = 0; i < kMaxSessionTickets; ++i)
    ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  EXPECT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "SESSION_LIMIT");
  EXPECT_EQ(a->ListSessions().sessions(0).tickets(), static_cast<std::int64_t>(kMaxSessionTickets));
}

}  // namespace
}  // namespace kvsummary
