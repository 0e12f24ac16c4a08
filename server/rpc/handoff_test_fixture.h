// Two daemons, one of which offers and one that accepts, with a session each; and a relay between them that
// looks at the messages of Pull, changes them and breaks the stream.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/update.h"
#include "kvsummary/v1/handoff.grpc.pb.h"
#include "server/handoff/handoff_patterns.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {

inline constexpr CacheGeometry kSource = {.layers = 3,
                                          .blocks = 12,
                                          .block_size = 16,
                                          .block_stride = 256,
                                          .ring_blocks = 4,
                                          .capacity = 12,
                                          .rows_per_layer = 12,
                                          .k = 3};
inline constexpr CacheGeometry kTarget = {.layers = 3,
                                          .blocks = 20,
                                          .block_size = 8,
                                          .block_stride = 512,
                                          .ring_blocks = 5,
                                          .capacity = 10,
                                          .rows_per_layer = 13,
                                          .k = 3};
inline const PlacedRequest kOffered = {{11, 3, 7, 1, 9}, 2};
inline const PlacedRequest kAccepted = {{19, 2, 17, 4, 15, 6, 13, 8, 11, 10}, 3};

// Several chunks: 4 layers of 1.5 MiB.
inline constexpr CacheGeometry kLarge = {.layers = 4,
                                         .blocks = 8,
                                         .block_size = 8192,
                                         .block_stride = 0,
                                         .ring_blocks = 2,
                                         .capacity = 16,
                                         .rows_per_layer = 16,
                                         .k = 0};
inline constexpr std::int64_t kLargeTokens = 6 * 8192 + 5;
inline constexpr std::int64_t kLargeChunks = 4 * 2 + 1;
inline const PlacedRequest kLargeRequest = {{7, 6, 5, 4, 3, 2}, 1};

// What a router that carries bytes between daemons could do to them.
class Relay final : public v1::HandoffService::Service {
 public:
  // What becomes of a message. The hooks are called one at a time.
  enum class Verdict { kPass, kDrop, kBreak };
  std::function<Verdict(v1::PullRequest&)> on_request = [](auto&) { return Verdict::kPass; };
  std::function<Verdict(v1::PullResponse&)> on_response = [](auto&) { return Verdict::kPass; };
  // Not OK: what an Acknowledge is answered, and the source does not hear of it.
  std::function<grpc::Status()> on_acknowledge = [] { return grpc::Status::OK; };

  Relay(const std::string& address, const std::string& target)
      : stub_(v1::HandoffService::NewStub(
            grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), Unlimited()))) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Relay() override { server_->Shutdown(std::chrono::system_clock::now()); }

  // While streams are under way.
  void SetOnResponse(std::function<Verdict(v1::PullResponse&)> hook) {
    const std::lock_guard lock(mutex_);
    on_response = std::move(hook);
  }

  std::int64_t chunks() const { return chunks_; }
  int streams() const { return streams_; }
  int ended() const { return ended_; }  // of them

  grpc::Status Pull(grpc::ServerContext* call,
                    grpc::ServerReaderWriter<v1::PullResponse, v1::PullRequest>* puller) override {
    ++streams_;
    const auto context = grpc::ClientContext::FromServerContext(*call);
    const auto source = stub_->Pull(context.get());
    std::atomic<bool> broken = false;
    std::thread requests([&] {
      for (v1::PullRequest message; puller->Read(&message);) {
        const Verdict verdict = Ask(on_request, message);
        if (verdict == Verdict::kBreak) broken = true;
        if (verdict == Verdict::kBreak || (verdict == Verdict::kPass && !source->Write(message))) break;
      }
      context->TryCancel();
    });
    for (v1::PullResponse message; !broken && source->Read(&message);) {
      if (message.has_chunk()) ++chunks_;
      const Verdict verdict = Ask(on_response, message);
      if (verdict == Verdict::kBreak) broken = true;
      if (verdict == Verdict::kBreak || (verdict == Verdict::kPass && !puller->Write(message))) break;
    }
    context->TryCancel();
    call->TryCancel();
    requests.join();
    source->Finish();
    ++ended_;
    return {grpc::StatusCode::UNAVAILABLE, "the relay has broken the stream"};
  }
  grpc::Status Acknowledge(grpc::ServerContext* /*call*/, const v1::AcknowledgeRequest* request,
                           v1::AcknowledgeResponse* reply) override {
    if (const grpc::Status status = on_acknowledge(); !status.ok()) return status;
    grpc::ClientContext context;
    return stub_->Acknowledge(&context, *request, reply);
  }

 private:
  static grpc::ChannelArguments Unlimited() {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return arguments;
  }
  template <typename Message>
  Verdict Ask(const std::function<Verdict(Message&)>& hook, Message& message) {
    std::lock_guard lock(mutex_);
    return hook(message);
  }

  const std::unique_ptr<v1::HandoffService::Stub> stub_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::atomic<std::int64_t> chunks_ = 0;
  std::atomic<int> streams_ = 0;
  std::atomic<int> ended_ = 0;
};

class HandoffRpcTest : public ::testing::Test {
 protected:
  using Stub = v1::HandoffService::Stub;

  // A daemon and a client of it with a session.
  struct Daemon {
    std::unique_ptr<CacheManager> caches;
    std::unique_ptr<Server> server;
    std::unique_ptr<TestClient> client;
    std::unique_ptr<Stub> stub;

    std::shared_ptr<Cache> MakeCache(const std::string& name, const CacheGeometry& geometry) {
      v1::CreateCacheRequest request = TestClient::CacheRequest(name);
      auto* g = request.mutable_geometry();
      g->set_layers(geometry.layers);
      g->set_blocks(geometry.blocks);
      g->set_block_size(geometry.block_size);
      g->set_block_stride(geometry.dense_block_stride() + geometry.block_stride);
      g->set_ring_blocks(geometry.ring_blocks);
      g->set_capacity(geometry.capacity);
      g->set_rows_per_layer(geometry.rows_per_layer);
      g->set_k(geometry.k);
      request.set_session_id(client->session_id);
      v1::CreateCacheResponse reply;
      grpc::ClientContext context;
      const auto status = client->caches->CreateCache(&context, request, &reply);
      EXPECT_TRUE(status.ok()) << status.error_message();
      auto cache = *caches->Find(name);
      std::memset(cache->memory().data(), kUntouched, static_cast<std::size_t>(cache->memory().bytes()));
      return cache;
    }
    template <typename Request, typename Reply>
    grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                      const Request& request, Reply* reply) {
      grpc::ClientContext context;
      return (stub.get()->*method)(&context, request, reply);
    }
    v1::HandoffStats Stats() {
      grpc::ClientContext context;
      v1::GetStatsResponse reply;
      EXPECT_TRUE(client->admin->GetStats(&context, {}, &reply).ok());
      return reply.handoff();
    }
  };

  HandoffRpcTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
  }
  ~HandoffRpcTest() override {
    for (Daemon* daemon : {&target_, &source_}) daemon->client.reset();
    target_.server.reset();
    relay_.reset();
    source_.server.reset();
    std::filesystem::remove_all(dir_);
  }

  std::string Address(const std::string& name) const { return "unix:" + dir_ + "/" + name; }

  // On a Unix socket, behind the addresses that are given.
  Daemon Start(const std::string& name, Server::Options options = {}) {
    Daemon daemon;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), std::int64_t{256} << 20));
    daemon.caches = std::make_unique<CacheManager>(std::move(devices), 1000);
    options.listen.push_back(Address(name));
    for (const char* peer : {"source", "relay"}) EXPECT_TRUE(options.peers.Allow(Address(peer)).ok());
    options.pull.give_up = give_up_;
    options.pull.silence = silence_;
    options.handoff.bytes_per_device = std::int64_t{32} << 20;
    auto server = Server::Start(options, *daemon.caches);
    EXPECT_TRUE(server.ok()) << server.status();
    daemon.server = *std::move(server);
    Connect(name, daemon);
    return daemon;
  }
  void Connect(const std::string& name, Daemon& daemon) {
    daemon.client = std::make_unique<TestClient>(Address(name));
    EXPECT_TRUE(daemon.client->Open(name).ok());
    daemon.stub = v1::HandoffService::NewStub(daemon.client->channel());
  }
  // Both daemons, the source behind a relay when that is wanted. Memory is shared without one, or as wanted.
  void StartBoth(bool relayed, Server::Options source = {}) {
    StartBoth(relayed, !relayed, std::move(source));
  }
  void StartBoth(bool relayed, bool same_host, Server::Options source) {
    if (relayed) source.advertise = Address("relay");
    source_ = Start("source", source);
    Server::Options target;
    target.pull.same_host = same_host;
    target_ = Start("target", target);
    if (relayed) relay_ = std::make_unique<Relay>(Address("relay"), Address("source"));
  }

  static v1::CacheRef RefOf(const Cache& cache) {
    v1::CacheRef ref;
    ref.set_name(cache.name());
    ref.set_generation(cache.generation());
    return ref;
  }
  v1::OfferRequest OfferRequestOf(const Cache& cache, const PlacedRequest& request, std::int64_t n) const {
    v1::OfferRequest message;
    message.set_session_id(source_.client->session_id);
    *message.mutable_cache() = RefOf(cache);
    message.set_committed_tokens(n);
    message.mutable_block_ids()->Add(request.blocks.begin(), request.blocks.end());
    message.mutable_ring()->set_block(request.ring_block);
    return message;
  }
  v1::OfferResponse MustOffer(const v1::OfferRequest& request) {
    v1::OfferResponse reply;
    const auto status = source_.Call(&Stub::Offer, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  v1::AcceptRequest AcceptRequestOf(const std::string& handoff, const Cache& cache,
                                    const PlacedRequest& request, std::int64_t resume) const {
    v1::AcceptRequest message;
    message.set_session_id(target_.client->session_id);
    message.set_handoff(handoff);
    *message.mutable_cache() = RefOf(cache);
    message.mutable_block_ids()->Add(request.blocks.begin(), request.blocks.end());
    message.mutable_ring()->set_block(request.ring_block);
    message.set_resume_position(resume);
    message.set_transfer_id("0123456789abcdef");
    return message;
  }
  grpc::Status Accept(const v1::AcceptRequest& request, v1::AcceptResponse* reply) {
    return target_.Call(&Stub::Accept, request, reply);
  }
  std::future<grpc::Status> AcceptSoon(const v1::AcceptRequest& request, v1::AcceptResponse* reply,
                                       grpc::ClientContext* context) {
    return std::async(std::launch::async, [this, request, reply, context] {
      return target_.stub->Accept(context, request, reply);
    });
  }

  // A request of several chunks, offered, and its bytes no more in the source's cache.
  struct Large {
    std::shared_ptr<Cache> source;
    std::shared_ptr<Cache> target;
    v1::OfferResponse offer;
  };
  Large OfferLarge() {
    return OfferAgain({source_.MakeCache("large", kLarge), target_.MakeCache("large", kLarge), {}});
  }
  Large OfferAgain(Large large) {
    Fill(*large.source, kLargeRequest, kLargeTokens / 8, kLargeTokens - 1);
    large.offer = MustOffer(OfferRequestOf(*large.source, kLargeRequest, kLargeTokens));
    std::memset(large.source->memory().data(), 0x55,
                static_cast<std::size_t>(large.source->memory().bytes()));
    return large;
  }
  v1::AcceptRequest AcceptOf(const Large& large) const {
    return AcceptRequestOf(large.offer.handoff(), *large.target, kLargeRequest, kLargeTokens);
  }
  bool Arrived(const Large& large) const {
    return BytesOf(*large.target) == Expected(*large.target, kLargeRequest, kLargeTokens);
  }

  // An offer of 16 tokens of kOffered that is not complete, and what completes it with `n`.
  v1::OfferResponse OfferMore(const Cache& cache) {
    v1::OfferRequest first = OfferRequestOf(cache, kOffered, 16);
    first.clear_ring();
    first.set_more(true);
    return MustOffer(first);
  }
  std::string AppendLast(const v1::OfferResponse& offer, std::int64_t n) {
    v1::AppendRequest request;
    request.set_session_id(source_.client->session_id);
    request.set_offer_id(offer.offer_id());
    request.set_committed_tokens(n);
    request.mutable_block_ids()->Add(kOffered.blocks.begin(), kOffered.blocks.end());
    request.set_last(true);
    request.mutable_ring()->set_block(kOffered.ring_block);
    v1::AppendResponse appended;
    return ReasonOf(source_.Call(&Stub::Append, request, &appended));
  }

  std::chrono::milliseconds give_up_{10'000};
  std::chrono::milliseconds silence_{5'000};
  std::string dir_ = "/tmp/kvs-XXXXXX";
  Daemon source_;
  Daemon target_;
  std::unique_ptr<Relay> relay_;
};

}  // namespace kvsummary
