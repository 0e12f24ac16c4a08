// A server on a Unix socket, with one client of its own: host memory, a device that breaks at its first
// update, and a clock that the test moves.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {

inline constexpr std::int64_t kTestBudget = 64 << 20;
inline constexpr int kTestWaits = 4;  // of a session

// The host, until it is told to break.
class BreakableDevice final : public Device {
 public:
  BreakableDevice() : Device("test:0", kTestBudget) {}
  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    return AllocateHostMemory(bytes);
  }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return Broken("fell off the bus"); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }

 private:
  absl::Status DoOpen() override { return absl::OkStatus(); }
};

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), kTestBudget));
    devices.push_back(std::make_unique<BreakableDevice>());
    caches_ = std::make_unique<CacheManager>(
        std::move(devices), 1000,
        CacheManager::Options{.grace = std::chrono::seconds(600), .now = [this] { return Now(); }});
    Server::Options options;
    options.listen = {"unix:" + dir_ + "/s"};
    options.waits.max_per_session = kTestWaits;
    options.waits.now = [this] { return Now(); };
    auto server = Server::Start(options, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    client_ = std::make_unique<TestClient>(server_->addresses()[0]);
  }
  ~ServerTest() override {
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  std::chrono::steady_clock::time_point Now() const {
    return std::chrono::steady_clock::time_point(std::chrono::seconds(seconds_.load()));
  }
  grpc::Status Create(const v1::CreateCacheRequest& request, v1::CacheInfo* info = nullptr) {
    grpc::ClientContext context;
    v1::CreateCacheResponse reply;
    const auto status = client_->caches->CreateCache(&context, request, &reply);
    if (info != nullptr) *info = reply.info();
    return status;
  }
  v1::CacheInfo MustCreate(const std::string& name) {
    v1::CacheInfo info;
    const auto status = Create(TestClient::CacheRequest(name), &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }
  std::string Snapshot(const v1::CacheInfo& info) {
    std::string bytes = kvsummary::Snapshot(*client_->caches, info);
    EXPECT_FALSE(bytes.empty());
    return bytes;
  }
  template <typename... Request>
  grpc::Status Send(const Request&... request) {
    grpc::ClientContext context;
    return kvsummary::Send(*client_->updates, &context, request...);
  }

  // The raw answer of a method that takes an empty request.
  grpc::Status CallEmpty(const std::string& method, std::string* reply) {
    grpc::GenericStub stub(client_->channel());
    grpc::ClientContext context;
    const grpc::Slice empty;
    const grpc::ByteBuffer request(&empty, 1);
    grpc::ByteBuffer buffer;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, method, grpc::StubOptions(), &request, &buffer,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    auto status = done.get_future().get();
    std::vector<grpc::Slice> slices;
    if (status.ok() && buffer.Dump(&slices).ok()) {
      for (const auto& slice : slices)
        reply->append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return status;
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::atomic<int> seconds_ = 1000;
  std::unique_ptr<CacheManager> caches_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<TestClient> client_;
};

}  // namespace kvsummary
