// A server with clients that open sessions of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "server/rpc/server_fixture.h"

namespace kvsummary {

class SessionTest : public ServerTest {
 protected:
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
};

}  // namespace kvsummary
