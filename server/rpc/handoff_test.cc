// Hand-offs from daemon to daemon: their bytes, by every way that they can take, and faults of the way.
#include "server/rpc/handoff_test_fixture.h"

namespace kvsummary {
namespace {

using Verdict = Relay::Verdict;

class HandoffTest : public HandoffRpcTest {
 protected:
  void ExpectEveryLength(v1::HandoffTransport transport) {
    const auto source = source_.MakeCache("source", kSource);
    const auto target = target_.MakeCache("target", kTarget);
    for (const std::int64_t n : {1, 7, 8, 9, 15, 16, 17, 33, 64, 79}) {
      for (const std::int64_t resume : {n, n - 1, n - 2}) {
        if (resume < 0) continue;
        SCOPED_TRACE(std::to_string(n) + " " + std::to_string(resume));
        Fill(*source, kOffered, n / 8, n + 2);
        const auto offer = MustOffer(OfferRequestOf(*source, kOffered, n));
        std::memset(source->memory().data(), 0x55, static_cast<std::size_t>(source->memory().bytes()));
        std::memset(target->memory().data(), kUntouched, static_cast<std::size_t>(target->memory().bytes()));
        v1::AcceptResponse reply;
        const auto status = Accept(AcceptRequestOf(offer.handoff(), *target, kAccepted, resume), &reply);
        ASSERT_TRUE(status.ok()) << status.error_message();
        EXPECT_EQ(reply.transport(), transport);
        EXPECT_EQ(reply.committed_tokens(), n);
        EXPECT_TRUE(BytesOf(*target) == Expected(*target, kAccepted, resume));
        // The puller may say that it has it all, and reads no more, behind its answer.
        while (source_.Stats().offers() + source_.Stats().staged_bytes() > 0) std::this_thread::yield();
      }
    }
  }
};

TEST_F(HandoffTest, BytesOverGrpcAreRight) {
  StartBoth(true);
  ExpectEveryLength(v1::HANDOFF_TRANSPORT_GRPC);
}

TEST_F(HandoffTest, BytesOfTheSameHostAreRight) {
  StartBoth(false);
  ExpectEveryLength(v1::HANDOFF_TRANSPORT_SAME_HOST);
}

TEST_F(HandoffTest, AnOfferOfTheSameDaemonIsCopied) {
  source_ = Start("source");
  const auto from = source_.MakeCache("from", kSource);
  const auto to = source_.MakeCache("to", kTarget);
  Fill(*from, kOffered, 8, 66);
  const auto offer = MustOffer(OfferRequestOf(*from, kOffered, 64));
  v1::AcceptRequest request;
  request.set_session_id(source_.client->session_id);
  request.set_handoff(offer.handoff());
  *request.mutable_cache() = RefOf(*to);
  request.mutable_block_ids()->Add(kAccepted.blocks.begin(), kAccepted.blocks.end());
  request.mutable_ring()->set_base(3 * to->geometry().rows_per_block());
  request.set_resume_position(63);
  v1::AcceptResponse reply;
  const auto status = source_.Call(&Stub::Accept, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.transport(), v1::HANDOFF_TRANSPORT_SAME_DAEMON);
  EXPECT_TRUE(BytesOf(*to) == Expected(*to, kAccepted, 63));
  EXPECT_EQ(source_.Stats().staged_bytes(), 0);
  EXPECT_EQ(ReasonOf(source_.Call(&Stub::Accept, request, &reply)), "HANDOFF_NOT_FOUND");  // replayed
}

TEST_F(HandoffTest, AFlippedBitIsFoundAndTheChunkFetchedAgain) {
  StartBoth(true);
  const Large large = OfferLarge();
  int seen = 0;
  relay_->on_response = [&](v1::PullResponse& message) {
    if (message.has_chunk() && ++seen % 3 == 1 && seen < 10)
      (*message.mutable_chunk()->mutable_data())[77] ^= 4;
    return Verdict::kPass;
  };
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Arrived(large));
  EXPECT_EQ(reply.damaged_chunks(), 3);
  EXPECT_EQ(relay_->chunks(), kLargeChunks + 3);
  EXPECT_EQ(target_.Stats().damaged_chunks(), 3);
}

TEST_F(HandoffTest, ALinkThatDamagesEverythingIsRefusedAndTheOfferStays) {
  StartBoth(true);
  const Large large = OfferLarge();
  std::atomic<bool> damage = true;
  relay_->on_response = [&](v1::PullResponse& message) {
    if (damage && message.has_chunk()) message.mutable_chunk()->mutable_data()->back() ^= 1;
    return Verdict::kPass;
  };
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "CHUNK_DAMAGED");
  EXPECT_EQ(source_.Stats().offers(), 1);
  damage = false;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "OK");
  EXPECT_TRUE(Arrived(large));
}

TEST_F(HandoffTest, ABrokenStreamGoesOnWhereItWas) {
  StartBoth(true);
  const Large large = OfferLarge();
  std::int64_t passed = 0;
  relay_->on_response = [&](v1::PullResponse& message) {
    if (!message.has_chunk()) return Verdict::kPass;
    return ++passed == 3 || passed == 6 ? Verdict::kBreak : Verdict::kPass;
  };
  std::vector<std::int64_t> held;
  relay_->on_request = [&](v1::PullRequest& message) {
    if (message.has_begin()) {
      std::int64_t chunks = 0;
      for (const auto& run : message.begin().held()) chunks += run.count();
      held.push_back(chunks);
    }
    return Verdict::kPass;
  };
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Arrived(large));
  EXPECT_EQ(reply.reconnects(), 2);
  EXPECT_EQ(relay_->streams(), 3);
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0], 0);
  EXPECT_GE(held[1], 1);
  EXPECT_GT(held[2], held[1]);
}

TEST_F(HandoffTest, ASourceThatIsGoneForGoodIsReportedByName) {
  give_up_ = std::chrono::milliseconds(300);
  StartBoth(true);
  const Large large = OfferLarge();
  relay_->on_response = [&](v1::PullResponse& message) {
    return message.has_chunk() ? Verdict::kBreak : Verdict::kPass;
  };
  relay_->on_request = [&](v1::PullRequest& message) {
    return relay_->streams() > 1 && message.has_hello() ? Verdict::kBreak : Verdict::kPass;
  };
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "PEER_UNREACHABLE");
  EXPECT_EQ(source_.Stats().offers(), 1);  // it may be tried again until its deadline
  relay_.reset();
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "PEER_UNREACHABLE");
  EXPECT_EQ(target_.Stats().failed(), 2);
}

TEST_F(HandoffTest, ASourceThatSpeaksOnEveryStreamButBringsNothingIsGivenUp) {
  give_up_ = std::chrono::milliseconds(300);
  StartBoth(true);
  const Large large = OfferLarge();
  relay_->on_response = [&, stream = 0](v1::PullResponse& message) mutable {
    const bool first = std::exchange(stream, relay_->streams()) != relay_->streams();
    message.clear_chunk();
    return first ? Verdict::kPass : Verdict::kBreak;
  };
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "PEER_UNREACHABLE");
  EXPECT_GT(relay_->streams(), 1);
}

TEST_F(HandoffTest, ASourceThatSpeaksAnotherVersionOfPullIsReportedByName) {
  StartBoth(true);
  const Large large = OfferLarge();
  relay_->on_response = [](v1::PullResponse& message) {
    if (message.has_accepted()) message.mutable_accepted()->set_version(2);
    return Verdict::kPass;
  };
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  EXPECT_EQ(ReasonOf(status), "PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find("version 2 of Pull, not 1"), std::string::npos);
  EXPECT_EQ(source_.Stats().offers(), 1);
}

TEST_F(HandoffTest, ASourceThatWasStartedAnewDoesNotKnowTheOffer) {
  StartBoth(false);
  Large large = OfferLarge();
  large.source = nullptr;
  source_.client.reset();
  source_.server.reset();
  source_ = Start("source");
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "HANDOFF_NOT_FOUND");
}

TEST_F(HandoffTest, RegionsAreReceivedWhileThePrefillGoesOn) {
  StartBoth(true);
  const auto source = source_.MakeCache("source", kSource);
  const auto target = target_.MakeCache("target", kTarget);
  Fill(*source, kOffered, 5, 46);
  v1::OfferRequest first = OfferRequestOf(*source, kOffered, 17);
  first.clear_ring();
  first.set_more(true);
  first.mutable_layers()->set_count(2);
  const auto offer = MustOffer(first);
  v1::AcceptResponse reply;
  grpc::ClientContext context;
  auto accepted = AcceptSoon(AcceptRequestOf(offer.handoff(), *target, kAccepted, 42), &reply, &context);
  const auto append = [&](int layer, int layers, std::int64_t n, bool last) {
    v1::AppendRequest request;
    request.set_session_id(source_.client->session_id);
    request.set_offer_id(offer.offer_id());
    request.mutable_layers()->set_first(layer);
    request.mutable_layers()->set_count(layers);
    request.set_committed_tokens(n);
    request.mutable_block_ids()->Add(kOffered.blocks.begin(), kOffered.blocks.end());
    request.set_last(last);
    if (last) request.mutable_ring()->set_block(kOffered.ring_block);
    v1::AppendResponse appended;
    return ReasonOf(source_.Call(&Stub::Append, request, &appended));
  };
  EXPECT_EQ(append(2, 1, 30, false), "OK");
  EXPECT_EQ(append(0, 2, 31, false), "OK");
  EXPECT_EQ(append(0, 3, 44, true), "OK");
  const auto status = accepted.get();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.committed_tokens(), 44);
  EXPECT_TRUE(BytesOf(*target) == Expected(*target, kAccepted, 42));
}

TEST_F(HandoffTest, CancellingTheOfferEndsWhoWaitsForMore) {
  StartBoth(true);
  const auto source = source_.MakeCache("source", kSource);
  const auto target = target_.MakeCache("target", kTarget);
  for (const bool by_session : {false, true}) {
    const auto offer = OfferMore(*source);
    v1::AcceptResponse reply;
    grpc::ClientContext context;
    std::promise<void> begun;
    relay_->on_response = [&, told = false](v1::PullResponse& message) mutable {
      if (message.parts_size() > 0 && !std::exchange(told, true)) begun.set_value();
      return Verdict::kPass;
    };
    auto accepted = AcceptSoon(AcceptRequestOf(offer.handoff(), *target, kAccepted, 15), &reply, &context);
    begun.get_future().get();
    if (by_session) {
      source_.client->Close();
    } else {
      v1::CancelHandoffRequest cancel;
      cancel.set_handoff(offer.handoff());
      v1::CancelHandoffResponse cancelled;
      EXPECT_EQ(ReasonOf(source_.Call(&Stub::CancelHandoff, cancel, &cancelled)), "OK");
    }
    EXPECT_EQ(ReasonOf(accepted.get()), "HANDOFF_CANCELLED");
  }
}

TEST_F(HandoffTest, CancellingTheAcceptOrEndingItsSessionEndsItAndLeavesTheOffer) {
  StartBoth(true);
  const auto source = source_.MakeCache("source", kSource);
  const auto target = target_.MakeCache("target", kTarget);
  const auto offer = OfferMore(*source);
  for (const bool by_session : {false, true}) {
    v1::AcceptResponse reply;
    grpc::ClientContext context;
    std::promise<void> begun;
    relay_->on_response = [&, told = false](v1::PullResponse& message) mutable {
      if (message.parts_size() > 0 && !std::exchange(told, true)) begun.set_value();
      return Verdict::kPass;
    };
    auto accepted = AcceptSoon(AcceptRequestOf(offer.handoff(), *target, kAccepted, 15), &reply, &context);
    begun.get_future().get();
    if (by_session) {
      target_.client->Close();
      EXPECT_EQ(ReasonOf(accepted.get()), "SESSION_ENDED");
    } else {
      context.TryCancel();
      EXPECT_EQ(accepted.get().error_code(), grpc::StatusCode::CANCELLED);
    }
    EXPECT_EQ(source_.Stats().offers(), 1);
  }
}

TEST_F(HandoffTest, OnlyPeersThatAreAllowedAreDialled) {
  Server::Options options;
  options.advertise = "127.0.0.1:9";
  StartBoth(false, options);
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "HANDOFF_PEER_NOT_ALLOWED");
}

TEST_F(HandoffTest, WhatCannotFitIsRefusedByNameBeforeAnybodyIsAsked) {
  StartBoth(true);
  const auto source = source_.MakeCache("source", kSource);
  const auto target = target_.MakeCache("target", kTarget);
  CacheGeometry other = kTarget;
  other.layers = 2;
  const auto narrow = target_.MakeCache("narrow", other);
  Fill(*source, kOffered, 5, 46);
  const auto offer = MustOffer(OfferRequestOf(*source, kOffered, 44));
  const auto refused = [&](const Cache& cache, auto change) {
    v1::AcceptRequest request = AcceptRequestOf(offer.handoff(), cache, kAccepted, 44);
    change(request);
    v1::AcceptResponse reply;
    return Details(Accept(request, &reply));
  };
  const auto same = [](auto&) {};
  EXPECT_EQ(refused(*narrow, same), "GEOMETRY_DIFFERS cache");
  EXPECT_EQ(refused(*target, [](auto& r) { r.set_resume_position(45); }),
            "RESUME_OUT_OF_RANGE resume_position");
  EXPECT_EQ(refused(*target, [](auto& r) { r.clear_ring(); }), "FIELD_MISSING ring");
  EXPECT_EQ(refused(*target, [](auto& r) { r.mutable_ring()->set_base(7); }),
            "RING_BASE_MISALIGNED ring.base");
  EXPECT_EQ(refused(*target, [](auto& r) { r.set_block_ids(1, 19); }), "DUPLICATE_BLOCK block_ids[1]");
  EXPECT_EQ(refused(*target, [](auto& r) { r.set_transfer_id("short"); }), "SIZE_MISMATCH transfer_id");
  EXPECT_EQ(refused(*target, [](auto& r) { r.set_handoff("x" + r.handoff()); }), "HANDOFF_INVALID handoff");
  EXPECT_EQ(refused(*target, [](auto& r) { r.mutable_cache()->set_generation(1); }),
            "GENERATION_STALE cache.generation");
  EXPECT_EQ(relay_->streams(), 0);
  EXPECT_EQ(BytesOf(*target), std::string(BytesOf(*target).size(), static_cast<char>(kUntouched)));
}

TEST_F(HandoffTest, ARepeatedOfferIsAnsweredAsTheFirst) {
  StartBoth(false);
  const auto source = source_.MakeCache("source", kSource);
  v1::OfferRequest request = OfferRequestOf(*source, kOffered, 44);
  request.set_request_id(5);
  const auto first = MustOffer(request);
  EXPECT_EQ(MustOffer(request).handoff(), first.handoff());
  EXPECT_EQ(source_.Stats().offered(), 1);
  request.set_request_id(6);
  EXPECT_NE(MustOffer(request).handoff(), first.handoff());
}

TEST_F(HandoffTest, AServedOfferCannotBeHadByAnother) {
  StartBoth(false);
  const Large large = OfferLarge();
  v1::AcceptRequest request = AcceptOf(large);
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(request, &reply)), "OK");
  while (source_.Stats().completed() == 0) std::this_thread::yield();
  request.set_transfer_id("another consumer");
  EXPECT_EQ(ReasonOf(Accept(request, &reply)), "HANDOFF_NOT_FOUND");
}

TEST_F(HandoffTest, SmallOnesAreNotHeldUpByALargeOne) {
  StartBoth(true);
  const Large large = OfferLarge();
  const auto source = source_.MakeCache("source", kSource);
  const auto target = target_.MakeCache("target", kTarget);
  Fill(*source, kOffered, 5, 46);
  const auto small = MustOffer(OfferRequestOf(*source, kOffered, 44));
  // The large one stands still behind its first chunk: until the small one is through.
  std::promise<void> first_chunk;
  std::promise<void> small_is_through;
  std::shared_future<void> through = small_is_through.get_future().share();
  std::uint32_t large_pull = 0;
  std::vector<std::uint32_t> order;
  relay_->on_request = [&](v1::PullRequest& message) {
    if (message.has_begin() && large_pull == 0) large_pull = message.begin().pull();
    return Verdict::kPass;
  };
  relay_->on_response = [&](v1::PullResponse& message) {
    if (message.has_chunk()) order.push_back(message.pull());
    if (order.size() == 1 && message.has_chunk()) first_chunk.set_value();
    return Verdict::kPass;
  };
  v1::AcceptResponse large_reply;
  grpc::ClientContext context;
  auto accepted = AcceptSoon(AcceptOf(large), &large_reply, &context);
  first_chunk.get_future().get();
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptRequestOf(small.handoff(), *target, kAccepted, 44), &reply)), "OK");
  EXPECT_TRUE(accepted.get().ok());
  EXPECT_TRUE(Arrived(large));
  EXPECT_EQ(relay_->streams(), 1);  // both shared it
}

TEST_F(HandoffTest, BadMessagesOfAPullerEndItsStreamAlone) {
  StartBoth(false);
  const Large large = OfferLarge();
  const auto send = [&](auto fill) {
    grpc::ClientContext context;
    const auto stream = source_.stub->Pull(&context);
    v1::PullRequest message;
    fill(message);
    stream->Write(message);
    stream->WritesDone();
    v1::PullResponse response;
    while (stream->Read(&response)) {
      if (response.has_failed()) return response.failed().message();
    }
    const auto status = stream->Finish();
    return ReasonOf(status);
  };
  EXPECT_EQ(send([](auto&) {}), "MESSAGE_MALFORMED");
  EXPECT_EQ(send([](auto& m) { m.mutable_credit()->set_bytes(-1); }), "MESSAGE_MALFORMED");
  EXPECT_EQ(send([](auto& m) { m.mutable_credit()->set_bytes(std::int64_t{1} << 40); }), "MESSAGE_MALFORMED");
  EXPECT_EQ(send([](auto& m) { m.mutable_begin()->set_pull(0); }), "MESSAGE_MALFORMED");
  EXPECT_EQ(send([](auto& m) { m.mutable_hello()->set_version(2); }),
            "12 it speaks version 1 of Pull, not 2");
  EXPECT_EQ(send([](auto& m) { m.mutable_begin()->set_transfer_id("x"); }), "MESSAGE_MALFORMED");
  EXPECT_EQ(send([](auto& m) { m.mutable_again()->set_pull(9); }), "OK");
  EXPECT_EQ(send([](auto& m) { m.mutable_end()->set_pull(9); }), "OK");
  EXPECT_EQ(send([](auto& m) { m.mutable_probe(); }), "OK");
  EXPECT_EQ(send([](auto& m) {
              m.mutable_begin()->set_transfer_id("0123456789abcdef");
              m.mutable_begin()->set_pull(1);
              m.mutable_begin()->set_offer_secret("guessed");
            }),
            "the daemon has no such offer");
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "OK");
  EXPECT_TRUE(Arrived(large));
}

TEST_F(HandoffTest, ADrainEndsStreamsAndTheDaemonGoes) {
  StartBoth(false);
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "OK");
  source_.server->Drain(std::chrono::seconds(30));
}

}  // namespace
}  // namespace kvsummary
