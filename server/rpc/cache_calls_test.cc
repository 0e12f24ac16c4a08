// Making, describing, reading, writing and deleting caches, as clients see it.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>

#include "server/rpc/server_fixture.h"

namespace kvsummary {
namespace {

class CacheCallsTest : public ServerTest {
 protected:
  struct LongRead {
    v1::CacheRef cache;
    std::unique_ptr<grpc::ClientReader<v1::ReadPagesResponse>> reader;
  };
  // Makes a cache "a", and begins to read far more of it than waits for a reader who is slow.
  LongRead BeginLongRead(grpc::ClientContext& context) {
    auto request = TestClient::CacheRequest("a");
    request.mutable_geometry()->set_blocks(10000);
    v1::CacheInfo info;
    EXPECT_TRUE(Create(request, &info).ok());
    v1::ReadPagesRequest read;
    *read.mutable_cache() = info.cache();
    read.mutable_layers()->set_count(2);
    for (int i = 0; i < 100000; ++i) read.add_blocks(i % 10000);
    LongRead begun{info.cache(), client_->caches->ReadPages(&context, read)};
    v1::ReadPagesResponse part;
    EXPECT_TRUE(begun.reader->Read(&part));
    return begun;
  }
};

TEST_F(CacheCallsTest, CreateAnswersTheLayout) {
  const auto info = MustCreate("a");
  EXPECT_EQ(info.device(), "host");
  EXPECT_GE(info.cache().generation(), 1000u);
  EXPECT_EQ(info.layout().rows_per_block(), 24);
  // Pages take 10 * 1280 = 12,800 bytes, rings start at the next 4,096 and take 4 * 24 rows.
  EXPECT_EQ(info.layout().total_bytes(), 16384 + 4 * 24 * 1024);
  ASSERT_EQ(info.layout().views_size(), 4);
  const auto& summaries = info.layout().views(2);
  EXPECT_EQ(summaries.kind(), v1::VIEW_KIND_SUMMARY);
  EXPECT_EQ(summaries.layer(), 1);
  EXPECT_EQ(summaries.offset_bytes(), 512);
  EXPECT_EQ(summaries.block_stride_bytes(), 1280);
  EXPECT_EQ(summaries.bytes_per_block(), 512);
  const auto& ring = info.layout().views(3);
  EXPECT_EQ(ring.kind(), v1::VIEW_KIND_RING);
  EXPECT_EQ(ring.offset_bytes(), 16384 + 12 * 1024);
  EXPECT_EQ(ring.block_stride_bytes(), 24 * 1024);
  EXPECT_EQ(ring.bytes_per_block(), 12 * 1024);
}

TEST_F(CacheCallsTest, CreateRefusals) {
  MustCreate("a");
  auto request = TestClient::CacheRequest("a");
  auto status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Details(status), "CACHE_EXISTS name");
  request = TestClient::CacheRequest("b");
  request.set_device("cuda:99");
  status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Details(status), "DEVICE_NOT_FOUND device");
  request = TestClient::CacheRequest("");
  EXPECT_EQ(Details(Create(request)), "NAME_INVALID name");
  request = TestClient::CacheRequest("b");
  request.mutable_geometry()->set_capacity(9);
  EXPECT_EQ(Details(Create(request)), "CAPACITY_TOO_SMALL geometry.capacity");
  request = TestClient::CacheRequest("b");
  request.mutable_geometry()->set_block_stride(8 << 20);
  const std::int64_t used = caches_->devices()[0]->budget().used_bytes();
  status = Create(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Details(status), "MEMORY_BUDGET_EXCEEDED quota memory");
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), used);
  EXPECT_TRUE(Create(TestClient::CacheRequest("b")).ok());  // the name was not kept
}

TEST_F(CacheCallsTest, ConcurrentCreatesOfOneNameMakeOneCache) {
  std::vector<std::future<grpc::Status>> calls;
  for (int i = 0; i < 8; ++i)
    calls.push_back(std::async(std::launch::async, [&] { return Create(TestClient::CacheRequest("a")); }));
  int made = 0;
  for (auto& call : calls) {
    const auto status = call.get();
    made += status.ok();
    if (!status.ok()) {
      EXPECT_EQ(Details(status), "CACHE_EXISTS name");
    }
  }
  EXPECT_EQ(made, 1);
}

TEST_F(CacheCallsTest, DeleteFreesAndANewLifeHasAHigherGeneration) {
  const auto first = MustCreate("a");
  EXPECT_GT(caches_->devices()[0]->budget().used_bytes(), 0);
  EXPECT_TRUE(client_->Delete(first.cache()).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  EXPECT_EQ(Details(client_->Delete(first.cache())), "CACHE_NOT_FOUND cache.name");
  const auto second = MustCreate("a");
  EXPECT_GT(second.cache().generation(), first.cache().generation());
  auto status = client_->Delete(first.cache());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Details(status), "GENERATION_STALE cache.generation");
  EXPECT_EQ(Details(Send(DecodeOf(first, 0, 1))), "GENERATION_STALE cache.generation");
  EXPECT_TRUE(Send(DecodeOf(second, 0, 1)).ok());
}

TEST_F(CacheCallsTest, GetAndList) {
  MustCreate("b");
  const auto a = MustCreate("a");
  grpc::ClientContext context;
  v1::ListCachesResponse list;
  ASSERT_TRUE(client_->caches->ListCaches(&context, {}, &list).ok());
  ASSERT_EQ(list.caches_size(), 2);
  EXPECT_EQ(list.caches(0).SerializeAsString(), a.SerializeAsString());
  EXPECT_EQ(list.caches(1).cache().name(), "b");
  grpc::ClientContext get_context;
  v1::GetCacheRequest get;
  get.set_name("a");
  v1::GetCacheResponse got;
  ASSERT_TRUE(client_->caches->GetCache(&get_context, get, &got).ok());
  EXPECT_EQ(got.info().SerializeAsString(), a.SerializeAsString());
  grpc::ClientContext none_context;
  get.set_name("c");
  EXPECT_EQ(Details(client_->caches->GetCache(&none_context, get, &got)), "CACHE_NOT_FOUND cache.name");
}

TEST_F(CacheCallsTest, ACachesFirstBytesAreZero) {
  const auto info = MustCreate("a");
  const std::string bytes = Snapshot(info);
  EXPECT_EQ(bytes.size(), 10u * 2 * 512 + 4 * 2 * 10 * 1024);
  EXPECT_EQ(bytes, std::string(bytes.size(), 0));
}

TEST_F(CacheCallsTest, ReadsComeInTheOrderAskedForAndInParts) {
  auto request = TestClient::CacheRequest("a");
  request.mutable_geometry()->set_blocks(2000);
  request.mutable_geometry()->set_block_size(64);
  request.mutable_geometry()->set_block_stride(4096);
  v1::CacheInfo info;
  ASSERT_TRUE(Create(request, &info).ok());
  v1::WritePagesRequest write;
  *write.mutable_cache() = info.cache();
  write.mutable_layers()->set_count(2);
  std::string all;
  for (int b = 1; b < 2000; ++b) {
    write.add_blocks(b);
    for (int l = 0; l < 2; ++l) all += std::string(2048, static_cast<char>(b * 2 + l));
  }
  write.set_data(all);
  grpc::ClientContext context;
  v1::WritePagesResponse written;
  ASSERT_TRUE(client_->caches->WritePages(&context, write, &written).ok());

  v1::ReadPagesRequest read;
  *read.mutable_cache() = info.cache();
  read.mutable_layers()->set_first(1);
  read.mutable_layers()->set_count(1);
  std::string want;
  for (int b = 1999; b >= 0; --b) {
    read.add_blocks(b);
    want += std::string(2048, b == 0 ? '\0' : static_cast<char>(b * 2 + 1));
  }
  grpc::ClientContext read_context;
  auto reader = client_->caches->ReadPages(&read_context, read);
  std::string got;
  int parts = 0;
  for (v1::ReadPagesResponse part; reader->Read(&part); ++parts) {
    EXPECT_EQ(part.first_page() * 2048, static_cast<std::int64_t>(got.size()));
    got += part.data();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(got, want);
  EXPECT_EQ(parts, 4);
}

TEST_F(CacheCallsTest, WritesAreCheckedAndChangeNothingWhenRefused) {
  const auto info = MustCreate("a");
  const auto write = [&](std::vector<std::int64_t> blocks, std::size_t bytes) {
    v1::WritePagesRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    for (const auto b : blocks) request.add_blocks(b);
    request.set_data(std::string(bytes, 'x'));
    grpc::ClientContext context;
    v1::WritePagesResponse reply;
    return Details(client_->caches->WritePages(&context, request, &reply));
  };
  const auto write_ring = [&](std::int64_t block, std::size_t bytes) {
    v1::WriteRingRequest request;
    *request.mutable_cache() = info.cache();
    request.mutable_layers()->set_count(2);
    request.add_ring_blocks(block);
    request.set_data(std::string(bytes, 'x'));
    grpc::ClientContext context;
    v1::WriteRingResponse reply;
    return Details(client_->caches->WriteRing(&context, request, &reply));
  };
  const std::string before = Snapshot(info);
  EXPECT_EQ(write({1, 0}, 2048), "NULL_BLOCK blocks[1]");
  EXPECT_EQ(write({1, 1}, 2048), "DUPLICATE_BLOCK blocks[1]");
  EXPECT_EQ(write({1, 10}, 2048), "BLOCK_OUT_OF_RANGE blocks[1]");
  EXPECT_EQ(write({1, 2}, 2047), "SIZE_MISMATCH data");
  EXPECT_EQ(write_ring(0, 20480), "NULL_RING_BLOCK ring_blocks[0]");
  EXPECT_EQ(write_ring(4, 20480), "RING_OUT_OF_RANGE ring_blocks[0]");
  EXPECT_EQ(write_ring(1, 24576), "SIZE_MISMATCH data");
  EXPECT_EQ(Snapshot(info), before);
  EXPECT_EQ(write({1, 2}, 2048), "");
  EXPECT_EQ(write_ring(3, 20480), "");
  EXPECT_NE(Snapshot(info), before);
}

TEST_F(CacheCallsTest, ACancelledReadGivesItsCacheBack) {
  grpc::ClientContext context;
  const auto [cache, reader] = BeginLongRead(context);
  v1::ReadPagesResponse part;
  context.TryCancel();
  while (reader->Read(&part)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(client_->Delete(cache).ok());
  while (caches_->devices()[0]->budget().used_bytes() > 0) std::this_thread::yield();
}

TEST_F(CacheCallsTest, AReaderThatStopsReadingDoesNotKeepADeletedCache) {
  grpc::ClientContext context;
  const auto [cache, reader] = BeginLongRead(context);
  v1::ReadPagesResponse part;
  ASSERT_TRUE(client_->Delete(cache).ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  while (reader->Read(&part)) {
  }
  EXPECT_EQ(Details(reader->Finish()), "CACHE_NOT_FOUND cache.name");
}

TEST_F(CacheCallsTest, DeleteIsAnsweredWhenTheLastHolderHasLetGo) {
  const auto info = MustCreate("a");
  auto held = caches_->Find("a");
  ASSERT_TRUE(held.ok());
  auto deleted = std::async(std::launch::async, [&] { return client_->Delete(info.cache()); });
  while (caches_->Find("a").ok()) std::this_thread::yield();
  EXPECT_GT(caches_->devices()[0]->budget().used_bytes(), 0);
  held->reset();
  EXPECT_TRUE(deleted.get().ok());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
}

TEST_F(CacheCallsTest, ACancelledCreateKeepsNothing) {
  std::promise<void> release;
  Executor& executor = caches_->devices()[0]->executor();
  ASSERT_TRUE(executor.Submit([&] { release.get_future().wait(); }).ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::CreateCacheResponse reply;
  EXPECT_EQ(client_->caches->CreateCache(&context, TestClient::CacheRequest("a"), &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  // The server sees the deadline by its own clock: a cancelled update that comes later shows that it has.
  EXPECT_EQ(Details(Create(TestClient::CacheRequest("a"))), "CACHE_EXISTS name");
  release.set_value();
  std::promise<void> idle;
  ASSERT_TRUE(executor.Submit([&] { idle.set_value(); }).ok());
  idle.get_future().wait();
  EXPECT_TRUE(caches_->List().empty());
  EXPECT_EQ(caches_->devices()[0]->budget().used_bytes(), 0);
  MustCreate("a");
}

TEST_F(CacheCallsTest, AnAnswerTellsLongNamesInPart) {
  grpc::ClientContext context;
  v1::GetCacheRequest get;
  get.set_name(std::string(1 << 20, 'x'));
  v1::GetCacheResponse reply;
  const auto status = client_->caches->GetCache(&context, get, &reply);
  EXPECT_EQ(Details(status), "CACHE_NOT_FOUND cache.name");
  auto create = TestClient::CacheRequest("a");
  create.set_device(std::string(1 << 20, '\n'));
  EXPECT_EQ(Details(Create(create)), "DEVICE_NOT_FOUND device");
}

}  // namespace
}  // namespace kvsummary
