// Lives of offers: consumers, deadlines, sessions, budgets.
#include "server/handoff/handoff_fixture.h"

namespace kvsummary {
namespace {

using namespace std::chrono_literals;

constexpr CacheGeometry kGeometry = {.layers = 2,
                                     .blocks = 9,
                                     .block_size = 16,
                                     .ring_blocks = 3,
                                     .capacity = 10,
                                     .rows_per_layer = 10,
                                     .k = 3};
const std::vector<std::int64_t> kBlocks = {3, 1, 7, 5};
constexpr char kOther[] = "fedcba9876543210";

class OffersTest : public HandoffTest {
 protected:
  OffersTest() : source_(MakeCache("source", kGeometry)), target_(MakeCache("target", kGeometry)) {
    Fill(*source_, {kBlocks, 1}, 5, 43);
  }
  Offers::OpenArgs Args() { return Whole(source_, {kBlocks, 1}, 41); }
  Offers::Opened MustOpen(Offers::OpenArgs args) {
    auto opened = Open(std::move(args));
    EXPECT_TRUE(opened.ok()) << opened.status();
    return *opened;
  }
  std::string Bind(const std::string& secret, const std::string& transfer) {
    return ReasonOf(offers_->Bind(secret, transfer));
  }

  const std::shared_ptr<Cache> source_;
  const std::shared_ptr<Cache> target_;
};

TEST_F(OffersTest, BadOffersAreRefusedByNameAndTakeNothing) {
  const auto refused = [&](auto change) {
    Offers::OpenArgs args = Args();
    change(args);
    return ReasonOf(Open(std::move(args)));
  };
  EXPECT_EQ(refused([](auto& a) { a.consumers = 0; }), "COUNT_OUT_OF_RANGE consumers");
  EXPECT_EQ(refused([](auto& a) { a.consumers = kMaxConsumers + 1; }), "COUNT_OUT_OF_RANGE consumers");
  EXPECT_EQ(refused([](auto& a) { a.back_off = -1; }), "COUNT_OUT_OF_RANGE back_off_tokens");
  EXPECT_EQ(refused([](auto& a) { a.back_off = 65; }), "COUNT_OUT_OF_RANGE back_off_tokens");
  EXPECT_EQ(refused([](auto& a) { a.lifetime = -1ms; }), "COUNT_OUT_OF_RANGE lifetime_milliseconds");
  EXPECT_EQ(refused([](auto& a) { a.part.layers = {0, 3}; }), "LAYERS_OUT_OF_RANGE layers");
  EXPECT_EQ(refused([](auto& a) { a.part.layers = {0, 0}; }), "LAYERS_OUT_OF_RANGE layers");
  EXPECT_EQ(refused([](auto& a) { a.part.layers = {0, 1}; }), "HANDOFF_INCOMPLETE committed_tokens");
  EXPECT_EQ(refused([](auto& a) { a.part.committed_tokens = -1; }), "POSITION_OUT_OF_RANGE committed_tokens");
  EXPECT_EQ(refused([](auto& a) { a.part.committed_tokens = 1L << 40; }),
            "POSITION_OUT_OF_RANGE committed_tokens");
  EXPECT_EQ(refused([](auto& a) { a.part.committed_tokens = 72; }), "SIZE_MISMATCH block_ids");
  EXPECT_EQ(refused([](auto& a) { a.part.blocks[2] = 0; }), "NULL_BLOCK block_ids[2]");
  EXPECT_EQ(refused([](auto& a) { a.part.blocks[1] = 9; }), "BLOCK_OUT_OF_RANGE block_ids[1]");
  EXPECT_EQ(refused([](auto& a) { a.part.first_block = -1; }), "SIZE_MISMATCH block_ids");
  EXPECT_EQ(refused([](auto& a) { a.part.first_block = 1; }), "SIZE_MISMATCH block_ids");
  EXPECT_EQ(refused([](auto& a) { a.part.tail->ring_block = 0; }), "NULL_RING_BLOCK ring");
  EXPECT_EQ(refused([](auto& a) { a.part.tail->ring_block = 3; }), "RING_OUT_OF_RANGE ring");
  EXPECT_EQ(refused([](auto& a) { a.part.tail->highest_stored = 39; }),
            "POSITION_OUT_OF_RANGE highest_stored_position");
  EXPECT_EQ(refused([](auto& a) { a.part.groups = {{0, 0, {1}}}; }), "FIELD_MISSING namespace_id");
  EXPECT_EQ(offers_->stats().offers, 0);
  EXPECT_EQ(offers_->stats().staged_bytes, 0);
}

TEST_F(OffersTest, ItIsFreeWhenEveryConsumerHasAcknowledged) {
  Offers::OpenArgs args = Args();
  args.consumers = 2;
  const Offers::Opened opened = MustOpen(std::move(args));
  EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
  EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");  // the same one resumes
  EXPECT_EQ(Bind(opened.secret, kOther), "OK");
  EXPECT_EQ(Bind(opened.secret, "a third one 1234"), "HANDOFF_TAKEN handoff");
  EXPECT_TRUE(offers_->Acknowledge(opened.secret, kTransfer).ok());
  EXPECT_TRUE(offers_->Acknowledge(opened.secret, kTransfer).ok());
  EXPECT_EQ(Bind(opened.secret, kTransfer), "HANDOFF_TAKEN handoff");  // replayed
  EXPECT_EQ(offers_->stats().offers, 1);
  EXPECT_TRUE(offers_->Acknowledge(opened.secret, kOther).ok());
  EXPECT_EQ(offers_->stats().offers, 0);
  EXPECT_EQ(offers_->stats().staged_bytes, 0);
  EXPECT_EQ(offers_->stats().completed, 1);
  EXPECT_EQ(Bind(opened.secret, kOther), "HANDOFF_NOT_FOUND handoff");
  EXPECT_TRUE(offers_->Acknowledge(opened.secret, kOther).ok());  // its answer may have been lost
  EXPECT_EQ(RefusalReason(offers_->Acknowledge(opened.secret, "a third one 1234")), "HANDOFF_NOT_FOUND");
}

// Two calls of one consumer read an offer; it ends with the word of the first, and its memory is used again.
TEST_F(OffersTest, WhoeverReadsUnderAnAcknowledgedIdIsNotToldThatTheOfferWaitedForHim) {
  for (const int consumers : {1, 2}) {
    Offers::OpenArgs args = Args();
    args.consumers = consumers;
    const Offers::Opened opened = MustOpen(std::move(args));
    EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
    EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
    EXPECT_TRUE(offers_->Acknowledge(opened.secret, kTransfer).ok());
    if (consumers == 2) {
      EXPECT_TRUE(offers_->Acknowledge(opened.secret, kTransfer).ok());  // it is there until all have it
      EXPECT_EQ(Bind(opened.secret, kOther), "OK");
      EXPECT_TRUE(offers_->Acknowledge(opened.secret, kOther).ok());
      EXPECT_TRUE(offers_->Acknowledge(opened.secret, kOther).ok());  // he has read once
    }
    EXPECT_EQ(RefusalReason(offers_->Acknowledge(opened.secret, kTransfer)), "HANDOFF_NOT_FOUND");
  }
}

TEST_F(OffersTest, ASecretThatWasNeverGivenOutIsNotFound) {
  EXPECT_EQ(Bind(std::string(16, 'x'), kTransfer), "HANDOFF_NOT_FOUND handoff");
  EXPECT_EQ(Bind("", kTransfer), "HANDOFF_NOT_FOUND handoff");
}

TEST_F(OffersTest, ItEndsAtItsDeadline) {
  Offers::OpenArgs args = Args();
  args.lifetime = 5s;
  const Offers::Opened opened = MustOpen(std::move(args));
  EXPECT_EQ(opened.lifetime, 5s);
  now_ = 4999ms;
  EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
  now_ = 5s;
  EXPECT_EQ(Bind(opened.secret, kTransfer), "HANDOFF_EXPIRED handoff");
  EXPECT_EQ(offers_->stats().expired, 1);
  EXPECT_EQ(offers_->stats().staged_bytes, 0);
  Offers::OpenArgs longer = Args();
  longer.lifetime = 10h;
  EXPECT_EQ(MustOpen(std::move(longer)).lifetime, 60s);
}

TEST_F(OffersTest, AThousandAbandonedOffersLeaveNothing) {
  int made = 0;
  for (int i = 0; i < 1000; ++i) {
    const auto opened = Open(Args());
    ASSERT_TRUE(opened.ok() || ReasonOf(opened) == "HANDOFF_BUDGET_EXCEEDED") << opened.status();
    made += opened.ok() ? 1 : 0;
    now_ += 1s;
  }
  EXPECT_EQ(made, 1000);  // those whose time is over make room
  now_ += 60s;
  offers_->Expire();
  EXPECT_EQ(offers_->stats().offers, 0);
  EXPECT_EQ(offers_->stats().staged_bytes, 0);
  EXPECT_EQ(offers_->stats().expired, 1000);
}

TEST_F(OffersTest, BeyondTheBudgetIsRefusedAndNothingIsLost) {
  std::vector<Offers::Opened> opened;
  absl::StatusOr<Offers::Opened> next = Open(Args());
  while (next.ok()) {
    opened.push_back(*next);
    next = Open(Args());
  }
  EXPECT_EQ(ReasonOf(next), "HANDOFF_BUDGET_EXCEEDED");
  EXPECT_GT(opened.size(), 10u);
  offers_->Cancel(7, opened[3].number);
  EXPECT_TRUE(Open(Args()).ok());
  const auto result = Accept(opened[0].secret, target_, {{2, 4, 6}, 2}, 41);
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(OffersTest, ItEndsWithItsSessionUnlessItIsDetached) {
  const Offers::Opened bound = MustOpen(Args());
  Offers::OpenArgs args = Args();
  args.detached = true;
  const Offers::Opened detached = MustOpen(std::move(args));
  args = Args();
  args.session = 8;
  const Offers::Opened other = MustOpen(std::move(args));
  offers_->EndSession(7);
  offers_->EndSession(7);
  EXPECT_EQ(Bind(bound.secret, kTransfer), "HANDOFF_CANCELLED handoff");
  EXPECT_EQ(Bind(detached.secret, kTransfer), "OK");
  EXPECT_EQ(Bind(other.secret, kTransfer), "OK");
}

TEST_F(OffersTest, CancellingEndsWhoIsWaitingForMore) {
  Offers::OpenArgs args = Args();
  args.part.tail.reset();
  const Offers::Opened opened = MustOpen(std::move(args));
  Accepting accepting =
      Begin(opened.secret, {.cache = target_, .blocks = {2, 4, 6}, .ring_block = 1, .resume = 40}, kTransfer);
  offers_->Cancel(8, opened.number);  // another session's number
  EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
  offers_->Cancel(7, opened.number);
  offers_->Cancel(7, opened.number);
  EXPECT_EQ(ReasonOf(accepting.result.get()), "HANDOFF_CANCELLED handoff");
  EXPECT_EQ(ReasonOf(Append(7, opened.number, Args().part)), "HANDOFF_NOT_FOUND offer_id");
  accepting = {};
  EXPECT_EQ(offers_->stats().staged_bytes, 0);
}

TEST_F(OffersTest, WhoReadsKeepsThePartsOfAnOfferThatEnds) {
  const Offers::Opened opened = MustOpen(Args());
  auto offer = offers_->Bind(opened.secret, kTransfer);
  ASSERT_TRUE(offer.ok());
  auto parts = (*offer)->Look(0).parts;
  ASSERT_FALSE(parts.empty());
  const std::string bytes(parts[0]->data(), static_cast<std::size_t>(parts[0]->part.bytes()));
  offers_->Cancel(opened.secret);
  EXPECT_GT(offers_->stats().staged_bytes, 0);
  while (Open(Args()).ok()) {
  }
  EXPECT_TRUE(bytes == std::string(parts[0]->data(), bytes.size()));
  EXPECT_EQ(RefusalReason((*offer)->Look(0).ended), "HANDOFF_CANCELLED");
}

TEST_F(OffersTest, ACacheThatWasTakenOverIsNeitherReadNorWritten) {
  std::promise<CacheManager::CacheOr> made;
  caches_->Create(
      {.name = "mine", .device = "", .geometry = source_->geometry(), .session = 7}, [] { return false; },
      [&](CacheManager::CacheOr cache) { made.set_value(std::move(cache)); });
  const auto mine = made.get_future().get();
  ASSERT_TRUE(mine.ok());
  const Offers::Opened opened = MustOpen(Args());
  caches_->EndSession(7);
  std::promise<CacheManager::CacheOr> attached;
  caches_->Attach("mine", 9, [&](CacheManager::CacheOr cache) { attached.set_value(std::move(cache)); });
  const auto theirs = attached.get_future().get();
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  const std::string before = BytesOf(**theirs);
  EXPECT_EQ(ReasonOf(Accept(opened.secret, *mine, {{2, 4, 6}, 1}, 41)), "GENERATION_STALE cache.generation");
  EXPECT_TRUE(BytesOf(**theirs) == before);
  EXPECT_EQ(ReasonOf(Open(Whole(*mine, {kBlocks, 1}, 41))), "GENERATION_STALE cache.generation");
}

TEST_F(OffersTest, AnOfferDoesNotKeepItsCache) {
  std::promise<absl::Status> deleted;
  auto mine = MakeCache("mine", kGeometry);
  Offers::OpenArgs args = Whole(mine, {kBlocks, 1}, 41);
  const std::string name = mine->name();
  const std::uint64_t generation = mine->generation();
  mine = nullptr;
  const Offers::Opened opened = MustOpen(std::move(args));
  caches_->Delete(name, generation, [&](const absl::Status& status) { deleted.set_value(status); });
  EXPECT_TRUE(deleted.get_future().get().ok());
  EXPECT_EQ(Bind(opened.secret, kTransfer), "OK");
}

TEST_F(OffersTest, AGroupIsNamedOnceInAPartAlsoWithoutBlocks) {
  Offers::OpenArgs args = Args();
  auto bound = std::make_shared<BoundCache>();
  bound->device = &source_->device();
  bound->blocks = 9;
  bound->groups = {{static_cast<std::uint8_t*>(source_->memory().data()), {{0, 4096, 4096}}}};
  args.bound = bound;
  args.group_specs = {{.bytes_per_block = 4096}};
  args.part.groups = {{0, 0, {5}}, {0, 1, {}}};
  EXPECT_EQ(ReasonOf(Open(std::move(args))), "GROUP_OUT_OF_RANGE groups[1].group");
}

TEST_F(OffersTest, WithoutStagingMemoryNothingIsHandedOver) {
  MakeOffers(0);
  EXPECT_EQ(ReasonOf(Open(Args())), "HANDOFF_OFF");
}

}  // namespace
}  // namespace kvsummary
