#include "client/ucx_perftest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "client/descriptor_client.h"
#include "client/raw_transfer.h"

namespace kvsummary {
namespace {

using testing::HasSubstr;

// A ucx_perftest of the test's own, alone in $PATH.
class FakeUcxPerftest : public ::testing::Test {
 protected:
  FakeUcxPerftest() {
    char folder[] = "/tmp/kvs-XXXXXX";
    folder_ = mkdtemp(folder);
    setenv("PATH", folder_.c_str(), 1);
  }
  ~FakeUcxPerftest() override {
    setenv("PATH", path_.c_str(), 1);
    std::filesystem::remove_all(folder_);
  }

  // What its second process does, and its first.
  void Install(const std::string& client, const std::string& server = "exec tail -f /dev/null") {
    const std::string program = folder_ + "/ucx_perftest";
    std::ofstream(program) << "#!/bin/bash\nPATH=/usr/bin:/bin\ncd " << folder_
                           << "\nif [[ $1 == -p ]]; then\n"
                           << server << "\nfi\n"
                           << client << "\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string path_ = std::getenv("PATH");
  std::string folder_;
};

constexpr const char* kFigures =
    "echo iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
    "echo 500,0.520,3227.656,2481.638,309.82,402.50,310,403\n";

TEST_F(FakeUcxPerftest, TheOverallRateIsTaken) {
  Install(std::string("echo \"$@\" > arguments; env > environment\n") + kFigures);
  const auto result = RunUcxPerftest(1 << 20, 500);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_DOUBLE_EQ(result->bytes_per_second, 402.5 * (1 << 20));
  EXPECT_THAT(Read("arguments"), HasSubstr("-t ucp_am_bw -s 1048576 -n 500 -w 100 -f -v"));
  EXPECT_THAT(Read("environment"), HasSubstr("UCX_TLS=tcp\n")) << "as hand-offs'";
  EXPECT_THAT(Read("environment"), HasSubstr("UCX_NET_DEVICES=lo\n"));
}

TEST_F(FakeUcxPerftest, ItIsTriedUntilTheFirstProcessListens) {
  Install(std::string("if mkdir tried; then echo connection refused; exit 255; fi\n") + kFigures);
  EXPECT_TRUE(RunUcxPerftest(1 << 20, 500).ok());
}

TEST_F(FakeUcxPerftest, OneThatEndsIsNotWaitedFor) {
  Install("", "exit 1");
  EXPECT_EQ(RunUcxPerftest(1 << 20, 500).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(FakeUcxPerftest, WhereThereIsNoneItIsSaid) {
  const auto result = RunUcxPerftest(1 << 20, 500);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("ucx-utils"));
  const auto raw = MakeRawTransfers("unix:/run/s", 1 << 20, true);
  ASSERT_TRUE(raw.ok()) << raw.status();
  EXPECT_EQ(raw->transfers.size(), 2U);
  EXPECT_THAT(raw->missing, testing::ElementsAre(HasSubstr("ucx-utils")));
}

TEST_F(FakeUcxPerftest, WhatCannotBeRunIsSaidToo) {
  Install(kFigures);
  std::filesystem::permissions(folder_ + "/ucx_perftest", std::filesystem::perms::owner_read);
  const auto result = RunUcxPerftest(1 << 20, 500);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("Permission denied"));
}

TEST_F(FakeUcxPerftest, BothProcessesGoWithTheirParent) {
  Install("echo $$ > client\nexec tail -f /dev/null", "echo $$ > server\nexec tail -f /dev/null");
  for (const char* name : {"/client", "/server"}) ASSERT_EQ(mkfifo((folder_ + name).c_str(), 0600), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    (void)RunUcxPerftest(1 << 20, 500);
    _exit(0);
  }
  std::vector<OwnedDescriptor> processes;
  for (const char* name : {"server", "client"}) {
    processes.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, std::stoi(Read(name)), 0)));
    ASSERT_TRUE(processes.back().valid());
  }
  kill(parent, SIGKILL);
  ASSERT_EQ(waitpid(parent, nullptr, 0), parent);
  for (const OwnedDescriptor& process : processes) {
    pollfd ended{.fd = process.get(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ended, 1, 10'000), 1);
  }
}

TEST_F(FakeUcxPerftest, ATransferOfItTakesWhatItsRateSays) {
  Install(kFigures);
  const auto raw = MakeRawTransfers("unix:/run/s", 1 << 20, true);
  ASSERT_TRUE(raw.ok()) << raw.status();
  ASSERT_EQ(raw->transfers.size(), 3U);
  const auto seconds = raw->transfers.back()->Move(805 << 20);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_DOUBLE_EQ(*seconds, 2);
}

TEST(UcxPerftestTest, TheInstalledOneGivesARate) {
  const auto result = RunUcxPerftest(1 << 20, 20);
  if (result.status().code() == absl::StatusCode::kNotFound) GTEST_SKIP() << result.status();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->bytes_per_second, 1e6);
  EXPECT_GT(result->cpu_seconds, 0);
}

}  // namespace
}  // namespace kvsummary
