#include "client/direct/direct.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "client/fake_descriptor_socket.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kGeometry{.layers = 3,
                                  .blocks = 9,
                                  .block_size = 16,
                                  .block_stride = 3 * 512 + 256,
                                  .ring_blocks = 5,
                                  .capacity = 10,
                                  .rows_per_layer = 11,
                                  .k = 3};

// A cache behind a fake daemon. Every ticket whose first byte is 1 is good.
class DirectTest : public testing::Test {
 protected:
  void SetUp() override {
    memory_ = static_cast<std::uint8_t*>(
        mmap(nullptr, kGeometry.total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0));
    ASSERT_NE(memory_, MAP_FAILED);
  }
  void TearDown() override { munmap(memory_, kGeometry.total_bytes()); }

  kvs_map_args Args() {
    path_ = daemon_.path();
    return {.socket_path = path_.c_str(),
            .kind = KVS_MEMFD,
            .handle = ticket_,
            .handle_bytes = sizeof(ticket_),
            .size_bytes = kGeometry.total_bytes(),
            .offset_bytes = 0,
            .device_uuid = "",
            .pid_namespace = 0,
            .generation = 7,
            .geometry = {kGeometry.layers, kGeometry.blocks, kGeometry.block_size, kGeometry.block_stride,
                         kGeometry.ring_blocks, kGeometry.capacity, kGeometry.rows_per_layer, kGeometry.k}};
  }

  const OwnedDescriptor memfd_ = MakeMemfd(kGeometry.total_bytes());
  FakeAnswer answer_{.reply = {.size_bytes = kGeometry.total_bytes()}, .descriptors = {memfd_.get()}};
  int redeemed_ = 0;  // read while the daemon is idle
  FakeDescriptorSocket daemon_{[this](const DescriptorRequest& request, const OwnedDescriptor&) {
    ++redeemed_;
    if (request.ticket[0] == 1) return answer_;
    FakeAnswer refusal;
    refusal.reply.code = 5;
    std::strcpy(refusal.reply.reason, "TICKET_UNKNOWN");
    return refusal;
  }};
  std::uint8_t ticket_[kTicketBytes] = {1};
  std::string path_;
  std::uint8_t* memory_ = nullptr;
};

struct Arrays {
  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::int32_t> starts{0}, lens;

  void Add(std::int64_t request, std::int64_t position) {
    slots.push_back((1 + request) * kGeometry.block_size + position % kGeometry.block_size);
    positions.push_back(position);
    bases.push_back((1 + request) * kGeometry.rows_per_block());
  }
  void EndRequest() {
    starts.push_back(static_cast<std::int32_t>(slots.size()));
    lens.push_back(static_cast<std::int32_t>(positions.back() + 1));
  }
  std::int32_t rows() const { return static_cast<std::int32_t>(slots.size()); }
  std::int32_t requests() const { return static_cast<std::int32_t>(lens.size()); }
};

// bf16 rows [layers][rows][512] that no two tests share.
std::vector<std::uint16_t> RandomRows(std::int64_t rows, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> values(kGeometry.layers * rows * kRowElements);
  for (auto& v : values) v = static_cast<std::uint16_t>(0x3e80 + random() % 0x180 + (random() & 1) * 0x8000);
  return values;
}

TEST_F(DirectTest, UpdatesGiveTheBytesOfTheScalarKernels) {
  DirectCache cache;
  auto status = cache.Map(Args());
  ASSERT_TRUE(status.ok()) << status.message;
  std::vector<std::uint8_t> twin(kGeometry.total_bytes());
  const LayerSpan all{0, kGeometry.layers};
  const CacheView view = MakeView(kGeometry, twin.data(), all);

  Arrays prefill;
  for (int request = 0; request < 3; ++request) {
    for (int p = 0; p < 5 + request; ++p) prefill.Add(request, p);
    prefill.EndRequest();
  }
  auto rows = RandomRows(prefill.rows(), 1);
  const PrefillStep p{prefill.rows(),       prefill.requests(),       PackedRows(rows.data(), prefill.rows()),
                      prefill.slots.data(), prefill.positions.data(), prefill.starts.data(),
                      prefill.bases.data()};
  status = cache.Prefill(all, p, {});
  ASSERT_TRUE(status.ok()) << status.message;
  ScalarKernels().Prefill(view, p, {});

  Arrays verify;
  for (int request = 0; request < 3; ++request) {
    for (int i = 0; i < 4; ++i) verify.Add(request, 5 + request + i);
    verify.EndRequest();
  }
  rows = RandomRows(verify.rows(), 2);
  const VerifyStep v{verify.rows(),       verify.requests(),    PackedRows(rows.data(), verify.rows()),
                     verify.slots.data(), verify.starts.data(), verify.lens.data(),
                     verify.bases.data()};
  ASSERT_TRUE(cache.Verify(all, v, {}).ok());
  ScalarKernels().Verify(view, v, {});

  for (int step = 0; step < 6; ++step) {
    Arrays decode;
    for (int request = 0; request < 3; ++request) decode.Add(request, 9 + request + step);
    rows = RandomRows(3, 3 + step);
    const DecodeStep d{3, PackedRows(rows.data(), 3), decode.slots.data(), decode.positions.data(),
                       decode.bases.data()};
    ASSERT_TRUE(cache.Decode(all, d, {}).ok());
    ScalarKernels().Decode(view, d, {});
  }
  EXPECT_EQ(std::memcmp(memory_, twin.data(), twin.size()), 0);
  EXPECT_NE(std::count(twin.begin(), twin.end(), 0), static_cast<std::ptrdiff_t>(twin.size()));
}

TEST_F(DirectTest, AForkedChildHasNoMapping) {
  DirectCache cache;
  const auto status = cache.Map(Args());
  ASSERT_TRUE(status.ok()) << status.message;
  unsigned char present = 0;
  ASSERT_EQ(mincore(cache.data(), 1, &present), 0);
  const pid_t child = fork();
  if (child == 0) _exit(mincore(cache.data(), 1, &present) == 0 ? 1 : 0);
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
}

TEST_F(DirectTest, BadRowsAreSkippedAndCounted) {
  DirectCache cache;
  ASSERT_TRUE(cache.Map(Args()).ok());
  const auto rows = RandomRows(2, 1);
  const std::int64_t slots[] = {1000, -1}, positions[] = {0, 0}, bases[] = {33, 33};
  unsigned long long skipped = 0;
  ASSERT_TRUE(
      cache.Decode({0, 3}, {2, PackedRows(rows.data(), 2), slots, positions, bases}, {.skipped = &skipped})
          .ok());
  EXPECT_EQ(skipped, 3) << "once a layer";
}

TEST_F(DirectTest, ARefusedTicketHasTheDaemonsReason) {
  ticket_[0] = 2;
  DirectCache cache;
  const auto status = cache.Map(Args());
  EXPECT_EQ(status.code, KVS_NOT_FOUND);
  EXPECT_EQ(status.reason, "TICKET_UNKNOWN");
}

TEST_F(DirectTest, ADaemonWithoutADescriptorIsNamed) {
  answer_.descriptors.clear();
  DirectCache cache;
  EXPECT_EQ(cache.Map(Args()).reason, "DESCRIPTOR_MISSING");
}

TEST_F(DirectTest, ASegmentThatIsTooSmallIsRefused) {
  const OwnedDescriptor small = MakeMemfd(kGeometry.total_bytes() - 1);
  answer_.descriptors = {small.get()};
  DirectCache cache;
  EXPECT_EQ(cache.Map(Args()).reason, "MEMFD_TOO_SMALL");
  answer_.descriptors = {memfd_.get()};
  answer_.reply.size_bytes = kGeometry.total_bytes() - 1;
  EXPECT_EQ(cache.Map(Args()).code, KVS_INTERNAL);
}

TEST_F(DirectTest, ADescriptorOfSomethingElseIsRefused) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const OwnedDescriptor read(ends[0]), write(ends[1]);
  answer_.descriptors = {read.get()};
  DirectCache cache;
  EXPECT_EQ(cache.Map(Args()).code, KVS_INTERNAL);
}

TEST_F(DirectTest, ATruncatedAnswerIsRefused) {
  answer_.bytes = 12;
  DirectCache cache;
  EXPECT_EQ(cache.Map(Args()).code, KVS_INTERNAL);
}

TEST_F(DirectTest, AnOpenHandleIsNotRedeemedAgain) {
  DirectCache first, second;
  ASSERT_TRUE(first.Map(Args()).ok());
  ASSERT_TRUE(second.Map(Args()).ok());
  EXPECT_EQ(first.data(), second.data());
  EXPECT_EQ(redeemed_, 1);
  kvs_map_args later = Args();
  later.generation = 8;
  DirectCache third;
  ASSERT_TRUE(third.Map(later).ok());
  EXPECT_NE(first.data(), third.data());
  EXPECT_EQ(redeemed_, 2);
}

TEST_F(DirectTest, AClosedHandleIsForgotten) {
  {
    DirectCache cache;
    ASSERT_TRUE(cache.Map(Args()).ok());
  }
  DirectCache again;
  ASSERT_TRUE(again.Map(Args()).ok());
  EXPECT_EQ(redeemed_, 2);
}

TEST_F(DirectTest, AHandleThatCannotBeIsRefusedUnredeemed) {
  const auto reason = [this](auto change) {
    kvs_map_args args = Args();
    change(args);
    DirectCache cache;
    const auto status = cache.Map(args);
    EXPECT_EQ(status.code, KVS_INVALID_ARGUMENT);
    return status.reason;
  };
  EXPECT_EQ(reason([](auto& a) { a.kind = 4; }), "MEMORY_KIND_UNSUPPORTED");
  EXPECT_EQ(reason([](auto& a) { a.kind = 0; }), "MEMORY_KIND_UNSUPPORTED");
  EXPECT_EQ(reason([](auto& a) { a.handle = nullptr; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.handle_bytes = 31; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.kind = KVS_CUDA_IPC; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.kind = KVS_CUDA_VMM; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.device_uuid = "GPU-1"; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.socket_path = nullptr; }), "FIELD_MISSING");
  EXPECT_EQ(reason([](auto& a) { a.offset_bytes = -1; }), "HANDLE_INVALID");
  EXPECT_EQ(reason([](auto& a) { a.size_bytes -= 1; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) {  // pages and rings whose sum overflows
              a.size_bytes = INT64_MAX;
              a.geometry.block_stride = INT64_MAX / a.geometry.blocks / kSummaryBytes * kSummaryBytes;
            }),
            "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.size_bytes = -1; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.layers = 0; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.layers = INT32_MAX; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.blocks = INT64_MAX; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.block_stride = INT64_MAX - 255; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.block_size = 12; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.capacity = 12; }), "SIZE_MISMATCH");
  EXPECT_EQ(reason([](auto& a) { a.geometry.ring_blocks = INT64_MAX; }), "SIZE_MISMATCH");
  EXPECT_EQ(redeemed_, 0);
}

TEST_F(DirectTest, AnUpdateThatCannotBeIsRefused) {
  DirectCache cache;
  ASSERT_TRUE(cache.Map(Args()).ok());
  const auto rows = RandomRows(1, 1);
  const std::int64_t slots[] = {16}, positions[] = {0}, bases[] = {33};
  const std::int32_t starts[] = {0, 1}, lens[] = {1};
  const RowsView in = PackedRows(rows.data(), 1);
  const auto decode = [&](LayerSpan layers, const DecodeStep& step) {
    const auto status = cache.Decode(layers, step, {});
    EXPECT_EQ(status.code, KVS_INVALID_ARGUMENT);
    return status.reason;
  };
  const DecodeStep good{1, in, slots, positions, bases};
  EXPECT_EQ(decode({-1, 1}, good), "LAYERS_OUT_OF_RANGE");
  EXPECT_EQ(decode({0, 0}, good), "LAYERS_OUT_OF_RANGE");
  EXPECT_EQ(decode({3, 1}, good), "LAYERS_OUT_OF_RANGE");
  EXPECT_EQ(decode({2, INT32_MAX}, good), "LAYERS_OUT_OF_RANGE");
  EXPECT_EQ(decode({0, 1}, {-1, in, slots, positions, bases}), "SIZE_MISMATCH");
  EXPECT_EQ(decode({0, 1}, {1, in, nullptr, positions, bases}), "FIELD_MISSING");
  EXPECT_EQ(decode({0, 1}, {1, in, slots, nullptr, bases}), "FIELD_MISSING");
  EXPECT_EQ(decode({0, 1}, {1, {}, slots, positions, bases}), "FIELD_MISSING");
  const auto* odd = reinterpret_cast<const std::int64_t*>(reinterpret_cast<const char*>(slots) + 4);
  EXPECT_EQ(decode({0, 1}, {1, in, odd, positions, bases}), "BUFFER_RANGE");
  EXPECT_EQ(cache.Verify({0, 1}, {1, 0, in, slots, starts, lens, bases}, {}).reason, "SIZE_MISMATCH");
  EXPECT_EQ(cache.Verify({0, 1}, {1, 1, in, slots, nullptr, lens, bases}, {}).reason, "FIELD_MISSING");
  EXPECT_EQ(cache.Prefill({0, 1}, {1, -1, in, slots, positions, starts, bases}, {}).reason, "SIZE_MISMATCH");
  EXPECT_TRUE(cache.Decode({0, 1}, {}, {}).ok()) << "no rows are no work";
}

TEST_F(DirectTest, VerifyNeedsARingOfARegion) {
  kvs_map_args args = Args();
  args.geometry.capacity = 7;
  DirectCache cache;
  ASSERT_TRUE(cache.Map(args).ok());
  const auto status = cache.Verify({0, 1}, {}, {});
  EXPECT_EQ(status.code, KVS_FAILED_PRECONDITION);
  EXPECT_EQ(status.reason, "VERIFY_CAPACITY");
}

TEST_F(DirectTest, NullsAreRefusedOrIgnored) {
  EXPECT_EQ(kvs_map(nullptr, nullptr), KVS_INVALID_ARGUMENT);
  kvs_cache* cache = nullptr;
  EXPECT_EQ(kvs_map(nullptr, &cache), KVS_INVALID_ARGUMENT);
  EXPECT_EQ(kvs_decode(nullptr, nullptr, nullptr), KVS_INVALID_ARGUMENT);
  EXPECT_EQ(kvs_unmap(nullptr), KVS_OK);
  EXPECT_EQ(kvs_data(nullptr), nullptr);
}

TEST_F(DirectTest, ARepeatedOpenIsQuick) {
  DirectCache held;
  const kvs_map_args args = Args();
  ASSERT_TRUE(held.Map(args).ok());
  constexpr int kOpens = 20'000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kOpens; ++i) {
    kvs_cache* cache = nullptr;
    kvs_map(&args, &cache);
    kvs_unmap(cache);
  }
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  RecordProperty("ns_an_open", static_cast<int>(elapsed.count() / kOpens));
  EXPECT_EQ(redeemed_, 1);
}

}  // namespace
}  // namespace kvsummary
