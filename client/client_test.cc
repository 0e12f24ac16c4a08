#include "client/client.h"

#include <cstring>
#include <string>
#include <vector>

#include "client/fake_daemon.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using ClientTest = FakeDaemonTest;

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

TEST_F(ClientTest, WhatIsNoAddressIsNotWaitedFor) {
  for (const std::string address : {"/tmp/s", "localhost", "", "http://localhost:1", "./s"}) {
    const auto status = Client::Connect(address, {.connect_timeout = std::chrono::hours(1)}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << address << ": " << status;
    EXPECT_NE(std::string(status.message()).find("unix:PATH or HOST:PORT"), std::string::npos) << status;
  }
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

TEST(ClientTlsTest, FilesThatCannotBeUsedAreNamedBeforeAnybodyIsDialled) {
  const auto error = [](const TlsFiles& tls) {
    const auto client = Client::Connect("127.0.0.1:1", {.tls = tls});
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(client.status().message());
  };
  EXPECT_EQ(error({.ca = "/none"}), "tls.ca=/none: cannot be read: No such file or directory");
  EXPECT_EQ(error({.cert = "/c", .key = "/k"}), "tls.cert=/c: needs tls.ca");
  EXPECT_EQ(error({.ca = "/a", .key = "/k"}), "tls.key=/k: needs tls.cert");
}

}  // namespace
}  // namespace kvsummary
