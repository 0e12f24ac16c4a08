// Pullers that take their time, and caches that are deleted meanwhile.
#include <fstream>
#include <set>

#include "server/handoff/handoff_text.h"
#include "server/rpc/handoff_test_fixture.h"

namespace kvsummary {
namespace {

// More than a connection and what is read ahead of it hold.
constexpr CacheGeometry kWide = {.layers = 12,
                                 .blocks = 4,
                                 .block_size = 32768,
                                 .block_stride = 0,
                                 .ring_blocks = 2,
                                 .capacity = 16,
                                 .rows_per_layer = 16,
                                 .k = 0};
constexpr std::int64_t kWideTokens = 32768;
constexpr std::int64_t kWideBytes = kWideTokens / 8 * 256 * 12;  // a chunk a layer, and no rows
const PlacedRequest kWideRequest = {{3}, 1};

class HandoffSlowTest : public HandoffRpcTest {
 protected:
  HandoffSlowTest() { silence_ = std::chrono::seconds(60); }  // nobody is cut off, unless a test is about it

  // A puller that does only what it is told to.
  struct Puller {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::PullRequest, v1::PullResponse>> stream;

    void Credit(std::uint32_t pull, std::int64_t bytes) {
      v1::PullRequest request;
      request.mutable_credit()->set_pull(pull);
      request.mutable_credit()->set_bytes(bytes);
      ASSERT_TRUE(stream->Write(request));
    }
    static v1::PullRequest Beginning(std::uint32_t pull, const v1::OfferResponse& offer) {
      v1::PullRequest request;
      request.mutable_begin()->set_pull(pull);
      request.mutable_begin()->set_offer_secret(ParseHandoff(offer.handoff())->secret);
      request.mutable_begin()->set_transfer_id("a puller of tests");
      request.mutable_begin()->mutable_transfer_id()->resize(kTransferBytes);
      request.mutable_begin()->set_regions(kWideTokens / 8);
      return request;
    }
    void Begin(std::uint32_t pull, const v1::OfferResponse& offer, bool same_host = false) {
      v1::PullRequest request = Beginning(pull, offer);
      if (same_host) request.mutable_begin()->add_transports(v1::HANDOFF_TRANSPORT_SAME_HOST);
      ASSERT_TRUE(stream->Write(request));
    }
    void End(std::uint32_t pull) {
      v1::PullRequest request;
      request.mutable_end()->set_pull(pull);
      ASSERT_TRUE(stream->Write(request));
    }
    // The reason why the source ends the stream.
    std::string Ended() {
      for (v1::PullResponse message; stream->Read(&message);) {
      }
      const auto status = std::exchange(stream, nullptr)->Finish();
      return ReasonOf(status);
    }
    ~Puller() {
      context.TryCancel();
      if (stream != nullptr) stream->Finish();
    }
  };
  // Until a message is being written that the puller does not read: what is read ahead, and more.
  void AwaitStuckWrite() {
    while (source_.Stats().sent_bytes() < 5 * kChunkBytes) std::this_thread::yield();
  }
  void Cancel(const v1::OfferResponse& offer) {
    v1::CancelHandoffRequest cancel;
    cancel.set_handoff(offer.handoff());
    v1::CancelHandoffResponse cancelled;
    EXPECT_EQ(ReasonOf(source_.Call(&Stub::CancelHandoff, cancel, &cancelled)), "OK");
  }
  std::unique_ptr<Puller> Open() {
    auto puller = std::make_unique<Puller>();
    puller->stream = source_.stub->Pull(&puller->context);
    v1::PullRequest hello;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), *hello.mutable_hello()->mutable_boot_id());
    hello.mutable_hello()->set_version(1);
    EXPECT_TRUE(puller->stream->Write(hello));
    return puller;
  }
  // Both daemons; the target's streams have so much credit.
  void StartBehindRelay(std::int64_t credit_bytes) {
    Server::Options source;
    source.advertise = Address("relay");
    source_ = Start("source", source);
    Server::Options target;
    target.pull.same_host = false;
    target.pull.credit_bytes = credit_bytes;
    target_ = Start("target", target);
    relay_ = std::make_unique<Relay>(Address("relay"), Address("source"));
  }
  v1::OfferResponse OfferWide() {
    if (wide_ == nullptr) wide_ = source_.MakeCache("wide", kWide);
    auto request = OfferRequestOf(*wide_, kWideRequest, kWideTokens);
    request.set_back_off_tokens(0);
    return MustOffer(request);
  }

  std::shared_ptr<Cache> wide_;
};

TEST_F(HandoffSlowTest, ASlowReaderNeitherGrowsTheSourceNorHoldsUpAnother) {
  StartBoth(false, false, {});
  const auto slow = Open();
  slow->Credit(0, std::int64_t{1} << 30);  // as if it had room for everything
  slow->Begin(1, OfferWide());
  // It reads nothing. Others have theirs meanwhile.
  Large large = OfferLarge();
  std::int64_t others = 0;
  for (int i = 0; i < 3; ++i) {
    v1::AcceptResponse reply;
    const auto status = Accept(AcceptOf(large), &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(reply.transport(), v1::HANDOFF_TRANSPORT_GRPC);
    EXPECT_TRUE(Arrived(large));
    others += reply.bytes();
    large = OfferAgain(large);
  }
  // Four chunks that are read ahead, the one that is being written and those that the connection holds.
  EXPECT_LE(source_.Stats().sent_bytes() - others, 8 * kChunkBytes);
  // It gets everything all the same, as soon as it reads.
  std::int64_t came = 0;
  for (v1::PullResponse message; came < kWideBytes && slow->stream->Read(&message);) {
    came += static_cast<std::int64_t>(message.chunk().data().size());
  }
  EXPECT_EQ(came, kWideBytes);
}

TEST_F(HandoffSlowTest, APullWhoseChunksAreNotTakenLeavesRoomForTheOthersOfItsStream) {
  StartBoth(false, false, {});
  constexpr std::int64_t kCredit = 8 * kChunkBytes;
  const auto puller = Open();
  puller->Credit(0, kCredit);
  const auto first = OfferWide();
  puller->Begin(1, first);
  std::map<std::uint32_t, std::int64_t> came;
  v1::PullResponse message;
  // The first one's chunks are read, but their room is not given back: it stops at half of the credit.
  while (came[1] < kCredit / 2 + kChunkBytes && puller->stream->Read(&message)) {
    came[message.pull()] += message.chunk().size_bytes();
  }
  puller->Begin(2, OfferWide());
  while (came[2] < kWideBytes && puller->stream->Read(&message)) {
    came[message.pull()] += message.chunk().size_bytes();
    if (message.pull() == 2 && message.has_chunk()) puller->Credit(2, message.chunk().size_bytes());
  }
  EXPECT_EQ(came[2], kWideBytes);
  EXPECT_EQ(came[1], kCredit / 2 + kChunkBytes);
  // When they have been taken, it goes on.
  puller->Credit(1, came[1]);
  while (came[1] < kWideBytes && puller->stream->Read(&message)) {
    came[message.pull()] += message.chunk().size_bytes();
    if (message.has_chunk()) puller->Credit(1, message.chunk().size_bytes());
  }
  EXPECT_EQ(came[1], kWideBytes);
}

TEST_F(HandoffSlowTest, MemoryThatIsReadWhereItLiesStaysAsItIsForAsLongAsItIsLent) {
  for (const bool gone : {false, true}) {
    source_ = Start("source");
    wide_ = nullptr;
    auto puller = Open();
    const auto begun = std::chrono::steady_clock::now();
    const auto offer = OfferWide();
    puller->Begin(1, offer, true);
    v1::PullResponse message;
    ASSERT_TRUE(puller->stream->Read(&message));
    ASSERT_EQ(message.accepted().transport(), v1::HANDOFF_TRANSPORT_SAME_HOST);
    ASSERT_GT(message.accepted().lease_milliseconds(), 0);
    if (gone) puller = nullptr;
    Cancel(offer);
    EXPECT_EQ(source_.Stats().offers(), 0);
    while (source_.Stats().staged_bytes() > 0) std::this_thread::yield();
    EXPECT_GE(std::chrono::steady_clock::now() - begun,
              std::chrono::milliseconds(message.accepted().lease_milliseconds()));
    puller = nullptr;
    wide_ = nullptr;
    source_.client.reset();
    source_.server.reset();
  }
}

// The source is told of more credit than there is, and nothing is taken.
TEST_F(HandoffSlowTest, ASourceThatSendsMoreThanItHasCreditForIsRefused) {
  StartBehindRelay(2 * kChunkBytes);
  relay_->on_request = [](v1::PullRequest& message) {
    if (message.has_credit()) message.mutable_credit()->set_bytes(std::int64_t{64} << 20);
    return Relay::Verdict::kPass;
  };
  const Large large = OfferLarge();
  std::promise<void> gate;
  large.target->device().executor().SubmitFree([open = gate.get_future().share()] { open.wait(); });
  v1::AcceptResponse reply;
  grpc::ClientContext context;
  auto accepted = AcceptSoon(AcceptOf(large), &reply, &context);
  while (relay_->ended() == 0) std::this_thread::yield();
  gate.set_value();
  EXPECT_EQ(ReasonOf(accepted.get()), "MESSAGE_MALFORMED");
  EXPECT_EQ(relay_->streams(), 1);
}

TEST_F(HandoffSlowTest, AChunkThatIsLargerThanAnyIsRefused) {
  StartBehindRelay(32 * kChunkBytes);
  relay_->on_response = [](v1::PullResponse& message) {
    if (message.has_chunk()) message.mutable_chunk()->mutable_data()->resize(kChunkBytes + 1);
    return Relay::Verdict::kPass;
  };
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  EXPECT_EQ(ReasonOf(Accept(AcceptOf(large), &reply)), "MESSAGE_MALFORMED");
}

TEST_F(HandoffSlowTest, CreditOfPullsThatAreNoneIsTheStreams) {
  StartBehindRelay(8 * kChunkBytes);  // given back chunk by chunk, and more than all that is under way
  relay_->on_response = [](v1::PullResponse& message) {
    if (message.has_chunk()) message.set_pull(1000);
    return Relay::Verdict::kPass;
  };
  const auto came = std::make_shared<std::promise<std::set<std::uint32_t>>>();
  relay_->on_request = [came, credits = 0, pulls = std::set<std::uint32_t>()](auto& message) mutable {
    if (message.has_credit()) pulls.insert(message.credit().pull());
    if (message.has_credit() && ++credits == 4) came->set_value(pulls);
    return Relay::Verdict::kPass;
  };
  const Large large = OfferLarge();
  v1::AcceptResponse reply;
  grpc::ClientContext context;
  auto accepted = AcceptSoon(AcceptOf(large), &reply, &context);
  EXPECT_EQ(came->get_future().get(), std::set<std::uint32_t>{0});
  context.TryCancel();
  accepted.get();
}

// What has ended is let go of at once, whether it can be told or not.
TEST_F(HandoffSlowTest, APullerThatReadsNothingHoldsNoMemoryOfAnOfferThatHasEnded) {
  for (const bool same_host : {false, true}) {
    SCOPED_TRACE(same_host);
    source_ = Start("source");
    wide_ = nullptr;
    auto puller = Open();
    puller->Credit(0, std::int64_t{1} << 30);
    const auto stuck = OfferWide();
    v1::OfferResponse mapped;
    const auto begun = std::chrono::steady_clock::now();
    std::int64_t lease = 0;
    if (same_host) {
      mapped = OfferWide();
      puller->Begin(1, mapped, true);
      v1::PullResponse message;
      ASSERT_TRUE(puller->stream->Read(&message));
      lease = message.accepted().lease_milliseconds();
    }
    puller->Begin(2, stuck);
    AwaitStuckWrite();
    if (same_host) {
      const std::int64_t both = source_.Stats().staged_bytes();
      Cancel(mapped);
      while (source_.Stats().staged_bytes() == both) std::this_thread::yield();
      EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(lease));
    }
    Cancel(stuck);
    while (source_.Stats().staged_bytes() > 0) std::this_thread::yield();
    puller = nullptr;
    wide_ = nullptr;
    source_.client.reset();
    source_.server.reset();
  }
}

TEST_F(HandoffSlowTest, APullerThatReadsNothingForLongIsCutOff) {
  silence_ = std::chrono::milliseconds(250);
  for (const bool half_closed : {false, true}) {
    SCOPED_TRACE(half_closed);
    source_ = Start("source");
    wide_ = nullptr;
    auto puller = Open();
    puller->Credit(0, std::int64_t{1} << 30);
    puller->Begin(1, OfferWide());
    AwaitStuckWrite();
    if (half_closed) puller->stream->WritesDone();
    // It waits for what is being pulled.
    const auto begun = std::chrono::steady_clock::now();
    source_.server->Drain(std::chrono::minutes(2));
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::minutes(1));
    puller = nullptr;
    wide_ = nullptr;
    source_.client.reset();
    source_.server.reset();
  }
}

TEST_F(HandoffSlowTest, NumbersOfPullsRise) {
  source_ = Start("source");
  const auto offer = OfferWide();
  for (const std::uint32_t next : {1U, 2U}) {  // one that has ended, and one that is there
    const auto puller = Open();
    puller->Begin(1, offer);
    puller->End(1);
    puller->Begin(2, offer);
    puller->Begin(3, offer);
    puller->Begin(next, offer);
    EXPECT_EQ(puller->Ended(), "MESSAGE_MALFORMED");
  }
}

TEST_F(HandoffSlowTest, ChunksThatAreHeldDoNotComeHoweverTheyAreNamed) {
  source_ = Start("source");
  const auto puller = Open();
  puller->Credit(0, std::int64_t{1} << 30);
  v1::PullRequest begin = Puller::Beginning(1, OfferWide());
  const std::vector<std::pair<std::int64_t, std::int64_t>> runs = {{7, 2}, {1, 1}, {8, 2},         {2, 1},
                                                                   {7, 1}, {5, 0}, {11, kMaxIndex}};
  for (const std::int32_t part : {1, 0}) {  // there is no part 1
    for (const auto& [first, count] : runs) {
      auto* held = begin.mutable_begin()->add_held();
      held->set_part(part);
      held->set_first(first + part);
      held->set_count(count);
    }
  }
  ASSERT_TRUE(puller->stream->Write(begin));
  std::vector<std::int64_t> came;
  for (v1::PullResponse message; came.size() < 6 && puller->stream->Read(&message);) {
    if (message.has_chunk()) came.push_back(message.chunk().chunk());
  }
  EXPECT_EQ(came, (std::vector<std::int64_t>{0, 3, 4, 5, 6, 10}));
}

TEST_F(HandoffSlowTest, APullerNamesABoundedNumberOfRuns) {
  source_ = Start("source");
  const auto source = source_.MakeCache("source", kSource);
  std::vector<v1::OfferResponse> offers;
  for (int i = 0; i < 3; ++i) offers.push_back(OfferMore(*source));
  for (const bool some_end : {true, false}) {
    SCOPED_TRACE(some_end);
    const auto puller = Open();
    for (std::uint32_t pull = 1; pull <= 17; ++pull) {
      v1::PullRequest begin = Puller::Beginning(pull, offers[pull % 3]);
      for (std::int64_t i = 0; i < 65536; ++i) {
        auto* held = begin.mutable_begin()->add_held();
        held->set_part(0);
        held->set_first(2 * i);
        held->set_count(1);
      }
      puller->stream->Write(begin);
      if (some_end && pull == 16) puller->End(7);
    }
    v1::PullRequest probe;
    probe.mutable_probe();
    puller->stream->Write(probe);
    puller->stream->WritesDone();
    EXPECT_EQ(puller->Ended(), some_end ? "OK" : "MESSAGE_MALFORMED");
  }
}

TEST_F(HandoffSlowTest, AConsumerPullsAnOfferAFewTimesAtOnce) {
  source_ = Start("source");
  const auto offer = OfferWide();
  const auto puller = Open();
  for (std::uint32_t pull = 1; pull <= 8; ++pull) puller->Begin(pull, offer);
  puller->Begin(9, offer);
  puller->End(1);
  puller->Begin(10, offer);
  bool refused = false;
  for (v1::PullResponse message; message.pull() != 10 && puller->stream->Read(&message);) {
    EXPECT_EQ(message.has_failed(), message.pull() == 9);
    refused |= message.has_failed();
  }
  EXPECT_TRUE(refused);
}

TEST_F(HandoffSlowTest, DeletingTheCacheEndsTheAcceptanceThatWaitsForMore) {
  StartBoth(true);
  const auto source = source_.MakeCache("source", kSource);
  auto target = target_.MakeCache("target", kTarget);
  const auto offer = OfferMore(*source);
  v1::AcceptResponse reply;
  grpc::ClientContext context;
  std::promise<void> begun;
  relay_->on_response = [&, told = false](v1::PullResponse& message) mutable {
    if (message.parts_size() > 0 && !std::exchange(told, true)) begun.set_value();
    return Relay::Verdict::kPass;
  };
  auto accepted = AcceptSoon(AcceptRequestOf(offer.handoff(), *target, kAccepted, 15), &reply, &context);
  begun.get_future().get();
  const v1::CacheRef ref = RefOf(*target);
  target = nullptr;                                        // the acceptance alone has it
  EXPECT_EQ(ReasonOf(target_.client->Delete(ref)), "OK");  // when its memory is free
  EXPECT_EQ(Details(accepted.get()), "CACHE_NOT_FOUND cache");
  EXPECT_EQ(source_.Stats().offers(), 1);  // it may be accepted into another
}

TEST_F(HandoffSlowTest, DeletingTheCacheEndsAnAcceptanceOfTheSameDaemon) {
  source_ = Start("source");
  const auto source = source_.MakeCache("source", kSource);
  auto target = source_.MakeCache("target", kTarget);
  Fill(*source, kOffered, 5, 46);
  const auto offer = OfferMore(*source);
  v1::AcceptRequest request;
  request.set_session_id(source_.client->session_id);
  request.set_handoff(offer.handoff());
  *request.mutable_cache() = RefOf(*target);
  request.mutable_block_ids()->Add(kAccepted.blocks.begin(), kAccepted.blocks.end());
  request.mutable_ring()->set_block(kAccepted.ring_block);
  request.set_resume_position(15);
  v1::AcceptResponse reply;
  auto accepted =
      std::async(std::launch::async, [&] { return source_.Call(&Stub::Accept, request, &reply); });
  // Until its bytes are there.
  while (static_cast<std::uint8_t>(BytesOf(
             *target)[static_cast<std::size_t>(target->geometry().page_offset(kAccepted.blocks[0], 2))]) ==
         kUntouched) {
    std::this_thread::yield();
  }
  const v1::CacheRef ref = RefOf(*target);
  target = nullptr;
  EXPECT_EQ(ReasonOf(source_.client->Delete(ref)), "OK");
  EXPECT_EQ(Details(accepted.get()), "CACHE_NOT_FOUND cache");
}

}  // namespace
}  // namespace kvsummary
