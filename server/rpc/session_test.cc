// Sessions as clients meet them: real sockets, a clock that the test moves.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <thread>

#include "server/rpc/session_fixture.h"

namespace kvsummary {
namespace {

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
  seconds_ += 599;
  EXPECT_TRUE(caches_->Reap().has_value());
  EXPECT_TRUE(caches_->Find("c").ok());
  seconds_ += 1;
  EXPECT_FALSE(caches_->Reap().has_value());
  EXPECT_FALSE(caches_->Find("c").ok());
  AwaitUsed(each);  // freed on the executor
  EXPECT_TRUE(caches_->Find("operators").ok());
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
