// Helpers of one machine, over its loopback interface, fetch from each other: bytes, refusals, and what
// happens when one of them is killed or stopped.
#include "server/ucx/ucx_helper.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "server/ucx/environment.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::uint64_t kToken = 0x1234567890abcdef;

std::string BinaryPath(const std::string& name) {
  return std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") + "/server/ucx/" +
         name;
}

// A memfd, mapped.
class Memory {
 public:
  explicit Memory(std::int64_t bytes, int seals = 0)
      : bytes_(bytes), fd_(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    if (ftruncate(fd_.get(), bytes) != 0) std::abort();
    data_ = static_cast<char*>(mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
    if (data_ == MAP_FAILED || fcntl(fd_.get(), F_ADD_SEALS, seals) != 0) std::abort();
  }
  ~Memory() { munmap(data_, size()); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void Fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::int64_t i = 0; i < bytes_; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(data_ + i, &word, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes_ - i)));
    }
  }
  std::string_view At(std::int64_t offset, std::int64_t bytes) const {
    return {data_ + offset, static_cast<std::size_t>(bytes)};
  }
  char* data() const { return data_; }
  std::size_t size() const { return static_cast<std::size_t>(bytes_); }
  std::int64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  const std::int64_t bytes_;
  const Descriptor fd_;
  char* data_;
};

// A range in pieces of 1 MiB, all at once: the status of each.
std::vector<absl::Status> FetchPieces(UcxHelper& target, UcxHelper::Range range) {
  const std::int64_t bytes = range.bytes;
  std::vector<absl::Status> statuses(static_cast<std::size_t>((bytes + kMiB - 1) / kMiB));
  absl::BlockingCounter left(static_cast<int>(statuses.size()));
  for (absl::Status& status : statuses) {
    const std::int64_t done = (&status - statuses.data()) * kMiB;
    UcxHelper::Range piece = range;
    piece.from += done;
    piece.to += done;
    piece.bytes = std::min(kMiB, bytes - done);
    target.Fetch(piece, [&status, &left](absl::Status s) {
      status = std::move(s);
      left.DecrementCount();
    });
  }
  left.Wait();
  return statuses;
}

absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  const auto bad = std::find_if(statuses.begin(), statuses.end(), [](const auto& s) { return !s.ok(); });
  return bad == statuses.end() ? absl::OkStatus() : *bad;
}

void RevokeAndWait(UcxHelper& source, std::uint64_t token) {
  absl::Notification revoked;
  source.Revoke(token, [&] { revoked.Notify(); });
  revoked.WaitForNotification();
}

class UcxHelperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto helper = UcxHelper::Start(MakeOptions());
    if (absl::IsUnimplemented(helper.status())) {
      GTEST_SKIP() << "no UCX here: " << helper.status().message();
    }
    ASSERT_TRUE(helper.ok()) << helper.status();
    source_ = *std::move(helper);
    target_ = StartOne();
    staging_.Fill(1);
    ASSERT_EQ(source_->AddStaging(staging_.fd(), staging_.bytes()).value(), 0U);
    ASSERT_EQ(target_->AddLanding(landing_.fd(), landing_.bytes()).value(), 0U);
  }

  UcxHelper::Options MakeOptions() const {
    return {.binary = BinaryPath("summaryd-ucx"), .net_device = "lo", .progress_deadline = deadline_};
  }
  std::unique_ptr<UcxHelper> StartOne() {
    auto helper = UcxHelper::Start(MakeOptions());
    EXPECT_TRUE(helper.ok()) << helper.status();
    return helper.ok() ? *std::move(helper) : nullptr;
  }
  void LendAll(UcxHelper& source) { ASSERT_TRUE(source.Lend(kToken, 0, 0, staging_.bytes()).ok()); }
  UcxHelper::Range Range(std::int64_t from, std::int64_t bytes, std::int64_t to) const {
    return {.peer = source_->address(), .token = kToken, .from = from, .bytes = bytes, .to = to};
  }
  absl::Status Fetch(const UcxHelper::Range& range) { return FirstError(FetchPieces(*target_, range)); }
  void ExpectFetched(std::int64_t from, std::int64_t bytes, std::int64_t to) {
    std::memset(landing_.data(), 0, landing_.size());
    const absl::Status status = Fetch(Range(from, bytes, to));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(staging_.At(from, bytes), landing_.At(to, bytes)) << bytes << " bytes";
    if (to > 0) {
      EXPECT_EQ(landing_.data()[to - 1], 0);
    }
    EXPECT_EQ(landing_.data()[to + bytes], 0);
  }
  // Many fetches are under way and some have ended; then `strike`. Their statuses, and how long they took
  // after it.
  std::pair<std::vector<absl::Status>, milliseconds> Strike(const std::function<void()>& strike) {
    constexpr int kFetches = 2000;
    std::vector<absl::Status> statuses(kFetches);
    absl::BlockingCounter left(kFetches);
    absl::Notification begun;
    std::atomic<int> ended = 0;
    for (int i = 0; i < kFetches; ++i) {
      const std::int64_t at = (i % 16) * kMiB;
      target_->Fetch(Range(at, kMiB, at), [&, i](absl::Status s) {
        statuses[static_cast<std::size_t>(i)] = std::move(s);
        if (++ended == 10) begun.Notify();
        left.DecrementCount();
      });
    }
    begun.WaitForNotification();
    const Clock::time_point start = Clock::now();
    strike();
    left.Wait();
    return {statuses, std::chrono::duration_cast<milliseconds>(Clock::now() - start)};
  }

  milliseconds deadline_{2000};
  Memory staging_{97 * kMiB, F_SEAL_FUTURE_WRITE};
  Memory landing_{97 * kMiB};
  std::unique_ptr<UcxHelper> source_, target_;
};

// Half of the deadline: stopped processes are what is waited for.
class UcxStoppedTest : public UcxHelperTest {
 protected:
  UcxStoppedTest() { deadline_ = milliseconds(400); }
};

TEST_F(UcxHelperTest, SaysItsVersionAndAddress) {
  EXPECT_EQ(std::count(source_->version().begin(), source_->version().end(), '.'), 2) << source_->version();
  EXPECT_EQ(source_->version(), target_->version());
  EXPECT_EQ(source_->address().rfind("127.0.0.1:", 0), 0U) << source_->address();
  EXPECT_NE(source_->address(), target_->address());
  EXPECT_TRUE(source_->alive());
}

TEST_F(UcxHelperTest, BringsEveryByteOfEverySize) {
  LendAll(*source_);
  for (const std::int64_t bytes :
       {std::int64_t{1}, std::int64_t{7}, std::int64_t{4096}, std::int64_t{16384}, std::int64_t{16385},
        std::int64_t{65537}, kMiB - 1, kMiB, kMiB + 1, 8 * kMiB + 3, 9 * kMiB}) {
    ExpectFetched(0, bytes, 0);
    ExpectFetched(12345, bytes, 777);
  }
  ExpectFetched(3, 96 * kMiB, 5);
}

TEST_F(UcxHelperTest, FetchesBothWaysAtOnce) {
  Memory back(8 * kMiB, F_SEAL_FUTURE_WRITE), back_landing(8 * kMiB);
  back.Fill(2);
  LendAll(*source_);
  ASSERT_EQ(target_->AddStaging(back.fd(), back.bytes()).value(), 0U);
  ASSERT_EQ(source_->AddLanding(back_landing.fd(), back_landing.bytes()).value(), 0U);
  ASSERT_TRUE(target_->Lend(7, 0, 0, back.bytes()).ok());
  absl::Status there;
  std::thread other([&] {
    there = FirstError(FetchPieces(*source_, {.peer = target_->address(), .token = 7, .bytes = 8 * kMiB}));
  });
  const absl::Status here = Fetch(Range(0, 32 * kMiB, 0));
  other.join();
  EXPECT_TRUE(here.ok()) << here;
  EXPECT_TRUE(there.ok()) << there;
  EXPECT_EQ(staging_.At(0, 32 * kMiB), landing_.At(0, 32 * kMiB));
  EXPECT_EQ(back.At(0, 8 * kMiB), back_landing.At(0, 8 * kMiB));
}

TEST_F(UcxHelperTest, RefusesATokenThatLendsNothing) {
  EXPECT_TRUE(absl::IsNotFound(Fetch(Range(0, 100, 0))));
  LendAll(*source_);
  UcxHelper::Range other = Range(0, 100, 0);
  other.token = kToken + 1;
  EXPECT_TRUE(absl::IsNotFound(Fetch(other)));
  ExpectFetched(0, kMiB, 0);
  RevokeAndWait(*source_, kToken);
  for (const absl::Status& status : FetchPieces(*target_, Range(0, 20 * kMiB, 0))) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
  }
  LendAll(*source_);
  ExpectFetched(0, kMiB, 0);
}

TEST_F(UcxHelperTest, RefusesARangeThatIsNotWithinOneLent) {
  Memory second(kMiB, F_SEAL_FUTURE_WRITE);
  second.Fill(3);
  ASSERT_EQ(source_->AddStaging(second.fd(), second.bytes()).value(), 1U);
  ASSERT_TRUE(source_->Lend(kToken, 0, 1000, 500).ok());
  ASSERT_TRUE(source_->Lend(kToken, 0, 1500, 500).ok());
  ASSERT_TRUE(source_->Lend(kToken, 1, 4000, 100).ok());
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const auto& [from, bytes] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{999, 10},
                                                          {1000, 501},
                                                          {1400, 200},
                                                          {1999, 2},
                                                          {0, 1},
                                                          {-1, 1},
                                                          {4000, 10},
                                                          {kMax, 1},
                                                          {kMax - 5, 10},
                                                          {std::numeric_limits<std::int64_t>::min(), 10}}) {
    const absl::Status status = Fetch(Range(from, bytes, 0));
    EXPECT_TRUE(absl::IsOutOfRange(status)) << from << " " << bytes << ": " << status;
  }
  UcxHelper::Range other = Range(4000, 100, 0);
  other.staging = 2;
  EXPECT_TRUE(absl::IsOutOfRange(Fetch(other)));
  other.staging = 1;
  EXPECT_TRUE(Fetch(other).ok());
  EXPECT_EQ(second.At(4000, 100), landing_.At(0, 100));
  ExpectFetched(1000, 500, 0);
  ExpectFetched(1999, 1, 0);
}

TEST_F(UcxHelperTest, RefusesItsOwnDaemonsMistakes) {
  LendAll(*source_);
  EXPECT_TRUE(absl::IsInvalidArgument(source_->Lend(kToken, 0, 1, staging_.bytes())));
  EXPECT_TRUE(absl::IsInvalidArgument(source_->Lend(kToken, 1, 0, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(source_->AddStaging(staging_.fd(), staging_.bytes() + 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(source_->AddStaging(landing_.fd(), landing_.bytes()).status()))
      << "the process could write to it";
  EXPECT_TRUE(absl::IsInvalidArgument(source_->AddLanding(-1, 1).status()));
  const auto fetch = [&](UcxHelper::Range range) {
    absl::Notification ended;
    absl::Status status;
    target_->Fetch(range, [&](absl::Status s) {
      status = std::move(s);
      ended.Notify();
    });
    ended.WaitForNotification();
    return status;
  };
  EXPECT_TRUE(absl::IsInvalidArgument(fetch(Range(0, 0, 0))));
  EXPECT_TRUE(absl::IsInvalidArgument(fetch(Range(0, kMiB + 1, 0))));
  EXPECT_TRUE(absl::IsInvalidArgument(fetch(Range(0, 100, landing_.bytes() - 99))));
  EXPECT_TRUE(absl::IsInvalidArgument(fetch(Range(0, 100, -1))));
  UcxHelper::Range range = Range(0, 100, 0);
  range.landing = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(fetch(range)));
  for (const char* peer :
       {"", "localhost:1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "::1:1"}) {
    range = Range(0, 100, 0);
    range.peer = peer;
    EXPECT_TRUE(absl::IsInvalidArgument(fetch(range))) << peer;
  }
  // The numbers of memories go on after a refusal.
  EXPECT_EQ(source_->AddStaging(staging_.fd(), staging_.bytes()).value(), 1U);
  ExpectFetched(0, kMiB, 0);
}

TEST_F(UcxHelperTest, NothingListensAtThePeersAddress) {
  const std::string gone = StartOne()->address();
  UcxHelper::Range range = Range(0, 100, 0);
  range.peer = gone;
  const absl::Status status = Fetch(range);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  LendAll(*source_);
  ExpectFetched(0, kMiB, 0);
}

TEST_F(UcxHelperTest, NothingIsReadOnceARevocationIsDone) {
  LendAll(*source_);
  const Memory before(staging_.bytes());
  std::memcpy(before.data(), staging_.data(), staging_.size());
  absl::Notification revoked;
  const auto [statuses, took] = Strike([&] {
    source_->Revoke(kToken, [&] { revoked.Notify(); });
    revoked.WaitForNotification();
    std::memset(staging_.data(), 0, staging_.size());
  });
  EXPECT_TRUE(absl::IsNotFound(statuses.back())) << statuses.back();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
  EXPECT_EQ(before.At(0, 2 * kMiB), landing_.At(0, 2 * kMiB));
  EXPECT_LT(took, deadline_);
}

// Several times: what is being received then ends at different places.
TEST_F(UcxHelperTest, OutlivesSourcesThatAreKilled) {
  LendAll(*source_);
  for (int i = 0; i < 5; ++i) {
    const auto [statuses, took] = Strike([&] { kill(source_->pid(), SIGKILL); });
    EXPECT_TRUE(absl::IsUnavailable(statuses.back())) << statuses.back();
    for (const absl::Status& status : statuses)
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    EXPECT_LT(took, deadline_);
    ASSERT_TRUE(target_->alive());

    source_ = StartOne();
    ASSERT_EQ(source_->AddStaging(staging_.fd(), staging_.bytes()).value(), 0U);
    LendAll(*source_);
    ExpectFetched(0, 8 * kMiB, 0);
  }
}

TEST_F(UcxHelperTest, OutlivesTargetsThatAreKilled) {
  LendAll(*source_);
  for (int i = 0; i < 3; ++i) {
    const auto [statuses, took] = Strike([&] { kill(target_->pid(), SIGKILL); });
    EXPECT_TRUE(absl::IsUnavailable(statuses.back())) << statuses.back();
    EXPECT_LT(took, deadline_);
    EXPECT_FALSE(target_->alive());
    EXPECT_TRUE(absl::IsUnavailable(Fetch(Range(0, 100, 0))));
    EXPECT_TRUE(absl::IsUnavailable(target_->AddLanding(landing_.fd(), landing_.bytes()).status()));

    target_ = StartOne();
    ASSERT_EQ(target_->AddLanding(landing_.fd(), landing_.bytes()).value(), 0U);
    ExpectFetched(0, 8 * kMiB, 0);
  }
  RevokeAndWait(*source_, kToken);
}

TEST_F(UcxHelperTest, AKilledProcessLendsAndRevokesNothing) {
  LendAll(*source_);
  kill(source_->pid(), SIGKILL);
  RevokeAndWait(*source_, kToken);
  while (source_->alive()) std::this_thread::yield();
  EXPECT_TRUE(absl::IsUnavailable(source_->Lend(kToken, 0, 0, 1)));
  RevokeAndWait(*source_, kToken);
}

TEST_F(UcxHelperTest, EndsWhatIsUnderWayWhenItIsStopped) {
  LendAll(*source_);
  const auto [statuses, took] = Strike([&] { target_.reset(); });
  for (const absl::Status& status : statuses)
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
}

TEST_F(UcxStoppedTest, GivesUpASourceThatSaysNothing) {
  LendAll(*source_);
  ExpectFetched(0, kMiB, 0);
  const auto [statuses, took] = Strike([&] { kill(source_->pid(), SIGSTOP); });
  EXPECT_TRUE(absl::IsDeadlineExceeded(statuses.back())) << statuses.back();
  EXPECT_GE(took, deadline_ - milliseconds(50));
  EXPECT_LT(took, 3 * deadline_);
  EXPECT_TRUE(target_->alive());
  kill(source_->pid(), SIGCONT);
  ExpectFetched(0, 8 * kMiB, 0);
}

TEST_F(UcxStoppedTest, RevokesFromATargetThatDoesNotRead) {
  LendAll(*source_);
  absl::Notification revoked;
  Clock::time_point start;
  milliseconds took{};
  (void)Strike([&] {
    kill(target_->pid(), SIGSTOP);
    start = Clock::now();
    source_->Revoke(kToken, [&] { revoked.Notify(); });
    revoked.WaitForNotification();
    took = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    kill(target_->pid(), SIGCONT);
  });
  EXPECT_LT(took, 3 * deadline_);
  EXPECT_TRUE(source_->alive());
  LendAll(*source_);
  ExpectFetched(0, kMiB, 0);
}

TEST_F(UcxStoppedTest, EndsAProcessThatSaysNothing) {
  LendAll(*source_);
  const auto [statuses, took] = Strike([&] { kill(target_->pid(), SIGSTOP); });
  EXPECT_TRUE(absl::IsUnavailable(statuses.back())) << statuses.back();
  EXPECT_FALSE(target_->alive());
}

TEST_F(UcxHelperTest, TheProcessHasOnlyWhatItWasGiven) {
  const Descriptor inheritable(memfd_create("not for children", 0));
  const auto helper = StartOne();
  ASSERT_EQ(helper->AddStaging(staging_.fd(), staging_.bytes()).value(), 0U);
  const std::string process = "/proc/" + std::to_string(helper->pid());
  for (const auto& fd : std::filesystem::directory_iterator(process + "/fd")) {
    std::error_code gone;
    EXPECT_EQ(std::filesystem::read_symlink(fd, gone).string().find("memfd"), std::string::npos);
  }
  std::ifstream maps(process + "/maps");
  int memfds = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == std::string::npos) continue;
    ++memfds;
    EXPECT_NE(line.find(" r--s "), std::string::npos) << line;
  }
  EXPECT_EQ(memfds, 1);
}

TEST_F(UcxHelperTest, EndsWithItsDaemon) {
  auto process = SpawnUcx(BinaryPath("summaryd-ucx"), "lo", deadline_);
  ASSERT_TRUE(process.ok()) << process.status();
  UcxEvent event{};
  while (event.kind != UcxEventKind::kListening) {
    pollfd polled{process->socket.get(), POLLIN, 0};
    ASSERT_EQ(poll(&polled, 1, -1), 1);
    ASSERT_EQ(recv(process->socket.get(), &event, sizeof(event), 0), static_cast<ssize_t>(sizeof(event)));
  }
  kill(process->pid, SIGTERM);  // is the daemon's to obey
  kill(process->pid, SIGINT);
  process->socket = Descriptor();
  int status = 0;
  ASSERT_EQ(waitpid(process->pid, &status, 0), process->pid);
  EXPECT_EQ(status, 0);
}

TEST_F(UcxHelperTest, ListensWithinTheRangeOfPorts) {
  setenv("UCX_TCP_PORT_RANGE", "21000-29999", 1);
  const auto helper = StartOne();
  unsetenv("UCX_TCP_PORT_RANGE");
  const int port = std::stoi(helper->address().substr(helper->address().find(':') + 1));
  EXPECT_GE(port, 21000);
  EXPECT_LE(port, 29999);
  setenv("UCX_TCP_PORT_RANGE", "9-a", 1);
  const auto refused = UcxHelper::Start(MakeOptions());
  unsetenv("UCX_TCP_PORT_RANGE");
  EXPECT_FALSE(refused.ok());
}

TEST_F(UcxHelperTest, RefusesAnInterfaceThatThereIsNot) {
  UcxHelper::Options options = MakeOptions();
  options.net_device = "nowhere0";
  const auto refused = UcxHelper::Start(options);
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.status().ToString().find("nowhere0"), std::string::npos) << refused.status();
}

TEST(UcxHelperStartTest, SaysThatABuildHasNoUcx) {
  const auto refused = UcxHelper::Start({.binary = BinaryPath("summaryd-no-ucx"), .net_device = "lo"});
  EXPECT_TRUE(absl::IsUnimplemented(refused.status())) << refused.status();
  EXPECT_NE(refused.status().ToString().find("libucx-dev"), std::string::npos);
}

TEST(UcxHelperStartTest, SaysWhatCannotBeRun) {
  auto refused = UcxHelper::Start({.binary = "/nowhere/summaryd-ucx", .net_device = "lo"});
  EXPECT_TRUE(absl::IsNotFound(refused.status())) << refused.status();
  refused = UcxHelper::Start({.binary = "/bin/false", .net_device = "lo"});
  EXPECT_TRUE(absl::IsUnavailable(refused.status())) << refused.status();
  EXPECT_NE(refused.status().ToString().find("status 1"), std::string::npos) << refused.status();
}

TEST_F(UcxHelperTest, DoesNotWaitForAStartWithoutEnd) {
  UcxHelper::Options options = MakeOptions();
  options.start_deadline = milliseconds(0);
  const auto refused = UcxHelper::Start(options);
  EXPECT_TRUE(absl::IsUnavailable(refused.status())) << refused.status();
  EXPECT_NE(refused.status().ToString().find("after 0 ms"), std::string::npos) << refused.status();
}

TEST(UcxEnvironmentTest, OurValuesGiveWayToThoseOfTheEnvironment) {
  setenv("UCX_TLS", "rc,tcp", 1);
  const std::vector<std::string> variables = UcxEnvironment("eth7");
  unsetenv("UCX_TLS");
  EXPECT_EQ(std::count(variables.begin(), variables.end(), "UCX_TLS=rc,tcp"), 1);
  EXPECT_EQ(std::count(variables.begin(), variables.end(), "UCX_TLS=tcp"), 0);
  EXPECT_EQ(std::count(variables.begin(), variables.end(), "UCX_NET_DEVICES=eth7"), 1);
  EXPECT_EQ(std::count(variables.begin(), variables.end(), "UCX_HANDLE_ERRORS=none"), 1);
}

}  // namespace
}  // namespace kvsummary
