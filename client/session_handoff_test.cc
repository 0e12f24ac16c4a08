#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "client/fake_daemon.h"
#include "client/session.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "kvsummary/v1/session.grpc.pb.h"

namespace kvsummary {
namespace {

using std::chrono::milliseconds;

const std::string kId = "0123456789abcdef";

class Sessions : public v1::SessionService::Service {
 public:
  grpc::Status Open(grpc::ServerContext* context, const v1::OpenRequest*,
                    grpc::ServerWriter<v1::OpenResponse>* writer) override {
    v1::OpenResponse opened;
    opened.mutable_opened()->set_session_id(kId);
    writer->Write(opened);
    std::unique_lock lock(mutex_);
    while (!context->IsCancelled()) changed_.wait_for(lock, milliseconds(5));
    return grpc::Status::OK;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Keeps the last request of each call.
class Handoffs : public v1::HandoffService::Service {
 public:
  grpc::Status Offer(grpc::ServerContext*, const v1::OfferRequest* request,
                     v1::OfferResponse* response) override {
    offer = *request;
    response->set_handoff("text");
    response->set_offer_id(5);
    response->set_lifetime_milliseconds(1234);
    response->set_staged_bytes(99);
    return grpc::Status::OK;
  }
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override {
    append = *request;
    response->set_staged_bytes(777);
    return grpc::Status::OK;
  }
  grpc::Status Accept(grpc::ServerContext*, const v1::AcceptRequest* request,
                      v1::AcceptResponse* response) override {
    accept = *request;
    if (request->handoff() != "text") return Refusal();
    response->set_transport(v1::HANDOFF_TRANSPORT_SAME_HOST);
    response->set_bytes(4096);
    response->set_committed_tokens(40);
    response->set_reconnects(2);
    response->set_damaged_chunks(3);
    response->set_device_nanoseconds(1500);
    return grpc::Status::OK;
  }
  grpc::Status CancelHandoff(grpc::ServerContext*, const v1::CancelHandoffRequest* request,
                             v1::CancelHandoffResponse*) override {
    cancel = *request;
    return grpc::Status::OK;
  }

  v1::OfferRequest offer;
  v1::AppendRequest append;
  v1::AcceptRequest accept;
  v1::CancelHandoffRequest cancel;
};

class SessionHandoffTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/kvs-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + folder_ + "/s", grpc::InsecureServerCredentials());
    builder.RegisterService(&sessions_);
    builder.RegisterService(&handoffs_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    auto client = Client::Connect("unix:" + folder_ + "/s");
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto session = client_->OpenSession("engine-0");
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    std::iota(blocks_.begin(), blocks_.end(), 100);
  }
  void TearDown() override {
    session_.reset();
    client_.reset();
    server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  template <typename Request>
  static std::vector<std::int64_t> BlocksOf(const Request& request) {
    return {request.block_ids().begin(), request.block_ids().end()};
  }

  std::string folder_;
  Sessions sessions_;
  Handoffs handoffs_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ClientSession> session_;
  std::vector<std::int64_t> blocks_ = std::vector<std::int64_t>(10);  // 100 to 109
  const Cache cache_{.name = "c", .generation = 7, .device = "host", .geometry = {.block_size = 16}};
};

TEST_F(SessionHandoffTest, AnOfferSaysWhatItIsTold) {
  const std::vector<std::int64_t> others{4, 6};
  const std::vector<GroupBlocks> groups{{.group = 2, .blocks = others, .first_block_index = 3}};
  const auto offer = session_->Offer(cache_, {.committed_tokens = 41,
                                              .blocks = blocks_,
                                              .ring_block = 3,
                                              .highest_stored_position = 43,
                                              .back_off_tokens = 0,
                                              .namespace_id = 8,
                                              .groups = groups,
                                              .request_id = 9,
                                              .ready = {.buffer_id = 1, .offset_bytes = 64, .value = 11},
                                              .consumers = 2,
                                              .detached = true,
                                              .lifetime = milliseconds(5000)});
  ASSERT_TRUE(offer.ok()) << offer.status();
  EXPECT_EQ(offer->handoff, "text");
  EXPECT_EQ(offer->offer_id, 5);
  EXPECT_EQ(offer->lifetime, milliseconds(1234));
  EXPECT_EQ(offer->staged_bytes, 99);
  const v1::OfferRequest& sent = handoffs_.offer;
  EXPECT_EQ(sent.session_id(), kId);
  EXPECT_EQ(sent.cache().name(), "c");
  EXPECT_EQ(sent.cache().generation(), 7);
  EXPECT_EQ(sent.committed_tokens(), 41);
  EXPECT_EQ(sent.ring().block(), 3);
  EXPECT_EQ(sent.highest_stored_position(), 43);
  EXPECT_TRUE(sent.has_back_off_tokens());
  EXPECT_EQ(sent.back_off_tokens(), 0);
  EXPECT_EQ(sent.namespace_id(), 8);
  ASSERT_EQ(sent.groups_size(), 1);
  EXPECT_EQ(sent.groups(0).group(), 2);
  EXPECT_EQ(sent.groups(0).first_block_index(), 3);
  EXPECT_EQ(BlocksOf(sent.groups(0)), others);
  EXPECT_EQ(sent.request_id(), 9);
  EXPECT_EQ(sent.ready().buffer_id(), 1);
  EXPECT_EQ(sent.ready().offset_bytes(), 64);
  EXPECT_EQ(sent.ready().value(), 11);
  EXPECT_EQ(sent.consumers(), 2);
  EXPECT_TRUE(sent.detached());
  EXPECT_EQ(sent.lifetime_milliseconds(), 5000);
  EXPECT_FALSE(sent.more());
  EXPECT_FALSE(sent.has_layers());
}

TEST_F(SessionHandoffTest, WhatIsNotToldIsAbsent) {
  ASSERT_TRUE(session_->Offer(cache_, {.more = true, .layers = LayerSpan{2, 5}}).ok());
  EXPECT_TRUE(handoffs_.offer.more());
  EXPECT_EQ(handoffs_.offer.layers().first(), 2);
  EXPECT_EQ(handoffs_.offer.layers().count(), 5);
  EXPECT_FALSE(handoffs_.offer.has_ring());
  EXPECT_FALSE(handoffs_.offer.has_ready());
  EXPECT_FALSE(handoffs_.offer.has_highest_stored_position());
  EXPECT_FALSE(handoffs_.offer.has_back_off_tokens());
  ASSERT_TRUE(session_->Append(cache_, 5, {}).ok());
  EXPECT_FALSE(handoffs_.append.has_layers());
  EXPECT_FALSE(handoffs_.append.has_ring());
  EXPECT_FALSE(handoffs_.append.has_ready());
  EXPECT_FALSE(handoffs_.append.has_highest_stored_position());
  ASSERT_TRUE(session_->Accept(cache_, "text", {}).ok());
  EXPECT_FALSE(handoffs_.accept.has_ring());
  EXPECT_FALSE(handoffs_.accept.has_ready());
}

TEST_F(SessionHandoffTest, OnlyBlocksWithRegionsToSendAreNamed) {
  struct Case {
    std::int64_t tokens;
    std::size_t blocks;
  };
  for (const auto& [tokens, blocks] : {Case{0, 0}, Case{7, 0}, Case{8, 1}, Case{16, 1}, Case{23, 1},
                                       Case{24, 2}, Case{160, 10}, Case{1000, 10}, Case{-8, 0}}) {
    const std::vector<std::int64_t> expected(blocks_.begin(),
                                             blocks_.begin() + static_cast<std::ptrdiff_t>(blocks));
    ASSERT_TRUE(session_->Offer(cache_, {.committed_tokens = tokens, .blocks = blocks_}).ok());
    EXPECT_EQ(BlocksOf(handoffs_.offer), expected) << tokens;
    ASSERT_TRUE(session_->Accept(cache_, "text", {.resume_position = tokens, .blocks = blocks_}).ok());
    EXPECT_EQ(BlocksOf(handoffs_.accept), expected) << tokens;
  }
}

TEST_F(SessionHandoffTest, AnAppendNamesTheBlocksOfItsNewRegions) {
  struct Case {
    std::int64_t before, tokens, first;
    std::vector<std::int64_t> blocks;
  };
  const std::vector<Case> cases{
      {0, 16, 0, {100}},  {8, 16, 0, {100}}, {16, 24, 1, {101}}, {15, 40, 0, {100, 101, 102}},
      {31, 32, 1, {101}}, {32, 39, 2, {}},   {24, 24, 2, {}},    {40, 16, 1, {}}};
  for (const Case& c : cases) {
    ASSERT_TRUE(
        session_
            ->Append(cache_, 5, {.committed_tokens = c.tokens, .offered_tokens = c.before, .blocks = blocks_})
            .ok());
    EXPECT_EQ(BlocksOf(handoffs_.append), c.blocks) << c.before << " to " << c.tokens;
    if (!c.blocks.empty()) {
      EXPECT_EQ(handoffs_.append.first_block_index(), c.first) << c.before << " to " << c.tokens;
    }
  }
}

TEST_F(SessionHandoffTest, TheLastAppendBringsTheRing) {
  const auto staged = session_->Append(cache_, 5,
                                       {.layers = LayerSpan{1, 2},
                                        .committed_tokens = 41,
                                        .offered_tokens = 32,
                                        .blocks = blocks_,
                                        .request_id = 6,
                                        .last = true,
                                        .ring_block = 3,
                                        .highest_stored_position = 40});
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(*staged, 777);
  const v1::AppendRequest& sent = handoffs_.append;
  EXPECT_EQ(sent.session_id(), kId);
  EXPECT_EQ(sent.offer_id(), 5);
  EXPECT_EQ(sent.request_id(), 6);
  EXPECT_EQ(sent.layers().first(), 1);
  EXPECT_EQ(sent.layers().count(), 2);
  EXPECT_EQ(sent.committed_tokens(), 41);
  EXPECT_TRUE(sent.last());
  EXPECT_EQ(sent.ring().block(), 3);
  EXPECT_EQ(sent.highest_stored_position(), 40);
}

TEST_F(SessionHandoffTest, AnAcceptTellsHowTheBytesCame) {
  const auto result = session_->Accept(
      cache_, "text",
      {.resume_position = 39, .blocks = blocks_, .ring_block = 2, .transfer_id = "fedcba9876543210"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->transport, HandoffTransport::kSameHost);
  EXPECT_STREQ(NameOf(result->transport), "same host");
  EXPECT_EQ(result->bytes, 4096);
  EXPECT_EQ(result->committed_tokens, 40);
  EXPECT_EQ(result->reconnects, 2);
  EXPECT_EQ(result->damaged_chunks, 3);
  EXPECT_EQ(result->device_time, std::chrono::nanoseconds(1500));
  EXPECT_EQ(handoffs_.accept.session_id(), kId);
  EXPECT_EQ(handoffs_.accept.handoff(), "text");
  EXPECT_EQ(handoffs_.accept.ring().block(), 2);
  EXPECT_EQ(handoffs_.accept.resume_position(), 39);
  EXPECT_EQ(handoffs_.accept.transfer_id(), "fedcba9876543210");
}

TEST_F(SessionHandoffTest, ErrorsAreTheDaemons) {
  EXPECT_EQ(ReasonOf(session_->Accept(cache_, "forged", {}).status()), "SLOT_OUT_OF_RANGE");
}

TEST_F(SessionHandoffTest, IsCancelledByEitherName) {
  ASSERT_TRUE(session_->CancelHandoff(5).ok());
  EXPECT_EQ(handoffs_.cancel.session_id(), kId);
  EXPECT_EQ(handoffs_.cancel.offer_id(), 5);
  ASSERT_TRUE(client_->CancelHandoff("text").ok());
  EXPECT_EQ(handoffs_.cancel.session_id(), "");
  EXPECT_EQ(handoffs_.cancel.handoff(), "text");
}

}  // namespace
}  // namespace kvsummary
