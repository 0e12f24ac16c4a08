// Sources that are there, and say nothing: at every step of a hand-off.
#include <climits>

#include "server/rpc/byte_relay.h"
#include "server/rpc/handoff_test_fixture.h"

namespace kvsummary {
namespace {

using Verdict = Relay::Verdict;

// What a source still says of its messages, until it says nothing.
enum class Step { kNothing, kNoChunk, kSomeChunks, kNoEnd };

struct SilentStep {
  const char* name;
  Step step;
};

class HandoffSilenceTest : public HandoffRpcTest {
 protected:
  HandoffSilenceTest() {
    silence_ = std::chrono::milliseconds(600);
    give_up_ = std::chrono::milliseconds(1000);
  }
  // Of streams up to the last-th the relay lets pass what comes before the step.
  void FallSilent(Step step, int last) {
    relay_->SetOnResponse(
        [this, step, last, stream = 0, silent = false, chunks = 0](v1::PullResponse& message) mutable {
          if (relay_->streams() > last) return Verdict::kPass;
          if (std::exchange(stream, relay_->streams()) != relay_->streams()) silent = step == Step::kNothing;
          if (silent) return Verdict::kDrop;
          if (step == Step::kNoChunk && message.has_chunk()) {
            message.clear_chunk();
            message.clear_done();
            silent = true;
          }
          if (step == Step::kSomeChunks && message.has_chunk()) {
            silent = ++chunks >= 3;
            if (chunks > 3) return Verdict::kDrop;
          }
          if (step == Step::kNoEnd) message.clear_done();
          return step == Step::kNoEnd && message.has_alive() ? Verdict::kDrop : Verdict::kPass;
        });
  }
  std::string Text(const grpc::Status& status) const {
    return std::to_string(status.error_code()) + " " + ReasonOf(status);
  }
};

class EverySilence : public HandoffSilenceTest, public ::testing::WithParamInterface<SilentStep> {};

TEST_P(EverySilence, IsABrokenLinkAndThePullGoesOn) {
  StartBoth(true);
  const Large large = OfferLarge();
  FallSilent(GetParam().step, 1);
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Arrived(large));
  EXPECT_GE(reply.reconnects(), 1);
}

TEST_P(EverySilence, ThatLastsIsReportedByNameAndTheOfferStays) {
  StartBoth(true);
  const Large large = OfferLarge();
  FallSilent(GetParam().step, INT_MAX);
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  EXPECT_EQ(Text(status), "14 PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find(Address("relay")), std::string::npos) << status.error_message();
  EXPECT_NE(status.error_message().find("has said nothing"), std::string::npos) << status.error_message();
  EXPECT_GE(relay_->streams(), 2);
  EXPECT_EQ(source_.Stats().offers(), 1);
  FallSilent(GetParam().step, 0);
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "OK");
  EXPECT_TRUE(Arrived(large));
}

INSTANTIATE_TEST_SUITE_P(At, EverySilence,
                         ::testing::Values(SilentStep{"BeforeAnything", Step::kNothing},
                                           SilentStep{"BeforeTheFirstChunk", Step::kNoChunk},
                                           SilentStep{"BetweenChunks", Step::kSomeChunks},
                                           SilentStep{"BeforeTheEnd", Step::kNoEnd}),
                         [](const auto& info) { return std::string(info.param.name); });

// Of a connection that is made: nothing at all, or the middle of a chunk.
class SilenceAfterBytes : public HandoffSilenceTest, public ::testing::WithParamInterface<std::int64_t> {};

TEST_P(SilenceAfterBytes, IsABrokenLink) {
  Server::Options source;
  source.advertise = Address("relay");
  source_ = Start("source", source);
  Server::Options target;
  target.pull.same_host = false;
  target_ = Start("target", target);
  ByteRelay relay(dir_ + "/relay", dir_ + "/source", GetParam());
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  EXPECT_EQ(Text(status), "14 PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find(Address("relay")), std::string::npos) << status.error_message();
  EXPECT_GE(relay.connections(), 1);
  EXPECT_EQ(source_.Stats().offers(), 1);
  relay.Heal();
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "OK");
  EXPECT_TRUE(Arrived(large));
}

INSTANTIATE_TEST_SUITE_P(At, SilenceAfterBytes, ::testing::Values(0, 300'000), [](const auto& info) {
  return std::string(info.param == 0 ? "Connect" : "MidChunk");
});

// An acceptance that waits for its source's engine until the relay has seen six answers, each after half of
// the silence; then the offer is completed.
class HandoffWaitingTest : public HandoffSilenceTest {
 protected:
  void Start(bool same_host) {
    StartBoth(true, same_host, {});
    from_ = source_.MakeCache("from", kSource);
    to_ = target_.MakeCache("to", kTarget);
    Fill(*from_, kOffered, 5, 46);
  }
  grpc::Status AcceptMuchLater(v1::AcceptResponse* reply, bool drop_last_word) {
    const auto offer = OfferMore(*from_);
    std::promise<void> long_enough;
    relay_->on_response = [&, answers = 0, silent = false](v1::PullResponse& message) mutable {
      if (message.has_alive() && ++answers == 6) long_enough.set_value();
      silent = silent || (drop_last_word && message.has_ended());
      return silent ? Verdict::kDrop : Verdict::kPass;
    };
    grpc::ClientContext context;
    auto accepted = AcceptSoon(AcceptRequestOf(offer.handoff(), *to_, kAccepted, 42), reply, &context);
    long_enough.get_future().get();
    EXPECT_EQ(AppendLast(offer, 44), "OK");
    const auto status = accepted.get();
    relay_->SetOnResponse([](auto&) { return Verdict::kPass; });
    return status;
  }

  std::shared_ptr<Cache> from_;
  std::shared_ptr<Cache> to_;
};

TEST_F(HandoffWaitingTest, ASourceThatWaitsAndAnswersIsWaitedFor) {
  Start(false);
  v1::AcceptResponse reply;
  const auto status = AcceptMuchLater(&reply, false);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.reconnects(), 0);
  EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kAccepted, 42));
}

// The memory was lent for a shorter time than that: the source's word counts.
TEST_F(HandoffWaitingTest, ASilenceInsteadOfTheLastWordIsAskedAbout) {
  Start(true);
  v1::AcceptResponse reply;
  const auto status = AcceptMuchLater(&reply, true);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.transport(), v1::HANDOFF_TRANSPORT_SAME_HOST);
  EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kAccepted, 42));
  EXPECT_EQ(source_.Stats().completed(), 1);
}

TEST_F(HandoffWaitingTest, WithoutTheLastWordTheAcceptanceFailsByName) {
  Start(true);
  relay_->on_acknowledge = [] {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the relay says nothing either");
  };
  v1::AcceptResponse reply;
  const auto status = AcceptMuchLater(&reply, true);
  EXPECT_EQ(Text(status), "14 PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find(Address("relay")), std::string::npos) << status.error_message();
}

TEST_F(HandoffWaitingTest, WhatHasComeInTimeNeedsNoLastWord) {
  StartBoth(true, true, {});
  const Large large = OfferLarge();
  relay_->on_response = [](v1::PullResponse& message) {
    // However long that takes here.
    if (message.has_accepted()) message.mutable_accepted()->set_lease_milliseconds(60'000);
    return message.has_ended() ? Verdict::kDrop : Verdict::kPass;
  };
  relay_->on_acknowledge = [] {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the relay says nothing either");
  };
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.transport(), v1::HANDOFF_TRANSPORT_SAME_HOST);
  EXPECT_TRUE(Arrived(large));
  while (source_.Stats().completed() == 0) std::this_thread::yield();
}

// A source that answers whatever it is asked, but never says that a pull has ended; and its memory is lent
// for too short a time to do without that.
class HandoffLastWordTest : public HandoffSilenceTest {
 protected:
  void SetUp() override {
    StartBoth(true, true, {});
    relay_->on_response = [last_word = last_word_](v1::PullResponse& message) {
      if (message.has_accepted()) message.mutable_accepted()->set_lease_milliseconds(0);
      if (!message.has_ended()) return Verdict::kPass;
      last_word->set_value();
      return Verdict::kDrop;
    };
  }
  void SayNothingIfAsked() {
    relay_->on_acknowledge = [] {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the relay says nothing either");
    };
  }

  // Comes when it would have said so. Of the relay too, which outlives this.
  const std::shared_ptr<std::promise<void>> last_word_ = std::make_shared<std::promise<void>>();
};

TEST_F(HandoffLastWordTest, IsAskedForThoughTheSourceSaysOtherThings) {
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Arrived(large));
  EXPECT_EQ(source_.Stats().completed(), 1);
}

TEST_F(HandoffLastWordTest, ThatIsNotSaidEvenThenFailsTheAcceptanceByName) {
  SayNothingIfAsked();
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  const auto status = Accept(AcceptOf(large), &reply);
  EXPECT_EQ(Text(status), "14 PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find(Address("relay")), std::string::npos) << status.error_message();
}

// Of a link that is given more time than the test has.
class HandoffAwaitedWordTest : public HandoffLastWordTest {
 protected:
  HandoffAwaitedWordTest() { silence_ = std::chrono::hours(1); }
  void SetUp() override {
    HandoffLastWordTest::SetUp();
    large_ = OfferLarge();
    accepted_ = AcceptSoon(AcceptOf(large_), &reply_, &context_);
    last_word_->get_future().get();
  }

  Large large_;
  v1::AcceptResponse reply_;
  grpc::ClientContext context_;
  std::future<grpc::Status> accepted_;
};

TEST_F(HandoffAwaitedWordTest, IsNotWaitedForWhenTheCallIsCancelled) {
  context_.TryCancel();
  EXPECT_EQ(accepted_.get().error_code(), grpc::StatusCode::CANCELLED);
  while (target_.server->stats().handoffs_failed == 0) std::this_thread::yield();
}

TEST_F(HandoffAwaitedWordTest, IsNotWaitedForWhenTheSessionEnds) {
  target_.client->Close();
  EXPECT_EQ(ReasonOf(accepted_.get()), "SESSION_ENDED");
}

TEST_F(HandoffAwaitedWordTest, IsNotWaitedForWhenTheDaemonEnds) {
  target_.server->Drain(std::chrono::milliseconds(0));
  EXPECT_FALSE(accepted_.get().ok());
  EXPECT_EQ(target_.server->stats().handoffs_failed, 1);
}

}  // namespace
}  // namespace kvsummary
