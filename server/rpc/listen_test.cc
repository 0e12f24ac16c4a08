#include "server/rpc/listen.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "server/memory/socket_file.h"

namespace kvsummary {
namespace {

class ListenTest : public ::testing::Test {
 protected:
  ListenTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    path_ = dir_ + "/s";
  }
  ~ListenTest() override { std::filesystem::remove_all(dir_); }

  // A bound socket; listening unless `stale`.
  int Bind(bool stale, int backlog = 8) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (!stale) {
      EXPECT_EQ(listen(fd, backlog), 0);
    }
    return fd;
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::string path_;
};

TEST_F(ListenTest, SecondLockIsRefusedUntilTheFirstIsGone) {
  {
    const auto first = SocketLock::Take(path_);
    ASSERT_TRUE(first.ok()) << first.status();
    const auto second = SocketLock::Take(path_);
    EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(second.status().message().find("another summaryd"), absl::string_view::npos);
  }
  EXPECT_TRUE(SocketLock::Take(path_).ok());
}

TEST_F(ListenTest, StaleSocketIsRemoved) {
  close(Bind(true));
  EXPECT_TRUE(SocketLock::Take(path_).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(ListenTest, ServedSocketIsLeftAlone) {
  const int fd = Bind(false);
  EXPECT_FALSE(SocketLock::Take(path_).ok());
  EXPECT_TRUE(std::filesystem::exists(path_));
  close(fd);
}

TEST_F(ListenTest, SocketWhoseServerDoesNotAcceptIsLeftAlone) {
  const int server = Bind(false, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path_.c_str());
  std::vector<int> clients;
  int result = 0;
  while (result == 0) {  // until the backlog is full
    clients.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    result = connect(clients.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  const auto lock = SocketLock::Take(path_);
  EXPECT_NE(lock.status().message().find("another process serves"), absl::string_view::npos);
  EXPECT_TRUE(std::filesystem::exists(path_));
  for (const int client : clients) close(client);
  close(server);
}

TEST_F(ListenTest, OtherFilesAreLeftAlone) {
  std::ofstream(path_) << "precious";
  EXPECT_FALSE(SocketLock::Take(path_).ok());
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
  std::filesystem::remove(path_);
  std::filesystem::create_symlink(dir_ + "/nowhere", path_);
  EXPECT_FALSE(SocketLock::Take(path_).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
}

TEST_F(ListenTest, MissingFolderIsNamed) {
  const auto lock = SocketLock::Take(dir_ + "/none/s");
  EXPECT_NE(lock.status().message().find("/none/s"), absl::string_view::npos);
}

TEST_F(ListenTest, LockFileOfALinkIsRefused) {
  std::filesystem::create_symlink(dir_ + "/target", path_ + ".lock");
  EXPECT_FALSE(SocketLock::Take(path_).ok());
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/target"));
}

TEST(ListenAddress, FormsAreParsed) {
  EXPECT_EQ(ParseListenAddress("unix:/a/b")->path, "/a/b");
  EXPECT_EQ(ParseListenAddress(":0")->grpc, "127.0.0.1:0");
  EXPECT_EQ(ParseListenAddress("0.0.0.0:50051")->grpc, "0.0.0.0:50051");
  EXPECT_EQ(ParseListenAddress("[::1]:1")->grpc, "[::1]:1");
  for (const std::string& bad :
       {std::string(), std::string("host"), std::string("unix:"), std::string("h:65536"), std::string("h:-1"),
        std::string("h:x"), std::string("unix:/a/%62"), std::string("%75nix:1"),
        std::string("unix-abstract:1"), "unix:/" + std::string(107, 'x')}) {
    EXPECT_FALSE(ParseListenAddress(bad).ok()) << bad;
  }
  EXPECT_TRUE(ParseListenAddress("unix:/" + std::string(106, 'x')).ok());
}

}  // namespace
}  // namespace kvsummary
