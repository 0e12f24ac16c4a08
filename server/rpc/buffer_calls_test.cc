// Memory of clients that the daemon maps.
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <thread>

#include "server/rpc/session_fixture.h"

namespace kvsummary {
namespace {

using BufferCallsTest = SessionTest;

TEST_F(BufferCallsTest, ABufferIsRegisteredOnceItsMemfdHasCome) {
  auto a = Open();
  const Descriptor memfd = MakeMemfd(8192);
  v1::RegisterBufferResponse reply;
  ASSERT_EQ(ReasonOf(a->RegisterMemfd(8192, &reply)), "OK");
  EXPECT_EQ(reply.ticket().size(), 32u);
  const auto session = *server_->sessions().Find(a->session_id);
  EXPECT_FALSE(session->FindBuffer(reply.buffer_id()).ok());
  ASSERT_EQ(Redeem(a->descriptor_socket, reply.ticket(), memfd.get()).reason, "OK");
  const auto buffer = session->FindBuffer(reply.buffer_id());
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ((*buffer)->bytes(), 8192);
  const char byte = 9;
  ASSERT_EQ(pwrite(memfd.get(), &byte, 1, 8191), 1);
  EXPECT_EQ((*buffer)->data()[8191], 9);
  const auto info = a->ListSessions().sessions(0);
  EXPECT_EQ(info.buffers(), 1);
  EXPECT_EQ(info.buffer_bytes(), 8192);
}

TEST_F(BufferCallsTest, BadMemfdsAreRefusedWithTheirReasonsAndLeaveNothing) {
  auto a = Open();
  const Descriptor good = MakeMemfd(4096);
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, F_SEAL_SHRINK).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, F_SEAL_GROW).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, Descriptor(open("/dev/zero", O_RDWR)).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, PidfdOf(getpid()).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4097, good.get()), "MEMFD_TOO_SMALL");
  const Descriptor sparse(memfd_create("sparse", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(sparse.get(), std::int64_t{1} << 40), 0);
  ASSERT_EQ(fcntl(sparse.get(), F_ADD_SEALS, kAllSeals), 0);
  EXPECT_EQ(RegisterReason(*a, std::int64_t{1} << 40, sparse.get()), "MEMFD_TOO_SMALL");
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, kAllSeals | F_SEAL_WRITE).get()), "HANDLE_INVALID");
  EXPECT_EQ(RegisterReason(*a, 0, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(RegisterReason(*a, -1, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(RegisterReason(*a, INT64_MAX, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(a->ListSessions().sessions(0).buffers(), 0);
  EXPECT_EQ(RegisterReason(*a, 4096, good.get()), "OK");
}

TEST_F(BufferCallsTest, BuffersCostTheDaemonNoDescriptors) {
  auto a = Open();
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator{});
  };
  const auto before = open_files();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096).get()), "OK");
  EXPECT_EQ(a->ListSessions().sessions(0).buffers(), 100);
  while (open_files() > before + 1) std::this_thread::yield();  // the last connection is closed in its time
}

TEST_F(BufferCallsTest, TheSameMemfdTwiceIsRefusedInASessionAndTakenInAnother) {
  auto a = Open();
  auto b = Open();
  const Descriptor memfd = MakeMemfd(4096);
  EXPECT_EQ(RegisterReason(*a, 4096, memfd.get()), "OK");
  EXPECT_EQ(RegisterReason(*a, 4096, memfd.get()), "BUFFER_REGISTERED");
  EXPECT_EQ(a->ListSessions().sessions(0).buffers(), 1);
  EXPECT_EQ(RegisterReason(*b, 4096, memfd.get()), "OK");
}

TEST_F(BufferCallsTest, OtherHandlesAreRefusedWithTheirReasons) {
  auto a = Open();
  v1::RegisterBufferResponse reply;
  v1::MemoryHandle memory;
  memory.set_size_bytes(4096);
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "FIELD_MISSING");
  memory.set_kind(v1::MEMORY_KIND_CUDA_VMM);
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "CUDA_IPC_VMM_MEMORY");
  memory.set_kind(v1::MEMORY_KIND_CUDA_IPC);
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "DEVICE_NOT_VISIBLE");
  memory.set_device_uuid("GPU-00000000-0000-0000-0000-000000000000");
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "DEVICE_NOT_VISIBLE");
  memory.set_offset_bytes(-1);
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "BUFFER_RANGE");
  memory.set_kind(v1::MEMORY_KIND_MEMFD);
  memory.set_offset_bytes(0);
  memory.set_handle("x");
  EXPECT_EQ(ReasonOf(a->Register(memory, &reply)), "HANDLE_INVALID");
  auto request = TestClient::CacheRequest("c");
  request.set_memory_kind(v1::MEMORY_KIND_CUDA_VMM);
  grpc::ClientContext context;
  v1::CreateCacheResponse created;
  EXPECT_EQ(ReasonOf(a->caches->CreateCache(&context, request, &created)), "MEMORY_KIND_UNSUPPORTED");
  EXPECT_EQ(Used(), 0);
}

TEST_F(BufferCallsTest, UnregisterAnswersAfterTheLastUse) {
  auto a = Open();
  auto b = Open();
  const Descriptor memfd = MakeMemfd(4096);
  v1::RegisterBufferResponse reply;
  ASSERT_EQ(ReasonOf(a->RegisterMemfd(4096, &reply)), "OK");
  EXPECT_EQ(ReasonOf(b->Unregister(reply.buffer_id())), "BUFFER_NOT_FOUND");  // of another session
  ASSERT_EQ(Redeem(a->descriptor_socket, reply.ticket(), memfd.get()).reason, "OK");
  const auto session = *server_->sessions().Find(a->session_id);
  auto in_use = *session->FindBuffer(reply.buffer_id());
  auto unregistered = std::async(std::launch::async, [&] { return a->Unregister(reply.buffer_id()); });
  while (session->FindBuffer(reply.buffer_id()).ok()) std::this_thread::yield();
  EXPECT_EQ(unregistered.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  in_use.reset();
  EXPECT_EQ(ReasonOf(unregistered.get()), "OK");
  EXPECT_EQ(ReasonOf(a->Unregister(reply.buffer_id())), "BUFFER_NOT_FOUND");
}

TEST_F(BufferCallsTest, ABufferThatIsOnlyReservedIsUnregisteredAtOnce) {
  auto a = Open();
  v1::RegisterBufferResponse reply;
  ASSERT_EQ(ReasonOf(a->RegisterMemfd(4096, &reply)), "OK");
  EXPECT_EQ(ReasonOf(a->Unregister(reply.buffer_id())), "OK");
  EXPECT_EQ(Redeem(a->descriptor_socket, reply.ticket(), MakeMemfd(4096).get()).reason, "BUFFER_NOT_FOUND");
}

TEST_F(BufferCallsTest, TheEndOfASessionTakesNoMemoryFromUnderItsUser) {
  auto a = Open();
  const Descriptor memfd = MakeMemfd(4096);
  v1::RegisterBufferResponse reply;
  ASSERT_EQ(ReasonOf(a->RegisterMemfd(4096, &reply)), "OK");
  ASSERT_EQ(Redeem(a->descriptor_socket, reply.ticket(), memfd.get()).reason, "OK");
  const auto buffer = *(*server_->sessions().Find(a->session_id))->FindBuffer(reply.buffer_id());
  a->Close();
  AwaitSessions(0);
  buffer->data()[0] = 1;  // still mapped
}

}  // namespace
}  // namespace kvsummary
