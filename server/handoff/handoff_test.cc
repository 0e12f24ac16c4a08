// Bytes of hand-offs within a daemon: what has to be in the target is there, and nothing else is touched.
#include "absl/strings/str_format.h"
#include "server/handoff/handoff_fixture.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kSource = {.layers = 3,
                                   .blocks = 12,
                                   .block_size = 16,
                                   .block_stride = 0,
                                   .ring_blocks = 4,
                                   .capacity = 20,
                                   .rows_per_layer = 20,
                                   .k = 3};
constexpr CacheGeometry kTarget = {.layers = 3,
                                   .blocks = 20,
                                   .block_size = 8,
                                   .block_stride = 512,
                                   .ring_blocks = 5,
                                   .capacity = 10,
                                   .rows_per_layer = 13,
                                   .k = 3};

std::vector<std::int64_t> Backwards(std::int64_t last, std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) ids[static_cast<std::size_t>(i)] = last - i;
  return ids;
}

class HandoffBytesTest : public HandoffTest {
 protected:
  // Hands a request of n tokens over, and compares all of the target's memory.
  void ExpectServed(const CacheGeometry& from, const CacheGeometry& to, std::int64_t n, std::int64_t resume,
                    std::int64_t back_off) {
    SCOPED_TRACE(absl::StrFormat("%d tokens, resumed at %d", n, resume));
    const auto source = MakeCache("source", from);
    const auto target = MakeCache("target", to);
    const Request offered = {Backwards(from.blocks - 1, 6), 2};
    const Request accepted = {Backwards(to.blocks - 1, 12), 3};
    Fill(*source, offered, n / kRegionTokens, n - 1 + from.k);
    Offers::OpenArgs args = Whole(source, offered, n);
    args.back_off = back_off;
    const auto opened = Open(std::move(args));
    ASSERT_TRUE(opened.ok()) << opened.status();
    // The source's blocks are free from then on.
    std::memset(source->memory().data(), 0x55, static_cast<std::size_t>(source->memory().bytes()));
    const auto result = Accept(opened->secret, target, accepted, resume);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->committed_tokens, n);
    EXPECT_TRUE(BytesOf(*target) == Expected(*target, accepted, resume));
    EXPECT_TRUE(offers_->Acknowledge(opened->secret, kTransfer).ok());
    EXPECT_EQ(offers_->stats().staged_bytes, 0);
    for (const auto& cache : {source, target}) Delete(*cache);
  }
  // The caller's own hold keeps its memory.
  void Delete(const Cache& cache) {
    caches_->Delete(cache.name(), cache.generation(), [](const absl::Status&) {});
  }
};

TEST_F(HandoffBytesTest, EveryLengthAndEveryResumePosition) {
  for (std::int64_t n = 1; n <= 40; ++n) {
    for (std::int64_t resume = std::max<std::int64_t>(0, n - 8); resume <= n; ++resume) {
      ExpectServed(kSource, kTarget, n, resume, 8);
    }
  }
}

TEST_F(HandoffBytesTest, BlockAndRingEdgesOfEitherSide) {
  for (const int from_block : {8, 16, 24, 64}) {
    for (const int to_block : {8, 16, 40, 64}) {
      for (const int capacity : {7, 8, 11}) {
        CacheGeometry from = kSource;
        from.block_size = from_block;
        CacheGeometry to = kTarget;
        to.block_size = to_block;
        to.block_stride = 256;
        to.capacity = capacity;
        to.rows_per_layer = capacity;
        to.k = 0;
        for (const std::int64_t n : {7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40, 47, 48}) {
          if (n > 6 * from_block) continue;
          for (const std::int64_t resume : {n, n - 1, n - 2}) ExpectServed(from, to, n, resume, 2);
        }
      }
    }
  }
}

TEST_F(HandoffBytesTest, RowsThatAreGoneAreRefusedByNameAndNothingIsTouched) {
  CacheGeometry small = kSource;
  small.capacity = 10;
  small.rows_per_layer = 10;  // 7 + k: right after a step whose drafts were all rejected
  const auto source = MakeCache("source", small);
  const auto target = MakeCache("target", kTarget);
  const Request offered = {Backwards(11, 6), 2};
  const Request accepted = {Backwards(19, 12), 3};
  Fill(*source, offered, 2, 23);
  const auto opened = Open(Whole(source, offered, 21));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::string before = BytesOf(*target);
  const auto refused = Accept(opened->secret, target, accepted, 15);
  EXPECT_EQ(ReasonOf(refused), "RESUME_NOT_SERVABLE resume_position");
  EXPECT_NE(refused.status().message().find("nearest position that can be served is 16"), std::string::npos)
      << refused.status();
  EXPECT_EQ(ReasonOf(Accept(opened->secret, target, accepted, 22)), "RESUME_OUT_OF_RANGE resume_position");
  EXPECT_TRUE(BytesOf(*target) == before);
  for (const std::int64_t resume : {21, 20, 19, 16}) {
    std::memset(target->memory().data(), kUntouched, static_cast<std::size_t>(target->memory().bytes()));
    const auto result = Accept(opened->secret, target, accepted, resume);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(BytesOf(*target) == Expected(*target, accepted, resume));
  }
}

TEST_F(HandoffBytesTest, LayersAndRegionsAsTheyComeWhileTheOtherSideReceives) {
  const auto source = MakeCache("source", kSource);
  const auto target = MakeCache("target", kTarget);
  const Request offered = {Backwards(11, 6), 1};
  const Request accepted = {Backwards(19, 12), 4};
  Offers::OpenArgs args = Whole(source, offered, 0);
  args.part.tail.reset();
  args.part.blocks.clear();
  const auto opened = Open(std::move(args));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->committed_tokens, -1);
  Accepting accepting = Begin(
      opened->secret, {.cache = target, .blocks = accepted.blocks, .ring_block = 4, .resume = 44}, kTransfer);
  Fill(*source, offered, 5, 44);
  const auto append = [&](LayerSpan layers, std::int64_t n, std::int64_t first_block) {
    return Append(7, opened->number,
                  {.layers = layers,
                   .committed_tokens = n,
                   .first_block = first_block,
                   .blocks = {offered.blocks.begin() + first_block, offered.blocks.end()}});
  };
  EXPECT_TRUE(append({0, 1}, 20, 0).ok());
  EXPECT_TRUE(append({2, 1}, 27, 0).ok());
  EXPECT_TRUE(append({1, 1}, 20, 0).ok());
  EXPECT_EQ(ReasonOf(append({0, 3}, 45, 1)), "HANDOFF_INCOMPLETE committed_tokens");  // not as many each
  EXPECT_TRUE(append({0, 2}, 30, 1).ok());
  EXPECT_TRUE(append({0, 3}, 30, 0).ok());  // nothing new
  EXPECT_EQ(ReasonOf(append({0, 3}, 45, 2)), "SIZE_MISMATCH block_ids");
  const auto last = [&](LayerSpan layers) {
    return Append(7, opened->number,
                  {.layers = layers,
                   .committed_tokens = 45,
                   .first_block = 1,
                   .blocks = {offered.blocks.begin() + 1, offered.blocks.end()},
                   .tail = Addition::Tail{.ring_block = 1, .highest_stored = 44}});
  };
  EXPECT_EQ(ReasonOf(last({0, 2})), "HANDOFF_INCOMPLETE committed_tokens");
  EXPECT_TRUE(last({0, 3}).ok());
  EXPECT_EQ(ReasonOf(last({0, 3})), "HANDOFF_COMPLETE offer_id");
  const auto result = accepting.result.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->committed_tokens, 45);
  EXPECT_TRUE(BytesOf(*target) == Expected(*target, accepted, 44));
}

TEST_F(HandoffBytesTest, ATargetOfOtherLayersIsRefused) {
  CacheGeometry other = kTarget;
  other.layers = 4;
  const auto source = MakeCache("source", kSource);
  const auto target = MakeCache("target", other);
  const auto opened = Open(Whole(source, {Backwards(11, 6), 1}, 20));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::string before = BytesOf(*target);
  EXPECT_EQ(ReasonOf(Accept(opened->secret, target, {Backwards(19, 12), 1}, 20)), "GEOMETRY_DIFFERS cache");
  EXPECT_TRUE(BytesOf(*target) == before);
}

TEST_F(HandoffBytesTest, BadTargetsAreRefusedByNameBeforeAByteMoves) {
  const auto source = MakeCache("source", kSource);
  const auto target = MakeCache("target", kTarget);
  const auto opened = Open(Whole(source, {Backwards(11, 6), 1}, 40));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::string before = BytesOf(*target);
  const auto accept = [&](std::vector<std::int64_t> blocks, std::int64_t ring, std::int64_t resume) {
    return ReasonOf(Accept(opened->secret, target, {std::move(blocks), ring}, resume));
  };
  EXPECT_EQ(accept({1, 2, 3, 4}, 1, 40), "SIZE_MISMATCH block_ids");
  EXPECT_EQ(accept({1, 2, 0, 4, 5}, 1, 40), "NULL_BLOCK block_ids[2]");
  EXPECT_EQ(accept({1, 2, -3, 4, 5}, 1, 40), "BLOCK_OUT_OF_RANGE block_ids[2]");
  EXPECT_EQ(accept({1, 2, 3, 4, 20}, 1, 40), "BLOCK_OUT_OF_RANGE block_ids[4]");
  EXPECT_EQ(accept({1, 2, 3, 2, 5}, 1, 40), "DUPLICATE_BLOCK block_ids[3]");
  EXPECT_EQ(accept({1, 2, 3, 4, 5}, 0, 40), "NULL_RING_BLOCK ring");
  EXPECT_EQ(accept({1, 2, 3, 4, 5}, 5, 40), "RING_OUT_OF_RANGE ring");
  EXPECT_EQ(accept({1, 2, 3, 4, 5}, -1, 40), "RING_OUT_OF_RANGE ring");
  EXPECT_EQ(accept({1, 2, 3, 4, 5}, 1, -1), "RESUME_OUT_OF_RANGE resume_position");
  EXPECT_EQ(accept(std::vector<std::int64_t>(1, 1), 1, std::int64_t{1} << 62),
            "RESUME_OUT_OF_RANGE resume_position");
  EXPECT_TRUE(BytesOf(*target) == before);
}

// Blocks of another group: two views of each of the caches, in memory of their own and in other strides;
// larger than a chunk.
class HandoffGroupsTest : public HandoffBytesTest {
 protected:
  static constexpr std::int64_t kFirstView = kChunkBytes + 4096;
  static constexpr std::int64_t kSecondView = 768;
  static constexpr std::int64_t kBlockBytes = kFirstView + kSecondView;
  static constexpr std::int64_t kBlocks = 5;

  struct Side {
    std::shared_ptr<Cache> cache;
    std::string memory;
    std::shared_ptr<BoundCache> bound;

    // Where byte b of a block lies.
    char& At(std::int64_t block, std::int64_t b) {
      const PageView& view = bound->groups[0].views[b < kFirstView ? 0 : 1];
      return memory[static_cast<std::size_t>(view.offset + block * view.block_stride +
                                             (b < kFirstView ? b : b - kFirstView))];
    }
  };

  Side Make(const std::string& name, std::int64_t padding) {
    Side side{MakeCache(name, kSource), "", std::make_shared<BoundCache>()};
    const std::int64_t stride = kFirstView + padding;
    const std::int64_t second = kBlocks * stride;
    side.memory.assign(static_cast<std::size_t>(second + kBlocks * (kSecondView + padding)), 'u');
    side.bound->device = &side.cache->device();
    side.bound->blocks = kBlocks;
    side.bound->block_size = kSource.block_size;
    side.bound->groups = {{reinterpret_cast<std::uint8_t*>(side.memory.data()),
                           {{0, stride, kFirstView}, {second, kSecondView + padding, kSecondView}}}};
    return side;
  }
  static std::vector<GroupSpec> Specs() { return {{.bytes_per_block = kBlockBytes}}; }
};

TEST_F(HandoffGroupsTest, BlocksOfOtherViewsComeWholeAndOnlyThoseThatAreWanted) {
  MakeOffers(16 << 20);
  Side from = Make("from", 64);
  Side to = Make("to", 0);
  const std::vector<std::int64_t> offered = {4, 2, 1};  // blocks 7, 8 and 9 of the request
  const std::vector<std::int64_t> accepted = {3, 1};    // 8 and 9
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t b = 0; b < kBlockBytes; ++b) {
      from.At(offered[static_cast<std::size_t>(i)], b) = static_cast<char>(PatternByte(9, i, b, 0));
    }
  }
  Offers::OpenArgs args = Whole(from.cache, {Backwards(11, 6), 1}, 5);
  args.bound = from.bound;
  args.group_specs = Specs();
  args.part.groups = {{.group = 0, .first = 7, .blocks = offered}};
  const auto opened = Open(std::move(args));
  ASSERT_TRUE(opened.ok()) << opened.status();

  std::string expected = to.memory;
  expected.swap(to.memory);
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t b = 0; b < kBlockBytes; ++b) {
      to.At(accepted[static_cast<std::size_t>(i)], b) = static_cast<char>(PatternByte(9, i + 1, b, 0));
    }
  }
  expected.swap(to.memory);
  const auto target = [&] {
    AcceptTarget target{.cache = to.cache, .blocks = {}, .ring_block = 1, .resume = 5};
    to.bound->groups[0].base = reinterpret_cast<std::uint8_t*>(to.memory.data());
    target.bound = to.bound;
    target.group_specs = Specs();
    target.groups = {{0, 8, accepted}};
    return target;
  };
  const auto result = Begin(opened->secret, target(), kTransfer).result.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(to.memory == expected);

  // Chunk by chunk, the last first.
  std::fill(to.memory.begin(), to.memory.end(), 'u');
  std::promise<absl::StatusOr<Accepted>> chunked;
  const auto acceptance = std::make_shared<Acceptance>(
      target(), *bounces_, [&](auto accepted_now) { chunked.set_value(std::move(accepted_now)); });
  const auto offer = offers_->Bind(opened->secret, kTransfer);
  ASSERT_TRUE(offer.ok());
  const Offer::View view = (*offer)->Look(0);
  for (const auto& staged : view.parts) {
    ASSERT_TRUE(acceptance->AddPart(staged->number, staged->part).ok());
    for (std::int64_t c = ChunkCount(staged->part); c-- > 0;) {
      const auto bytes = std::make_shared<std::string>();
      const Chunk chunk = ChunkAt(staged->part, c);
      bytes->assign(staged->data() + chunk.offset(staged->part), static_cast<std::size_t>(chunk.bytes()));
      acceptance->WriteFromHost(staged->number, c, bytes->data(), bytes);
    }
  }
  acceptance->SourceDone(view.committed_tokens);
  const auto again = chunked.get_future().get();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(to.memory == expected);
  EXPECT_EQ(again->bytes, result->bytes);

  // A block that was never offered.
  AcceptTarget more = target();
  more.groups = {{0, 6, accepted}};
  EXPECT_EQ(ReasonOf(Begin(opened->secret, std::move(more), kTransfer).result.get()),
            "HANDOFF_BLOCK_NOT_OFFERED groups[0].block_ids[0]");
  AcceptTarget other = target();
  other.group_specs[0].bytes_per_block = 4096;
  EXPECT_EQ(ReasonOf(Begin(opened->secret, std::move(other), kTransfer).result.get()),
            "GEOMETRY_DIFFERS groups");
}

// What the request is of besides summaries is the offer's to say, and what comes of it the target's: it may
// want none of a group, or be bound to nothing.
TEST_F(HandoffGroupsTest, BlocksThatAreNotWantedAreLeftAlone) {
  MakeOffers(16 << 20);
  Side from = Make("from", 64);
  Side to = Make("to", 0);
  const std::string before = to.memory;
  for (const bool bound : {true, false}) {
    SCOPED_TRACE(bound);
    Offers::OpenArgs args = Whole(from.cache, {Backwards(11, 6), 1}, 5);
    args.bound = from.bound;
    args.group_specs = Specs();
    args.part.groups = {{.group = 0, .first = 7, .blocks = {4, 2}}};
    const auto opened = Open(std::move(args));
    ASSERT_TRUE(opened.ok()) << opened.status();
    const auto target = [&] {
      AcceptTarget target{.cache = to.cache, .blocks = {}, .ring_block = 1, .resume = 5};
      if (bound) target.bound = to.bound;
      if (bound) target.group_specs = Specs();
      return target;
    };
    using Write = void (*)(Acceptance&, std::int32_t, const char*);
    const std::vector<Write> writes = {
        [](Acceptance& a, std::int32_t part, const char* data) { a.WritePart(part, data, nullptr); },
        [](Acceptance& a, std::int32_t part, const char* data) {
          for (int c = 0; c < 8; ++c) a.Write(part, c, data, nullptr);
        },
        [](Acceptance& a, std::int32_t part, const char* data) {
          for (int c = 0; c < 8; ++c) a.WriteFromHost(part, c, data, nullptr);
        }};
    const auto offer = offers_->Bind(opened->secret, kTransfer);
    ASSERT_TRUE(offer.ok());
    const Offer::View view = (*offer)->Look(0);
    for (const Write& write : writes) {
      std::promise<absl::StatusOr<Accepted>> promise;
      const auto acceptance = std::make_shared<Acceptance>(
          target(), *bounces_, [&](auto accepted) { promise.set_value(std::move(accepted)); });
      for (const auto& staged : view.parts) {
        ASSERT_TRUE(acceptance->AddPart(staged->number, staged->part).ok());
        if (staged->part.kind == PartKind::kBlocks) {
          write(*acceptance, staged->number, staged->data());
        } else {
          acceptance->WritePart(staged->number, staged->data(), nullptr);
        }
      }
      // A group that neither side has heard of.
      Part unknown{.kind = PartKind::kBlocks, .first = 0, .count = 3, .unit_bytes = 512, .group = 40};
      ASSERT_TRUE(acceptance->AddPart(static_cast<std::int32_t>(view.parts.size()), unknown).ok());
      const std::string bytes(std::size_t{3} * 512, 'x');
      write(*acceptance, static_cast<std::int32_t>(view.parts.size()), bytes.data());
      acceptance->SourceDone(view.committed_tokens);
      const auto accepted = promise.get_future().get();
      EXPECT_TRUE(accepted.ok()) << accepted.status();
    }
    const auto result = Begin(opened->secret, target(), kTransfer).result.get();
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(to.memory == before);
  }
}

}  // namespace
}  // namespace kvsummary
