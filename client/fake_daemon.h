// A daemon for tests of the client: it records what it is sent, refuses what it is told to, and keeps no
// state. FakeDaemonTest runs one on a Unix socket of its own, with a client connected to it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"

namespace kvsummary {

using std::chrono::milliseconds;

inline constexpr std::int64_t kMaxMessage = 8192;  // seven rows

inline grpc::Status Refusal() {
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  info.set_domain("kvsummary");
  info.set_reason("SLOT_OUT_OF_RANGE");
  status.add_details()->PackFrom(info);
  return grpc::Status(grpc::INVALID_ARGUMENT, "refused", status.SerializeAsString());
}

// What the fake services share. Update messages of all calls are recorded in order.
struct Daemon {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<v1::StreamUpdatesRequest> updates;
  std::vector<v1::WritePagesRequest> page_writes;
  std::vector<v1::ReadPagesRequest> page_reads;
  std::size_t refuse_at = 1000;  // index of the update that is refused
  bool hang = false;             // updates are not answered until the call is cancelled
  bool misplace = false;         // reads answer from the second item on

  // Records an update and says how to answer it.
  grpc::Status Take(v1::StreamUpdatesRequest update, grpc::ServerContext* context, v1::UpdateResult* result) {
    std::unique_lock lock(mutex);
    const std::size_t index = updates.size();
    result->set_rows(Slots(update).size());
    result->set_regions_closed(1);
    updates.push_back(std::move(update));
    changed.notify_all();
    while (hang && !context->IsCancelled()) changed.wait_for(lock, milliseconds(5));
    return index == refuse_at ? Refusal() : grpc::Status::OK;
  }

  static const google::protobuf::RepeatedField<std::int64_t>& Slots(const v1::StreamUpdatesRequest& update) {
    return update.has_decode()   ? update.decode().slots()
           : update.has_verify() ? update.verify().slots()
                                 : update.prefill().slots();
  }
};

class Updates : public v1::UpdateService::Service {
 public:
  explicit Updates(Daemon& daemon) : daemon_(daemon) {}

  grpc::Status UpdateDecode(grpc::ServerContext* context, const v1::UpdateDecodeRequest* request,
                            v1::UpdateDecodeResponse* response) override {
    v1::StreamUpdatesRequest update;
    *update.mutable_decode() = *request;
    return daemon_.Take(update, context, response->mutable_result());
  }
  grpc::Status UpdateVerify(grpc::ServerContext* context, const v1::UpdateVerifyRequest* request,
                            v1::UpdateVerifyResponse* response) override {
    v1::StreamUpdatesRequest update;
    *update.mutable_verify() = *request;
    return daemon_.Take(update, context, response->mutable_result());
  }
  grpc::Status UpdatePrefill(grpc::ServerContext* context, const v1::UpdatePrefillRequest* request,
                             v1::UpdatePrefillResponse* response) override {
    v1::StreamUpdatesRequest update;
    *update.mutable_prefill() = *request;
    return daemon_.Take(update, context, response->mutable_result());
  }
  // Tickets that begin with "tm" and "tw".
  grpc::Status OpenQueue(grpc::ServerContext*, const v1::OpenQueueRequest*,
                         v1::OpenQueueResponse* response) override {
    response->set_memory_ticket("tm" + std::string(30, '.'));
    response->set_wake_ticket("tw" + std::string(30, '.'));
    return grpc::Status::OK;
  }
  grpc::Status StreamUpdates(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::StreamUpdatesResponse, v1::StreamUpdatesRequest>* stream) override {
    v1::StreamUpdatesRequest update;
    while (stream->Read(&update)) {
      v1::StreamUpdatesResponse response;
      if (auto status = daemon_.Take(update, context, response.mutable_result()); !status.ok()) return status;
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  Daemon& daemon_;
};

class Caches : public v1::CacheService::Service {
 public:
  explicit Caches(Daemon& daemon) : daemon_(daemon) {}

  grpc::Status CreateCache(grpc::ServerContext*, const v1::CreateCacheRequest* request,
                           v1::CreateCacheResponse* response) override {
    response->mutable_info()->mutable_cache()->set_name(request->name());
    response->mutable_info()->mutable_cache()->set_generation(7);
    response->mutable_info()->set_device(request->device());
    *response->mutable_info()->mutable_geometry() = request->geometry();
    return grpc::Status::OK;
  }
  // Page i holds the byte i; two pages a message.
  grpc::Status ReadPages(grpc::ServerContext*, const v1::ReadPagesRequest* request,
                         grpc::ServerWriter<v1::ReadPagesResponse>* writer) override {
    std::lock_guard lock(daemon_.mutex);
    daemon_.page_reads.push_back(*request);
    const int pages = request->blocks_size() * request->layers().count();
    for (int page = daemon_.misplace ? 1 : 0; page < pages; page += 2) {
      v1::ReadPagesResponse response;
      response.set_first_page(page);
      for (int i = page; i < std::min(page + 2, pages); ++i) {
        response.mutable_data()->append(256, static_cast<char>(i));
      }
      writer->Write(response);
    }
    return grpc::Status::OK;
  }
  grpc::Status WritePages(grpc::ServerContext*, const v1::WritePagesRequest* request,
                          v1::WritePagesResponse*) override {
    std::lock_guard lock(daemon_.mutex);
    daemon_.page_writes.push_back(*request);
    return grpc::Status::OK;
  }

 private:
  Daemon& daemon_;
};

class FakeDaemonTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/kvs-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(Address(), grpc::InsecureServerCredentials());
    builder.RegisterService(&updates_);
    builder.RegisterService(&caches_);
    builder.SetMaxReceiveMessageSize(kMaxMessage);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    client_ = Connect(milliseconds(10'000));
  }
  void TearDown() override {
    client_.reset();
    if (server_ != nullptr) server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  std::string Address() const { return "unix:" + folder_ + "/socket"; }
  std::unique_ptr<Client> Connect(milliseconds timeout) {
    auto client = Client::Connect(Address(), {.timeout = timeout, .max_message_bytes = kMaxMessage});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  std::string folder_;
  Daemon daemon_;
  Updates updates_{daemon_};
  Caches caches_{daemon_};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Client> client_;
  const Cache cache_{
      .name = "c",
      .generation = 7,
      .device = "host",
      .geometry = {.layers = 4, .blocks = 100, .block_size = 8, .ring_blocks = 9, .capacity = 8}};
};

// Arrays of an update of `rows` rows in `layers` layers, every value different.
struct Arrays {
  Arrays(std::int64_t layers, std::int64_t rows)
      : slots(rows), positions(rows), bases(rows), data(layers * rows * kRowElements) {
    std::iota(slots.begin(), slots.end(), 1000);
    std::iota(positions.begin(), positions.end(), 2000);
    std::iota(bases.begin(), bases.end(), 3000);
    std::iota(data.begin(), data.end(), 0);
  }
  DecodeUpdate Decode() const { return {slots, positions, bases, data}; }

  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::uint16_t> data;
};

}  // namespace kvsummary
