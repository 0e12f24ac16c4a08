// Clients that die by SIGKILL at each step of each protocol: everything they held is free again, soon.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <thread>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

// A bound for tests on a busy machine, not the goal: that is measured and printed.
constexpr std::chrono::seconds kPatience{10};

// The steps at which a worker can be told to stop and wait for its death.
constexpr const char* kSteps[] = {
    "SessionOpened",     "CacheCreated",      "CacheExported",  "DescriptorSocketSilent",
    "ExportReplyUnread", "CacheMapped",       "CacheReleased",  "BufferAnnounced",
    "BufferRegistered",  "BufferForgotten",   "QueueOpened",    "QueueTicketsUnredeemed",
    "QueueEntryWaits",   "QueueEntryApplied", "EverythingHeld",
};

// (worker) Opens a queue, and submits a step of no rows that waits for ever or is applied.
bool OpenQueue(TestClient& client, const v1::CacheInfo& info, const std::string& step) {
  if (step == "QueueTicketsUnredeemed") {
    v1::OpenQueueRequest request;
    request.set_session_id(client.session_id);
    v1::OpenQueueResponse reply;
    grpc::ClientContext context;
    return client.updates->OpenQueue(&context, request, &reply).ok();
  }
  UpdateQueueMemory* queue = nullptr;
  static Descriptor wake;
  if (!client.OpenQueue(&queue, &wake).ok()) return false;
  if (step == "QueueOpened") return true;
  v1::RegisterBufferResponse buffer;
  const Descriptor memfd = MakeMemfd(4096);
  if (!client.RegisterMemfd(4096, &buffer).ok() ||
      Redeem(client.descriptor_socket, buffer.ticket(), memfd.get()).reason != "OK") {
    return false;
  }
  QueueEntry& entry = queue->entries[0];
  entry.kind = static_cast<std::uint32_t>(QueueStepKind::kDecode);
  entry.cache_name_bytes = 1;
  entry.cache_name[0] = 'c';
  entry.cache_generation = info.cache().generation();
  entry.layers = 2;
  entry.rows = {buffer.buffer_id(), 0, 0, 1024, 0};
  if (step != "QueueEntryApplied") entry.ready = {buffer.buffer_id(), 0, 1};
  std::atomic_ref(queue->submitted).store(1);
  eventfd_write(wake.get(), 1);
  if (step != "QueueEntryApplied") return true;
  while (std::atomic_ref(queue->completed).load() == 0) std::this_thread::yield();
  return queue->completions[0].code == 0;
}

// (worker) Does what comes up to `step`, says so, and waits.
int Work(const std::string& address, const std::string& step) {
  TestClient client(address);
  if (!client.Open("worker").ok()) return 1;
  v1::CacheInfo info;
  v1::MemoryHandle handle;
  v1::RegisterBufferResponse buffer;
  Descriptor connection;
  const Descriptor self = PidfdOf(getpid());
  const Descriptor memfd = MakeMemfd(1 << 20);
  const bool everything = step == "EverythingHeld" || step == "StreamClosed";
  const bool buffers = step.starts_with("Buffer");
  bool ok = true;
  if (step != "SessionOpened" && !buffers) ok = client.Create("c", &info).ok();
  if (step == "CacheExported" || step == "ExportReplyUnread" || everything) {
    ok = ok && client.Export(info.cache(), &handle).ok();
  }
  if (step == "DescriptorSocketSilent" || everything)
    connection = ConnectDescriptors(client.descriptor_socket);
  if (step == "ExportReplyUnread") {
    connection = ConnectDescriptors(client.descriptor_socket);
    const DescriptorRequest request = RequestOf(handle.handle());
    ok = ok && SendMessage(connection.get(), &request, sizeof(request), self.get());
  }
  if (step == "CacheMapped" || step == "CacheReleased" || everything)
    ok = ok && client.Map(info.cache()) != nullptr;
  if (step == "CacheReleased") ok = ok && client.Release(info.cache()).ok();
  if (buffers || everything) ok = ok && client.RegisterMemfd(1 << 20, &buffer).ok();
  if (step == "BufferRegistered" || step == "BufferForgotten" || everything) {
    ok = ok && Redeem(client.descriptor_socket, buffer.ticket(), memfd.get()).reason == "OK";
  }
  if (step == "BufferForgotten") ok = ok && client.Unregister(buffer.buffer_id()).ok();
  if ((step.starts_with("Queue") || everything) && !OpenQueue(client, info, step)) return 1;
  if (step == "StreamClosed") client.Close();
  if (!ok) return 1;
  const char ready = '+';
  if (write(STDOUT_FILENO, &ready, 1) != 1) return 1;
  while (true) pause();
}

// A worker process at one of its steps. Killed when destroyed.
class Worker {
 public:
  Worker(const std::string& address, const std::string& step) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      execl("/proc/self/exe", "worker", "--worker", address.c_str(), step.c_str(), nullptr);
      _exit(1);
    }
    const Descriptor write_end(ends[1]);
    output_ = Descriptor(ends[0]);
  }
  ~Worker() { Kill(); }

  // Whether the worker came to its step.
  bool Await() {
    Descriptor output = std::move(output_);
    char ready = 0;
    ssize_t got = 0;
    do {
      got = read(output.get(), &ready, 1);
    } while (got < 0 && errno == EINTR);
    return got == 1;
  }
  void Kill() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    int state = 0;
    waitpid(pid_, &state, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  Descriptor output_;
};

class KillTest : public ::testing::TestWithParam<const char*> {
 protected:
  KillTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), 64 << 20));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    auto server = Server::Start({.listen = {"unix:" + dir_ + "/s"}}, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~KillTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  template <typename Condition>
  static bool Await(Condition condition) {
    const auto limit = Clock::now() + kPatience;
    while (!condition()) {
      if (Clock::now() > limit) return false;
      std::this_thread::yield();
    }
    return true;
  }
  std::string Address() const { return server_->addresses()[0]; }
  std::int64_t Used() const { return caches_->devices()[0]->budget().used_bytes(); }
  bool NoSessions() const { return server_->sessions().List().empty(); }
  // Nothing is left of the worker but its detached cache, if it made one.
  bool Reclaimed() const {
    const auto cache = caches_->Find("c");
    return NoSessions() && caches_->MappedBy(1).empty() && (!cache.ok() || !(*cache)->attached());
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
};

TEST_P(KillTest, EverythingIsFreeAgain) {
  Worker worker(Address(), GetParam());
  ASSERT_TRUE(worker.Await());
  ASSERT_EQ(server_->sessions().List().size(), 1u);
  worker.Kill();
  ASSERT_TRUE(Await([&] { return Reclaimed(); }));
  TestClient next(Address());
  ASSERT_TRUE(next.Open("next").ok());
  v1::CacheInfo info;
  if (caches_->Find("c").ok()) {
    ASSERT_EQ(ReasonOf(next.Attach("c", &info)), "OK");
    EXPECT_GT(info.cache().generation(), 1000u);
    ASSERT_EQ(ReasonOf(next.Delete(info.cache())), "OK");
  }
  EXPECT_TRUE(Await([&] { return Used() == 0; }));
}

INSTANTIATE_TEST_SUITE_P(At, KillTest, ::testing::ValuesIn(kSteps),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(KillTest, AClosedSessionOfALivingMapperKeepsItsCacheFromOthersAndTheBudget) {
  Worker worker(Address(), "StreamClosed");
  ASSERT_TRUE(worker.Await());
  ASSERT_TRUE(Await([&] { return NoSessions() && !(*caches_->Find("c"))->attached(); }));
  TestClient next(Address());
  ASSERT_TRUE(next.Open("next").ok());
  v1::CacheInfo info;
  EXPECT_EQ(ReasonOf(next.Attach("c", &info)), "CACHE_STILL_MAPPED");
  const auto used = Used();
  EXPECT_GT(used, 0);
  worker.Kill();
  ASSERT_TRUE(Await([&] { return next.Attach("c", &info).ok(); }));
  EXPECT_GT(info.cache().generation(), 1000u);
  EXPECT_EQ(Used(), used);
  ASSERT_EQ(ReasonOf(next.Delete(info.cache())), "OK");
  EXPECT_EQ(Used(), 0);
}

TEST_F(KillTest, DeletedMemoryOfALivingMapperCountsUntilItsDeath) {
  Worker worker(Address(), "StreamClosed");
  ASSERT_TRUE(worker.Await());
  TestClient operators(Address());
  const auto used = Used();
  v1::CacheRef cache;
  cache.set_name("c");
  cache.set_generation(1000);
  ASSERT_EQ(ReasonOf(operators.Delete(cache)), "OK");
  EXPECT_EQ(Used(), used);
  EXPECT_GT(used, 0);
  worker.Kill();
  EXPECT_TRUE(Await([&] { return Used() == 0; }));
}

TEST_F(KillTest, ManyKillsLeaveBytesAndDescriptorsFlat) {
  constexpr int kKills = 10;
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator{});
  };
  TestClient next(Address());
  ASSERT_TRUE(next.Open("next").ok());
  const auto files = open_files();
  std::vector<double> reclaim_ms;
  for (int i = 0; i < kKills; ++i) {
    Worker worker(Address(), "EverythingHeld");
    ASSERT_TRUE(worker.Await());
    const auto killed = Clock::now();
    worker.Kill();
    v1::CacheInfo info;
    ASSERT_TRUE(
        Await([&] { return server_->sessions().List().size() == 1 && next.Attach("c", &info).ok(); }));
    reclaim_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - killed).count());
    ASSERT_EQ(ReasonOf(next.Delete(info.cache())), "OK");
    EXPECT_EQ(Used(), 0);
  }
  EXPECT_TRUE(Await([&] { return open_files() <= files; }));
  std::sort(reclaim_ms.begin(), reclaim_ms.end());
  std::printf("reclaimed after SIGKILL: median %.1f ms, longest %.1f ms of %d\n", reclaim_ms[kKills / 2],
              reclaim_ms.back(), kKills);
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--worker") return kvsummary::Work(argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
