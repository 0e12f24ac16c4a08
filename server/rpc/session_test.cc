// Sessions and shared memory as clients meet them: a real server, real sockets, a clock that the test moves.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <thread>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"
#include "server/session/tickets.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBudget = 64 << 20;

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), kBudget));
    caches_ = std::make_unique<CacheManager>(
        std::move(devices), 1000,
        CacheManager::Options{.grace = std::chrono::seconds(600), .now = [this] {
                                return CacheManager::Clock::time_point(std::chrono::seconds(now_.load()));
                              }});
    auto server = Server::Start({.listen = {"unix:" + dir_ + "/s"}}, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~SessionTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  std::unique_ptr<TestClient> Open(const std::string& name = "worker") {
    auto client = std::make_unique<TestClient>(server_->addresses()[0]);
    const auto status = client->Open(name);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return client;
  }
  v1::CacheInfo MustCreate(TestClient& client, const std::string& name, bool owned = true) {
    v1::CacheInfo info;
    const auto status = client.Create(name, &info, owned);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }
  std::string RegisterReason(TestClient& client, std::int64_t announced, int descriptor) {
    v1::RegisterBufferResponse reply;
    const auto status = client.RegisterMemfd(announced, &reply);
    if (!status.ok()) return ReasonOf(status);
    return Redeem(client.descriptor_socket, reply.ticket(), descriptor).reason;
  }
  void AwaitSessions(std::size_t count) {
    while (server_->sessions().List().size() != count) std::this_thread::yield();
  }
  // After the closed sessions' caches are detached.
  void AwaitDetached(const std::string& name) {
    while ((*caches_->Find(name))->attached()) std::this_thread::yield();
  }
  std::int64_t Used() { return caches_->devices()[0]->budget().used_bytes(); }
  void AwaitUsed(std::int64_t bytes) {
    while (Used() != bytes) std::this_thread::yield();
  }

  std::atomic<std::int64_t> now_{1};
  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
};

TEST_F(SessionTest, OpenAnswersIdAndSocketAndItsEndEndsTheSession) {
  auto a = Open("a");
  auto b = Open("b");
  EXPECT_EQ(a->session_id.size(), 16u);
  EXPECT_NE(a->session_id, b->session_id);
  EXPECT_EQ(a->descriptor_socket, dir_ + "/s.fds");
  AwaitSessions(2);
  a->Close();
  AwaitSessions(1);
  const auto info = b->ListSessions();
  ASSERT_EQ(info.sessions_size(), 1);
  EXPECT_EQ(info.sessions(0).name(), "b");
  EXPECT_EQ(info.sessions(0).number(), 2u);
  EXPECT_EQ(ReasonOf(TestClient(server_->addresses()[0]).Open("")), "NAME_INVALID");
}

TEST_F(SessionTest, CallsOfUnknownSessionsAreRefused) {
  TestClient client(server_->addresses()[0]);
  v1::CacheInfo info;
  v1::MemoryHandle handle;
  v1::RegisterBufferResponse buffer;
  EXPECT_EQ(ReasonOf(client.Attach("a", &info)), "SESSION_REQUIRED");
  client.session_id = std::string(16, 'x');
  EXPECT_EQ(ReasonOf(client.Create("a", &info)), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(client.Attach("a", &info)), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(client.Export({}, &handle)), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(client.Release({})), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(client.RegisterMemfd(8, &buffer)), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(client.Unregister(1)), "SESSION_NOT_FOUND");
}

TEST_F(SessionTest, ACacheIsTakenOverUnderAHigherGeneration) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  EXPECT_TRUE(info.attached());
  EXPECT_EQ(info.memory_kind(), v1::MEMORY_KIND_MEMFD);
  auto b = Open();
  v1::CacheInfo taken;
  EXPECT_EQ(ReasonOf(b->Attach("c", &taken)), "CACHE_IN_USE");
  EXPECT_EQ(ReasonOf(b->Attach("d", &taken)), "CACHE_NOT_FOUND");
  a->Close();
  AwaitDetached("c");
  ASSERT_EQ(ReasonOf(b->Attach("c", &taken)), "OK");
  EXPECT_GT(taken.cache().generation(), info.cache().generation());
  EXPECT_EQ(taken.layout().total_bytes(), info.layout().total_bytes());
  EXPECT_EQ(ReasonOf(b->Delete(info.cache())), "GENERATION_STALE");
  v1::MemoryHandle handle;
  EXPECT_EQ(ReasonOf(b->Export(info.cache(), &handle)), "GENERATION_STALE");
  EXPECT_EQ(ReasonOf(b->Delete(taken.cache())), "OK");
  EXPECT_EQ(Used(), 0);
}

TEST_F(SessionTest, ADetachedCacheIsKeptForTheGraceTime) {
  auto a = Open();
  MustCreate(*a, "c");
  MustCreate(*a, "operators", false);
  const std::int64_t each = Used() / 2;
  a->Close();
  AwaitDetached("c");
  now_ = 600;
  EXPECT_TRUE(caches_->Reap().has_value());
  EXPECT_TRUE(caches_->Find("c").ok());
  now_ = 601;
  EXPECT_FALSE(caches_->Reap().has_value());
  EXPECT_FALSE(caches_->Find("c").ok());
  AwaitUsed(each);  // freed on the executor
  EXPECT_TRUE(caches_->Find("operators").ok());
}

TEST_F(SessionTest, OperatorsCachesAreMappedByAnySessionAndAttachedByNone) {
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

TEST_F(SessionTest, MappedMemoryIsTheCachesOwn) {
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

TEST_F(SessionTest, ExportAnswersWhatTheHandleIs) {
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

TEST_F(SessionTest, ATicketRedeemedTwiceIsUnknown) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "OK");
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "TICKET_UNKNOWN");
}

TEST_F(SessionTest, ATicketEndsWithItsSession) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  a->Close();
  AwaitDetached("c");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "TICKET_UNKNOWN");
}

TEST_F(SessionTest, ATicketOfADeletedCacheIsRefused) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  v1::MemoryHandle handle;
  ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
  ASSERT_EQ(ReasonOf(a->Delete(info.cache())), "OK");
  const Descriptor self = PidfdOf(getpid());
  EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), self.get()).reason, "CACHE_NOT_FOUND");
}

TEST_F(SessionTest, OnlyAPidfdOfALivingProcessMaps) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  const Descriptor ended = PidfdOf(dead);
  int state = 0;
  waitpid(dead, &state, 0);
  const Descriptor memfd = MakeMemfd(4096);
  for (const int descriptor : {ended.get(), memfd.get()}) {
    v1::MemoryHandle handle;
    ASSERT_EQ(ReasonOf(a->Export(info.cache(), &handle)), "OK");
    EXPECT_EQ(Redeem(a->descriptor_socket, handle.handle(), descriptor).reason, "DESCRIPTOR_MISSING");
  }
  EXPECT_TRUE(a->ListSessions().sessions(0).mapped_caches().empty());
}

TEST_F(SessionTest, AMappedCacheIsNotTakenOverUntilItsMapperReleases) {
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
}

TEST_F(SessionTest, DeletedMemoryCountsUntilItIsReleased) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  ASSERT_NE(a->Map(info.cache()), nullptr);
  const auto used = Used();
  ASSERT_EQ(ReasonOf(a->Delete(info.cache())), "OK");
  EXPECT_EQ(Used(), used);
  ASSERT_EQ(ReasonOf(a->Release(info.cache())), "OK");
  AwaitUsed(0);
}

TEST_F(SessionTest, MapAndUnmapInALoopLeavesNothing) {
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

TEST_F(SessionTest, MappingsAndTicketsOfASessionAreLimited) {
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

TEST_F(SessionTest, ABufferIsRegisteredOnceItsMemfdHasCome) {
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

TEST_F(SessionTest, BadMemfdsAreRefusedWithTheirReasonsAndLeaveNothing) {
  auto a = Open();
  const Descriptor good = MakeMemfd(4096);
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, F_SEAL_SHRINK).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, F_SEAL_GROW).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, Descriptor(open("/dev/zero", O_RDWR)).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4096, PidfdOf(getpid()).get()), "MEMFD_NOT_SEALED");
  EXPECT_EQ(RegisterReason(*a, 4097, good.get()), "MEMFD_TOO_SMALL");
  EXPECT_EQ(RegisterReason(*a, 4096, MakeMemfd(4096, kAllSeals | F_SEAL_WRITE).get()), "HANDLE_INVALID");
  EXPECT_EQ(RegisterReason(*a, 0, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(RegisterReason(*a, -1, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(RegisterReason(*a, INT64_MAX, good.get()), "BUFFER_RANGE");
  EXPECT_EQ(a->ListSessions().sessions(0).buffers(), 0);
  EXPECT_EQ(RegisterReason(*a, 4096, good.get()), "OK");
}

TEST_F(SessionTest, TheSameMemfdTwiceIsRefusedInASessionAndTakenInAnother) {
  auto a = Open();
  auto b = Open();
  const Descriptor memfd = MakeMemfd(4096);
  EXPECT_EQ(RegisterReason(*a, 4096, memfd.get()), "OK");
  EXPECT_EQ(RegisterReason(*a, 4096, memfd.get()), "BUFFER_REGISTERED");
  EXPECT_EQ(a->ListSessions().sessions(0).buffers(), 1);
  EXPECT_EQ(RegisterReason(*b, 4096, memfd.get()), "OK");
}

TEST_F(SessionTest, OtherHandlesAreRefusedWithTheirReasons) {
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

TEST_F(SessionTest, UnregisterAnswersAfterTheLastUse) {
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

TEST_F(SessionTest, ABufferThatIsOnlyReservedIsUnregisteredAtOnce) {
  auto a = Open();
  v1::RegisterBufferResponse reply;
  ASSERT_EQ(ReasonOf(a->RegisterMemfd(4096, &reply)), "OK");
  EXPECT_EQ(ReasonOf(a->Unregister(reply.buffer_id())), "OK");
  EXPECT_EQ(Redeem(a->descriptor_socket, reply.ticket(), MakeMemfd(4096).get()).reason, "BUFFER_NOT_FOUND");
}

TEST_F(SessionTest, TheEndOfASessionTakesNoMemoryFromUnderItsUser) {
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

TEST_F(SessionTest, ADeletedCachesSessionIsTold) {
  auto a = Open();
  auto b = Open();
  const auto info = MustCreate(*a, "c");
  ASSERT_EQ(ReasonOf(b->Delete(info.cache())), "OK");
  v1::OpenResponse event;
  ASSERT_TRUE(a->stream->Read(&event));
  EXPECT_EQ(event.cache_lost().cache().name(), "c");
  EXPECT_EQ(event.cache_lost().cache().generation(), info.cache().generation());
}

TEST_F(SessionTest, DrainTellsSessionsAndEndsThem) {
  auto a = Open();
  const auto info = MustCreate(*a, "c");
  server_->Drain(std::chrono::minutes(1));  // returns long before
  v1::OpenResponse event;
  ASSERT_TRUE(a->stream->Read(&event));
  EXPECT_TRUE(event.has_draining());
  EXPECT_FALSE(a->stream->Read(&event));
  EXPECT_EQ(ReasonOf(a->stream->Finish()), "DRAINING");
  a->stream.reset();
  EXPECT_TRUE(server_->sessions().List().empty());
  EXPECT_FALSE((*caches_->Find("c"))->attached());
}

// Passes bytes of one TCP connection on, until it falls silent: then both ends stay connected to a host that
// has vanished.
class Proxy {
 public:
  explicit Proxy(int server_port) : server_port_(server_port), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = Loopback(0);
    socklen_t bytes = sizeof(address);
    if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
        listen(listener_.get(), 1) != 0 ||
        getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
      std::abort();
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Proxy() {
    FallSilent();
    thread_.join();
  }
  int port() const { return port_; }
  void FallSilent() { eventfd_write(silent_.get(), 1); }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    return address;
  }
  void Run() {
    client_ = Descriptor(accept(listener_.get(), nullptr, nullptr));
    server_ = Descriptor(socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = Loopback(server_port_);
    connect(server_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    pollfd polled[] = {{silent_.get(), POLLIN, 0}, {client_.get(), POLLIN, 0}, {server_.get(), POLLIN, 0}};
    std::vector<char> bytes(1 << 16);
    while (poll(polled, 3, -1) > 0 && polled[0].revents == 0) {
      for (int from : {1, 2}) {
        if (polled[from].revents == 0) continue;
        const ssize_t got = read(polled[from].fd, bytes.data(), bytes.size());
        if (got <= 0 || write(polled[3 - from].fd, bytes.data(), static_cast<std::size_t>(got)) != got)
          return;
      }
    }
  }

  const int server_port_;
  const Descriptor silent_{eventfd(0, EFD_CLOEXEC)};
  const Descriptor listener_;
  Descriptor client_;
  Descriptor server_;
  int port_ = 0;
  std::thread thread_;
};

TEST_F(SessionTest, AVanishedHostsSessionEndsByKeepalive) {
  Server::Options options{.listen = {":0"}};
  options.keepalive = std::chrono::milliseconds(200);
  auto tcp = Server::Start(options, *caches_);
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  const std::string& address = (*tcp)->addresses()[0];
  Proxy proxy(std::stoi(address.substr(address.rfind(':') + 1)));
  TestClient client("127.0.0.1:" + std::to_string(proxy.port()));
  ASSERT_TRUE(client.Open("remote").ok());
  ASSERT_EQ((*tcp)->sessions().List().size(), 1u);
  proxy.FallSilent();
  const auto start = std::chrono::steady_clock::now();
  while (!(*tcp)->sessions().List().empty()) std::this_thread::yield();
  std::printf("ended after %.0f ms\n",
              std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
}

TEST_F(SessionTest, BothSocketsGetTheModeAskedFor) {
  Server::Options options{.listen = {"unix:" + dir_ + "/wide"}};
  options.socket_access = {.mode = 0660, .group = getegid()};
  auto server = Server::Start(options, *caches_);
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* name : {"/wide", "/wide.fds"}) {
    struct stat info {};
    ASSERT_EQ(stat((dir_ + name).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0660u) << name;
  }
}

TEST_F(SessionTest, WithoutADescriptorSocketMemoryIsNotShared) {
  auto tcp = Server::Start({.listen = {":0"}}, *caches_);
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  TestClient client((*tcp)->addresses()[0]);
  ASSERT_TRUE(client.Open("remote").ok());
  EXPECT_EQ(client.descriptor_socket, "");
  const auto info = MustCreate(client, "c");
  v1::MemoryHandle handle;
  EXPECT_EQ(ReasonOf(client.Export(info.cache(), &handle)), "DESCRIPTOR_SOCKET_OFF");
  v1::RegisterBufferResponse reply;
  EXPECT_EQ(ReasonOf(client.RegisterMemfd(4096, &reply)), "DESCRIPTOR_SOCKET_OFF");
  client.Close();
}

}  // namespace
}  // namespace kvsummary
