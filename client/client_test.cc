// The client against a daemon that records what it is sent, refuses what it is told to, and keeps no state.
#include "client/client.h"

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "kvsummary/v1/update.grpc.pb.h"

namespace kvsummary {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kMaxMessage = 8192;  // seven rows

grpc::Status Refusal() {
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

class ClientTest : public testing::Test {
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

// The recorded messages of one kind, laid together again, are the arrays.
template <typename Get>
void ExpectWhole(const Daemon& daemon, const Arrays& arrays, std::int32_t first_layer, Get get) {
  std::vector<std::uint16_t> data(arrays.data.size());
  std::vector<std::int64_t> slots(arrays.slots.size()), bases(arrays.slots.size());
  for (const auto& update : daemon.updates) {
    const auto& request = get(update);
    EXPECT_LE(update.ByteSizeLong(), kMaxMessage);
    EXPECT_EQ(request.cache().name(), "c");
    EXPECT_EQ(request.cache().generation(), 7);
    const std::int64_t row = request.slots(0) - 1000;
    ASSERT_EQ(request.rows().inline_().size(),
              std::size_t{kRowBytes} * request.slots_size() * request.layers().count());
    std::copy(request.slots().begin(), request.slots().end(), slots.begin() + row);
    std::copy(request.ring_bases().begin(), request.ring_bases().end(), bases.begin() + row);
    const std::int64_t layer = request.layers().first() - first_layer;
    std::memcpy(data.data() + (layer * std::ssize(slots) + row) * kRowElements,
                request.rows().inline_().data(), request.rows().inline_().size());
  }
  EXPECT_EQ(slots, arrays.slots);
  EXPECT_EQ(bases, arrays.bases);
  EXPECT_TRUE(data == arrays.data);
}

TEST_F(ClientTest, ASmallUpdateIsOneMessageAsItIs) {
  const Arrays arrays(2, 3);
  Progress progress;
  const auto result = client_->Decode(cache_, {1, 2}, arrays.Decode(), &progress);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 3);
  EXPECT_EQ(result->regions_closed, 1);
  EXPECT_EQ(progress.layers, 2);
  ASSERT_EQ(daemon_.updates.size(), 1);
  const auto& decode = daemon_.updates[0].decode();
  EXPECT_EQ(decode.layers().first(), 1);
  EXPECT_EQ(decode.layers().count(), 2);
  EXPECT_EQ(std::vector<std::int64_t>(decode.positions().begin(), decode.positions().end()),
            arrays.positions);
  ExpectWhole(
      daemon_, arrays, 1, [](const auto& update) -> auto& { return update.decode(); });
}

TEST_F(ClientTest, ASmallUpdateThatMakesNoSenseReachesTheDaemon) {
  const Arrays arrays(1, 3);
  DecodeUpdate update = arrays.Decode();
  update.positions = update.positions.first(1);
  update.ring_bases = {};
  update.rows = update.rows.first(5);
  EXPECT_TRUE(client_->Decode(cache_, {-1, -2}, update).ok());
  const auto& decode = daemon_.updates[0].decode();
  EXPECT_EQ(decode.slots_size(), 3);
  EXPECT_EQ(decode.positions_size(), 1);
  EXPECT_EQ(decode.ring_bases_size(), 0);
  EXPECT_EQ(decode.rows().inline_().size(), 10);
  EXPECT_EQ(decode.layers().first(), -1);
  EXPECT_EQ(decode.layers().count(), -2);
}

TEST_F(ClientTest, ALargeUpdateWhoseSizesDisagreeIsRefusedByField) {
  const Arrays arrays(1, 20);
  DecodeUpdate update = arrays.Decode();
  update.positions = update.positions.first(1);
  const auto status = client_->Decode(cache_, {0, 1}, update).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "SIZE_MISMATCH");
  EXPECT_EQ(FieldOf(status), "positions");
  EXPECT_EQ(ReasonOf(client_->Decode(cache_, {0, 0}, arrays.Decode()).status()), "LAYERS_OUT_OF_RANGE");
  EXPECT_TRUE(daemon_.updates.empty());
}

TEST_F(ClientTest, ALargeDecodeIsSplitByLayersThenRows) {
  const Arrays by_layers(4, 3);
  auto result = client_->Decode(cache_, {0, 4}, by_layers.Decode());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 3);  // not once a message
  EXPECT_EQ(daemon_.updates.size(), 2);
  ExpectWhole(
      daemon_, by_layers, 0, [](const auto& update) -> auto& { return update.decode(); });

  daemon_.updates.clear();
  const Arrays by_rows(2, 20);
  result = client_->Decode(cache_, {1, 2}, by_rows.Decode());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 20);
  EXPECT_EQ(result->regions_closed, 3);  // one a message of the first layer
  EXPECT_EQ(daemon_.updates.size(), 6);
  ExpectWhole(
      daemon_, by_rows, 1, [](const auto& update) -> auto& { return update.decode(); });
}

TEST_F(ClientTest, ALargeVerifyIsSplitByRequests) {
  const Arrays arrays(1, 12);
  const std::vector<std::int32_t> starts{0, 4, 8, 12}, lens{104, 208, 312};
  const auto result = client_->Verify(cache_, {2, 1},
                                      {.slots = arrays.slots,
                                       .query_start_loc = starts,
                                       .seq_lens = lens,
                                       .ring_bases = arrays.bases,
                                       .rows = arrays.data});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 12);
  ASSERT_EQ(daemon_.updates.size(), 3);
  for (int i = 0; i < 3; ++i) {
    const auto& verify = daemon_.updates[i].verify();
    EXPECT_EQ(std::vector<std::int32_t>(verify.query_start_loc().begin(), verify.query_start_loc().end()),
              (std::vector<std::int32_t>{0, 4}));
    ASSERT_EQ(verify.seq_lens_size(), 1);
    EXPECT_EQ(verify.seq_lens(0), lens[i]);
  }
  ExpectWhole(
      daemon_, arrays, 2, [](const auto& update) -> auto& { return update.verify(); });
}

TEST_F(ClientTest, ALargePrefillIsSplitWithinARequest) {
  const Arrays arrays(1, 10);
  const std::vector<std::int32_t> starts{0, 2, 10};
  const auto result = client_->Prefill(cache_, {0, 1},
                                       {.slots = arrays.slots,
                                        .positions = arrays.positions,
                                        .query_start_loc = starts,
                                        .ring_bases = arrays.bases,
                                        .rows = arrays.data});
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(daemon_.updates.size(), 2);
  const auto starts_of = [&](int i) {
    const auto& prefill = daemon_.updates[i].prefill();
    return std::vector<std::int32_t>(prefill.query_start_loc().begin(), prefill.query_start_loc().end());
  };
  EXPECT_EQ(starts_of(0), (std::vector<std::int32_t>{0, 2, 7}));
  EXPECT_EQ(starts_of(1), (std::vector<std::int32_t>{0, 3}));
  EXPECT_EQ(daemon_.updates[1].prefill().positions(0), 2007);
  ExpectWhole(
      daemon_, arrays, 0, [](const auto& update) -> auto& { return update.prefill(); });
}

TEST_F(ClientTest, ARefusedMessageEndsTheCallAndProgressTellsHowFarItCame) {
  const Arrays arrays(2, 20);  // three messages a layer, of 7, 7 and 6 rows
  const auto progress_when_refused = [&](std::size_t at) {
    daemon_.updates.clear();
    daemon_.refuse_at = at;
    Progress progress{9, 9, 9};
    const auto status = client_->Decode(cache_, {0, 2}, arrays.Decode(), &progress).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "refused");
    EXPECT_EQ(ReasonOf(status), "SLOT_OUT_OF_RANGE");
    EXPECT_EQ(daemon_.updates.size(), at + 1);
    return std::vector<std::int64_t>{progress.layers, progress.partial_layers, progress.rows};
  };
  EXPECT_EQ(progress_when_refused(0), (std::vector<std::int64_t>{0, 0, 0}));
  EXPECT_EQ(progress_when_refused(2), (std::vector<std::int64_t>{0, 1, 14}));
  EXPECT_EQ(progress_when_refused(3), (std::vector<std::int64_t>{1, 0, 0}));
  EXPECT_EQ(progress_when_refused(5), (std::vector<std::int64_t>{1, 1, 14}));
}

TEST_F(ClientTest, ACallEndsAtItsDeadline) {
  daemon_.hang = true;
  const auto client = Connect(milliseconds(50));
  const auto status = client->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, ConnectingToNoDaemonTellsTheAddressAndWhy) {
  const std::string address = "unix:" + folder_ + "/other";
  const auto status = Client::Connect(address, {.connect_timeout = milliseconds(50)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(status.message()).find(address), std::string::npos) << status;
  EXPECT_NE(std::string(status.message()).find("No such file"), std::string::npos) << status;
}

TEST_F(ClientTest, CreateCacheBringsTheGeometryThereAndBack) {
  const CacheGeometry geometry{.layers = 1,
                               .blocks = 2,
                               .block_size = 3,
                               .block_stride = 4,
                               .ring_blocks = 5,
                               .capacity = 6,
                               .rows_per_layer = 7,
                               .k = 8};
  const auto cache = client_->CreateCache("name", "host", geometry);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(cache->name, "name");
  EXPECT_EQ(cache->generation, 7);
  EXPECT_EQ(cache->device, "host");
  EXPECT_EQ(cache->geometry, geometry);
}

TEST_F(ClientTest, ReadPagesLaysMessagesTogether) {
  const std::vector<std::int64_t> blocks{5, 1, 5};
  const auto pages = client_->ReadPages(cache_, blocks, {1, 3});
  ASSERT_TRUE(pages.ok()) << pages.status();
  ASSERT_EQ(pages->size(), 9 * 256);
  for (std::size_t i = 0; i < pages->size(); ++i) ASSERT_EQ((*pages)[i], i / 256);
  EXPECT_EQ(daemon_.page_reads[0].layers().first(), 1);
  EXPECT_EQ(daemon_.page_reads[0].layers().count(), 3);
}

TEST_F(ClientTest, ReadPagesOfManyBlocksAsksInMessagesThatFit) {
  std::vector<std::int64_t> blocks(3000, std::int64_t{1} << 40);
  const auto pages = client_->ReadPages(cache_, blocks, {0, 1});
  ASSERT_TRUE(pages.ok()) << pages.status();
  EXPECT_EQ(pages->size(), 3000 * 256);
  EXPECT_GT(daemon_.page_reads.size(), 1);
}

TEST_F(ClientTest, ReadPagesNoticesAnAnswerWithAGap) {
  daemon_.misplace = true;
  const std::vector<std::int64_t> blocks{5, 1, 5};
  EXPECT_EQ(client_->ReadPages(cache_, blocks, {0, 4}).status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientTest, WritePagesIsSplitByBlocksAndLayers) {
  Cache wide = cache_;
  wide.geometry.block_size = 128;  // a page takes half a message
  std::vector<std::int64_t> blocks{4, 2};
  std::vector<std::uint8_t> pages(2 * 3 * 4096);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::uint8_t>(i / 4096);
  ASSERT_TRUE(client_->WritePages(wide, blocks, {1, 3}, pages).ok());
  ASSERT_EQ(daemon_.page_writes.size(), 6);
  for (int i = 0; i < 6; ++i) {
    const auto& write = daemon_.page_writes[i];
    EXPECT_LE(write.ByteSizeLong(), kMaxMessage);
    ASSERT_EQ(write.blocks_size(), 1);
    EXPECT_EQ(write.blocks(0), blocks[i / 3]);
    EXPECT_EQ(write.layers().first(), 1 + i % 3);
    EXPECT_EQ(write.layers().count(), 1);
    EXPECT_EQ(write.data(), std::string(4096, static_cast<char>(i)));
  }
  pages.pop_back();
  EXPECT_EQ(ReasonOf(client_->WritePages(wide, blocks, {1, 3}, pages)), "SIZE_MISMATCH");
  EXPECT_EQ(ReasonOf(client_->WritePages(wide, blocks, {2, 3}, pages)), "LAYERS_OUT_OF_RANGE");
}

TEST_F(ClientTest, AStreamSendsInOrderAndSumsUpResults) {
  auto stream = client_->OpenUpdateStream();
  for (int i = 0; i < 30; ++i) {
    Arrays arrays(1, 2);
    arrays.slots[0] = i;
    ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  }
  auto result = stream->Flush();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 60);
  EXPECT_EQ(result->regions_closed, 30);
  ASSERT_EQ(daemon_.updates.size(), 30);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(daemon_.updates[i].decode().slots(0), i);
  result = stream->Flush();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->rows, 0);
}

TEST_F(ClientTest, AStreamTakesAllKindsAndSplits) {
  const Arrays arrays(2, 12);
  const std::vector<std::int32_t> starts{0, 4, 8, 12}, lens{4, 4, 4};
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 2}, arrays.Decode()).ok());
  ASSERT_TRUE(stream->Verify(cache_, {0, 2}, {arrays.slots, starts, lens, arrays.bases, arrays.data}).ok());
  ASSERT_TRUE(
      stream->Prefill(cache_, {0, 2}, {arrays.slots, arrays.positions, starts, arrays.bases, arrays.data})
          .ok());
  const auto result = stream->Flush();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 36);
  EXPECT_EQ(daemon_.updates.size(), 4 + 6 + 4);
}

TEST_F(ClientTest, ARefusalEndsTheStreamForGood) {
  daemon_.refuse_at = 3;
  const Arrays arrays(1, 1);
  auto stream = client_->OpenUpdateStream();
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = stream->Decode(cache_, {0, 1}, arrays.Decode());
  EXPECT_EQ(ReasonOf(status), "SLOT_OUT_OF_RANGE") << status;
  EXPECT_EQ(daemon_.updates.size(), 4);
  EXPECT_EQ(ReasonOf(stream->Flush().status()), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(ReasonOf(stream->Decode(cache_, {0, 1}, arrays.Decode())), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(daemon_.updates.size(), 4);
}

TEST_F(ClientTest, AnUpdateThatCannotBeSplitEndsTheStreamAfterWhatWasSent) {
  const Arrays arrays(1, 20);
  DecodeUpdate update = arrays.Decode();
  update.positions = update.positions.first(1);
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  EXPECT_EQ(ReasonOf(stream->Decode(cache_, {0, 1}, update)), "SIZE_MISMATCH");
  EXPECT_EQ(daemon_.updates.size(), 3);
  EXPECT_EQ(ReasonOf(stream->Flush().status()), "SIZE_MISMATCH");
}

TEST_F(ClientTest, AStreamEndsAtTheDeadlineOfAMessage) {
  daemon_.hang = true;
  const auto client = Connect(milliseconds(50));
  auto stream = client->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  EXPECT_EQ(stream->Flush().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, AStreamHasABoundedNumberOfMessagesUnanswered) {
  daemon_.hang = true;
  const auto client = Connect(milliseconds(50));
  auto stream = client->OpenUpdateStream();
  const Arrays arrays(1, 1);
  int sent = 0;
  while (sent < 1000 && stream->Decode(cache_, {0, 1}, arrays.Decode()).ok()) ++sent;
  EXPECT_EQ(sent, 8);
}

TEST_F(ClientTest, DroppingAStreamCancelsIt) {
  daemon_.hang = true;
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  {
    std::unique_lock lock(daemon_.mutex);
    daemon_.changed.wait(lock, [this] { return !daemon_.updates.empty(); });
  }
  stream.reset();  // returns although the daemon never answers; TearDown waits for its handler
  client_.reset();
}

TEST_F(ClientTest, AStreamOutlivesItsClient) {
  auto stream = client_->OpenUpdateStream();
  client_.reset();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  EXPECT_TRUE(stream->Flush().ok());
}

TEST_F(ClientTest, AnUnusedStreamEndsQuietly) { client_->OpenUpdateStream().reset(); }

TEST_F(ClientTest, AStreamTellsThatTheDaemonHasGone) {
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  ASSERT_TRUE(stream->Flush().ok());
  server_->Shutdown(std::chrono::system_clock::now());
  absl::Status status = stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode());
  if (status.ok()) status = stream->Flush().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

}  // namespace
}  // namespace kvsummary
