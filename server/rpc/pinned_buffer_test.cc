// Memfds of sessions whose caches are on a device that reads host memory where it lies; and what such a
// device takes, as AdminService tells it.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBytes = 1 << 20;
constexpr std::int64_t kContextBytes = 500 << 20;

// The host under another name, pinning. Takes memory when it is opened, as a GPU does.
class PinningDevice final : public Device {
 public:
  PinningDevice() : Device("pin:0", 64 << 20) {}
  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    return AllocateHostMemory(bytes);
  }
  bool pins_host_memory() const override { return true; }
  void PinHost(char*, std::int64_t bytes) override { pinned_ += bytes; }
  void UnpinHost(char*) override { pinned_ -= kBytes; }
  Overhead overhead() const override { return {context_, pinned_}; }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return absl::OkStatus(); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }

 private:
  absl::Status DoOpen() override {
    context_ = kContextBytes;
    return absl::OkStatus();
  }
  std::atomic<std::int64_t> context_ = 0;
  std::atomic<std::int64_t> pinned_ = 0;
};

class PinnedBufferTest : public ::testing::Test {
 protected:
  PinnedBufferTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), 64 << 20));
    devices.push_back(std::make_unique<PinningDevice>());
    device_ = devices[1].get();
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    auto server = Server::Start({.listen = {"unix:" + dir_ + "/s"}}, *caches_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    client_ = std::make_unique<TestClient>(server_->addresses()[0]);
    EXPECT_TRUE(client_->Open("worker").ok());
  }
  ~PinnedBufferTest() override {
    client_.reset();
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  void CreateOn(const std::string& device) {
    auto request = TestClient::CacheRequest(device + "/c");
    request.set_device(device);
    request.set_session_id(client_->session_id);
    v1::CreateCacheResponse reply;
    grpc::ClientContext context;
    ASSERT_TRUE(client_->caches->CreateCache(&context, request, &reply).ok());
  }
  std::uint64_t Register() {
    v1::RegisterBufferResponse buffer;
    EXPECT_TRUE(client_->RegisterMemfd(kBytes, &buffer).ok());
    const Descriptor memfd = MakeMemfd(kBytes);
    EXPECT_EQ(Redeem(client_->descriptor_socket, buffer.ticket(), memfd.get()).reason, "OK");
    return buffer.buffer_id();
  }
  // As AdminService tells it, when the device has done what is queued.
  v1::DeviceInfo Info() {
    std::promise<void> idle;
    device_->executor().SubmitFree([&] { idle.set_value(); });
    idle.get_future().wait();
    grpc::ClientContext context;
    v1::ListDevicesResponse reply;
    EXPECT_TRUE(client_->admin->ListDevices(&context, {}, &reply).ok());
    for (const auto& info : reply.devices()) {
      if (info.name() == device_->name()) return info;
    }
    return {};
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::unique_ptr<CacheManager> caches_;
  Device* device_ = nullptr;
  std::unique_ptr<Server> server_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(PinnedBufferTest, TheMemfdOfASessionWithACacheThereIsPinnedUntilItIsUnregistered) {
  CreateOn("pin:0");
  const auto id = Register();
  EXPECT_EQ(Info().pinned_host_bytes(), kBytes);
  ASSERT_TRUE(client_->Unregister(id).ok());
  EXPECT_EQ(Info().pinned_host_bytes(), 0);
}

TEST_F(PinnedBufferTest, TheEndOfTheSessionUnpinsItsMemfds) {
  CreateOn("pin:0");
  Register();
  Register();
  EXPECT_EQ(Info().pinned_host_bytes(), 2 * kBytes);
  client_->Close();
  while (Info().pinned_host_bytes() > 0) std::this_thread::yield();  // on the device's executor
}

TEST_F(PinnedBufferTest, ASessionWithoutACacheTherePinsNothing) {
  CreateOn("host");
  Register();
  EXPECT_EQ(Info().pinned_host_bytes(), 0);
}

TEST_F(PinnedBufferTest, WhatADeviceTakesBesidesCachesIsToldFromItsFirstCacheOn) {
  EXPECT_EQ(Info().overhead_bytes(), 0);
  EXPECT_EQ(Info().used_bytes(), 0);
  CreateOn("pin:0");
  EXPECT_EQ(Info().overhead_bytes(), kContextBytes);
  EXPECT_GT(Info().used_bytes(), 0);
  EXPECT_LE(Info().used_bytes(), Info().budget_bytes());
}

}  // namespace
}  // namespace kvsummary
