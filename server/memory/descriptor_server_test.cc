// The descriptor socket against peers that do not keep to its protocol.
#include "server/memory/descriptor_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "proto/descriptor_socket.h"
#include "server/error.h"
#include "server/memory/descriptor_message.h"

namespace kvsummary {
namespace {

using Time = std::chrono::steady_clock::time_point;

class DescriptorServerTest : public ::testing::Test {
 protected:
  DescriptorServerTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
  }
  ~DescriptorServerTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  DescriptorServer::Options MakeOptions() {
    return {.path = dir_ + "/d",
            .access = {},
            .redeem = [this](const std::string& ticket, Descriptor) -> absl::StatusOr<DescriptorAnswer> {
              ++redeemed_;
              if (ticket != std::string(kTicketBytes, 't')) return Refuse(Reason::TICKET_UNKNOWN, "", "no");
              return DescriptorAnswer{.descriptor = Memfd(), .size_bytes = 77};
            },
            .now = [this] { return Time(std::chrono::seconds(now_.load())); }};
  }
  void Start(DescriptorServer::Options options) {
    auto server = DescriptorServer::Start(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  void Start() { Start(MakeOptions()); }

  static Descriptor Memfd() { return Descriptor(memfd_create("test", MFD_CLOEXEC)); }
  Descriptor Connect() {
    Descriptor connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = dir_ + "/d";
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return connection;
  }
  // The reason of the reply, "OK", or "CLOSED".
  static std::string Reply(const Descriptor& connection, std::size_t* descriptors = nullptr) {
    pollfd polled{connection.get(), POLLIN, 0};
    poll(&polled, 1, -1);
    DescriptorReply reply;
    std::vector<Descriptor> received;
    if (ReceiveMessage(connection.get(), &reply, sizeof(reply), received) != ReceiveResult::kMessage) {
      return "CLOSED";
    }
    if (descriptors != nullptr) *descriptors = received.size();
    return reply.code == 0 ? "OK" : reply.reason;
  }
  static DescriptorRequest Request(char fill = 't') {
    DescriptorRequest request;
    std::memset(request.ticket, fill, sizeof(request.ticket));
    return request;
  }
  // Sends bytes with copies of one descriptor.
  static void Send(const Descriptor& connection, const void* data, std::size_t bytes, int copies) {
    const Descriptor memfd = Memfd();
    std::vector<int> fds(static_cast<std::size_t>(copies), memfd.get());
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    iovec part{const_cast<void*>(data), bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (copies > 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
    }
    ASSERT_EQ(sendmsg(connection.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }
  static std::ptrdiff_t OpenFiles() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator{});
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::atomic<int> now_{100};
  std::atomic<int> redeemed_{0};
  std::unique_ptr<DescriptorServer> server_;
};

TEST_F(DescriptorServerTest, AnswersOneRequestAfterTheOther) {
  Start();
  const Descriptor peer = Connect();
  for (int i = 0; i < 3; ++i) {
    const auto request = Request();
    Send(peer, &request, sizeof(request), 1);
    std::size_t descriptors = 0;
    EXPECT_EQ(Reply(peer, &descriptors), "OK");
    EXPECT_EQ(descriptors, 1u);
  }
  const auto unknown = Request('x');
  Send(peer, &unknown, sizeof(unknown), 1);
  EXPECT_EQ(Reply(peer), "TICKET_UNKNOWN");
}

TEST_F(DescriptorServerTest, RubbishEndsTheConnectionAndLeaksNoDescriptor) {
  Start();
  const auto files = OpenFiles();
  std::string noise(4096, 'n');
  auto magic = Request();
  magic.magic = 1;
  auto reserved = Request();
  reserved.reserved = 1;
  const auto good = Request();
  struct Case {
    const void* data;
    std::size_t bytes;
    int descriptors;
  };
  for (const Case& c : {Case{noise.data(), 4096, 1}, Case{noise.data(), 1, 1}, Case{noise.data(), 40, 0},
                        Case{&magic, sizeof(magic), 1}, Case{&reserved, sizeof(reserved), 1},
                        Case{&good, sizeof(good) - 1, 1}, Case{noise.data(), 0, 1},
                        Case{&good, sizeof(good), 9},  // more than a message may have: cut off
                        Case{&good, sizeof(good), 200}}) {
    const Descriptor peer = Connect();
    Send(peer, c.data, c.bytes, c.descriptors);
    EXPECT_EQ(Reply(peer), "CLOSED") << c.bytes << " bytes, " << c.descriptors << " descriptors";
  }
  EXPECT_EQ(redeemed_, 0);
  while (OpenFiles() > files) std::this_thread::yield();
}

TEST_F(DescriptorServerTest, AnotherNumberOfDescriptorsThanOneIsRefusedAndClosed) {
  Start();
  const auto files = OpenFiles();
  {
    const Descriptor peer = Connect();
    for (const int count : {0, 2, 8}) {
      const auto request = Request();
      Send(peer, &request, sizeof(request), count);
      EXPECT_EQ(Reply(peer), "DESCRIPTOR_MISSING");
    }
    while (OpenFiles() != files + 2) std::this_thread::yield();  // both ends of the connection
    const auto request = Request();
    Send(peer, &request, sizeof(request), 1);
    EXPECT_EQ(Reply(peer), "OK");  // the connection goes on
  }
  EXPECT_EQ(redeemed_, 1);
  while (OpenFiles() > files) std::this_thread::yield();
}

TEST_F(DescriptorServerTest, WhoSaysNothingIsCutOffAfterFiveSeconds) {
  Start();
  const Descriptor silent = Connect();
  const Descriptor talking = Connect();
  const auto request = Request();
  Send(talking, &request, sizeof(request), 1);
  EXPECT_EQ(Reply(talking), "OK");
  now_ += 4;
  Send(talking, &request, sizeof(request), 1);
  EXPECT_EQ(Reply(talking), "OK");
  now_ += 1;
  Send(talking, &request, sizeof(request), 1);  // wakes the server, whose clock is the test's
  EXPECT_EQ(Reply(talking), "OK");
  EXPECT_EQ(Reply(silent), "CLOSED");
  Send(talking, &request, sizeof(request), 1);
  EXPECT_EQ(Reply(talking), "OK");
}

TEST_F(DescriptorServerTest, WhoRedeemsNothingIsCutOffAfterFiveSecondsWhateverItSays) {
  Start();
  const Descriptor guessing = Connect();
  const Descriptor empty = Connect();
  const auto unknown = Request('x');
  for (int second = 0; second < 5; ++second, ++now_) {
    Send(guessing, &unknown, sizeof(unknown), 1);
    EXPECT_EQ(Reply(guessing), "TICKET_UNKNOWN");
    Send(empty, &unknown, sizeof(unknown), 0);
    EXPECT_EQ(Reply(empty), "DESCRIPTOR_MISSING");
  }
  const Descriptor awakes = Connect();
  EXPECT_EQ(Reply(guessing), "CLOSED");
  EXPECT_EQ(Reply(empty), "CLOSED");
}

TEST_F(DescriptorServerTest, MorePeersThanTheLimitWaitForAPlace) {
  Start();
  std::vector<Descriptor> peers;
  for (std::size_t i = 0; i < kMaxDescriptorPeers + 5; ++i) peers.push_back(Connect());
  const auto request = Request();
  Send(peers.back(), &request, sizeof(request), 1);
  Send(peers[100], &request, sizeof(request), 1);
  EXPECT_EQ(Reply(peers[100]), "OK");
  pollfd waiting{peers.back().get(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  for (std::size_t i = 0; i < 5; ++i) peers[i] = Descriptor();
  EXPECT_EQ(Reply(peers.back()), "OK");
}

TEST_F(DescriptorServerTest, AnotherUserIsRefusedUnlessTheSocketIsOpenToOthers) {
  constexpr uid_t kOther = 65534;
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  for (const bool open_to_others : {false, true}) {
    auto options = MakeOptions();
    if (open_to_others) options.access.mode = 0666;
    Start(std::move(options));
    chmod(dir_.c_str(), 0755);
    chmod((dir_ + "/d").c_str(), 0666);  // let it through to the check
    bool other_user = false;
    std::string reply;
    std::thread peer([&] {  // the system call, not the function: of this thread alone
      other_user = syscall(SYS_setresuid, -1, kOther, -1) == 0;
      const Descriptor connection = Connect();
      const auto request = Request();
      const Descriptor memfd = Memfd();
      SendMessage(connection.get(), &request, sizeof(request), memfd.get());
      reply = Reply(connection);
    });
    peer.join();
    server_.reset();
    if (!other_user) GTEST_SKIP() << "no other user in this user namespace";
    EXPECT_EQ(reply, open_to_others ? "OK" : "PEER_NOT_ALLOWED");
  }
}

TEST_F(DescriptorServerTest, TheSocketIsPrivateUnlessAsked) {
  Start();
  struct stat info {};
  ASSERT_EQ(stat((dir_ + "/d").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const auto second = DescriptorServer::Start(MakeOptions());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/d"));
  auto options = MakeOptions();
  options.access = {.mode = 0660, .group = getegid()};
  Start(options);
  ASSERT_EQ(stat((dir_ + "/d").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
}

TEST_F(DescriptorServerTest, ALiveSocketIsSeenThoughItsLockFileIsGone) {
  Start();
  std::filesystem::remove(dir_ + "/d.lock");
  EXPECT_EQ(DescriptorServer::Start(MakeOptions()).status().code(), absl::StatusCode::kFailedPrecondition);
  const auto request = Request();
  const Descriptor peer = Connect();
  Send(peer, &request, sizeof(request), 1);
  EXPECT_EQ(Reply(peer), "OK");
}

TEST_F(DescriptorServerTest, PathsThatDoNotFitAreRefused) {
  auto options = MakeOptions();
  options.path = "/tmp/" + std::string(110, 'x');
  EXPECT_EQ(DescriptorServer::Start(options).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvsummary
