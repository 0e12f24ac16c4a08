// The server as a whole: its life, health, and what it serves beside its own services.
#include <gtest/gtest.h>

#include "server/rpc/server_fixture.h"

namespace kvsummary {
namespace {

TEST_F(ServerTest, ADrainDoesNotWaitForWatchesOfTheHealth) {
  grpc::GenericStub stub(client_->channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto watch = stub.PrepareCall(&context, "/grpc.health.v1.Health/Watch", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  watch->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice none;
  watch->Write(grpc::ByteBuffer(&none, 1), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer serving;
  watch->Read(&serving, nullptr);
  ASSERT_TRUE(next());
  server_->Drain(std::chrono::hours(1));  // the test's own time limit is far below
  context.TryCancel();
  grpc::Status status;
  watch->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST_F(ServerTest, DrainEndsStreamsAndTurnsHealthAndCallsAway) {
  const auto info = MustCreate("a");
  std::string health;
  ASSERT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_EQ(health, std::string("\x08\x01"));  // status = SERVING
  grpc::ClientContext context;
  auto stream = client_->updates->StreamUpdates(&context);
  v1::StreamUpdatesRequest message;
  *message.mutable_decode() = DecodeOf(info, 0, 1);
  ASSERT_TRUE(stream->Write(message));
  v1::StreamUpdatesResponse reply;
  ASSERT_TRUE(stream->Read(&reply));
  server_->Drain(std::chrono::minutes(1));  // returns long before: nothing is under way but an idle stream
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(Details(stream->Finish()), "DRAINING");
  EXPECT_EQ(Send(DecodeOf(info, 1, 1)).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, ABrokenDeviceTurnsHealthAway) {
  auto request = TestClient::CacheRequest("a");
  request.set_device("test:0");
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  const auto status = Send(DecodeOf(info, 0, 1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Details(status), "DEVICE_FAILED");
  std::string health;
  ASSERT_TRUE(CallEmpty("/grpc.health.v1.Health/Check", &health).ok());
  EXPECT_EQ(health, std::string("\x08\x02"));  // status = NOT_SERVING
  EXPECT_EQ(Details(Create(request)), "CACHE_EXISTS name");
  request.set_name("b");
  EXPECT_EQ(Details(Create(request)), "DEVICE_FAILED");
  grpc::ClientContext context;
  v1::ListDevicesResponse devices;
  ASSERT_TRUE(client_->admin->ListDevices(&context, {}, &devices).ok());
  EXPECT_NE(devices.devices(1).unusable_reason().find("fell off the bus"), std::string::npos);
  EXPECT_TRUE(Create(TestClient::CacheRequest("c")).ok());  // the host still works
}

TEST_F(ServerTest, ReflectionAndChannelzAreOn) {
  std::string servers;
  EXPECT_TRUE(CallEmpty("/grpc.channelz.v1.Channelz/GetServers", &servers).ok());
  EXPECT_FALSE(servers.empty());
  grpc::GenericStub stub(client_->channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto stream =
      stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  stream->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice list_services("\x3a\x01*");  // field 7, "*"
  const grpc::ByteBuffer request(&list_services, 1);
  stream->Write(request, nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer reply;
  stream->Read(&reply, nullptr);
  ASSERT_TRUE(next());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(reply.Dump(&slices).ok());
  std::string text;
  for (const auto& slice : slices) text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  for (const char* name :
       {"kvsummary.v1.CacheService", "kvsummary.v1.UpdateService", "kvsummary.v1.AdminService",
        "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  context.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST_F(ServerTest, SecondServerOnTheSocketIsRefusedAndTheFirstGoesOn) {
  const auto second = Server::Start({.listen = {server_->addresses()[0]}}, *caches_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  MustCreate("a");
}

TEST_F(ServerTest, APortInUseIsRefused) {
  const auto first = Server::Start({.listen = {":0"}}, *caches_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Server::Start({.listen = {(*first)->addresses()[0]}}, *caches_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(second.status().message().find((*first)->addresses()[0]), absl::string_view::npos);
}

}  // namespace
}  // namespace kvsummary
