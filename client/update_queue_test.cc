// A submission queue from the worker's end, with a daemon played by hand.
#include "client/update_queue.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <future>
#include <new>
#include <string>

#include "gtest/gtest.h"

namespace kvsummary {
namespace {

class UpdateQueueTest : public testing::Test {
 protected:
  explicit UpdateQueueTest(std::chrono::milliseconds timeout = std::chrono::milliseconds(20)) {
    const OwnedDescriptor memory = MakeMemory();
    memory_ = new (mmap(nullptr, sizeof(*memory_), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0))
        UpdateQueueMemory;
    wake_ = OwnedDescriptor(eventfd(0, EFD_NONBLOCK));
    mapping_ = *QueueMapping::Map(memory, kUpdateQueueBytes, OwnedDescriptor(dup(wake_.get())));
    queue_ = std::make_unique<UpdateQueue>(mapping_, timeout);
  }
  ~UpdateQueueTest() override { munmap(memory_, sizeof(*memory_)); }

  static OwnedDescriptor MakeMemory() {
    OwnedDescriptor fd(memfd_create("kvs-test", MFD_CLOEXEC));
    if (ftruncate(fd.get(), kUpdateQueueBytes) != 0) std::abort();
    return fd;
  }
  void Answer(std::uint64_t number, const QueueCompletion& completion = {}) {
    QueueCompletion& to = memory_->completions[(number - 1) % kUpdateQueueEntries];
    to = completion;
    to.number = number;
    std::atomic_ref(memory_->completed).store(number);
  }
  absl::StatusOr<std::uint64_t> Submit() { return queue_->Decode(cache_, {0, 1}, {}); }
  bool Woken() const {
    eventfd_t value = 0;
    return eventfd_read(wake_.get(), &value) == 0;
  }

  UpdateQueueMemory* memory_ = nullptr;
  OwnedDescriptor wake_;
  std::shared_ptr<QueueMapping> mapping_;
  std::unique_ptr<UpdateQueue> queue_;
  const Cache cache_{.name = "c", .generation = 7, .device = "", .geometry = {}};
};

TEST_F(UpdateQueueTest, AnEntryHoldsTheWholeUpdate) {
  const SharedUpdate update{.rows = {1, 2, 3, 4, 5},
                            .slots = {6, 7, 8},
                            .positions = {9, 10, 11},
                            .query_start_loc = {12, 13, 14},
                            .seq_lens = {15, 16, 17},
                            .ring_bases = {18, 19, 20},
                            .ready = {21, 22, 23},
                            .done = {24, 25, 26}};
  EXPECT_EQ(*queue_->Verify(cache_, {27, 28}, update), 1u);
  EXPECT_EQ(memory_->submitted, 1u);
  const QueueEntry& e = memory_->entries[0];
  EXPECT_EQ(e.kind, static_cast<std::uint32_t>(QueueStepKind::kVerify));
  EXPECT_EQ(std::string(e.cache_name, e.cache_name_bytes), "c");
  EXPECT_EQ(e.cache_generation, 7u);
  EXPECT_EQ(e.first_layer, 27);
  EXPECT_EQ(e.layers, 28);
  // What lies between is a run of 64-bit numbers in this order.
  std::uint64_t words[26];
  std::memcpy(words, &e.rows, sizeof(words));
  for (std::uint64_t i = 0; i < 26; ++i) EXPECT_EQ(words[i], i + 1);
}

TEST_F(UpdateQueueTest, TheDaemonIsWokenOnlyWhenItSleeps) {
  ASSERT_TRUE(Submit().ok());
  EXPECT_FALSE(Woken());
  memory_->sleeping = 1;
  ASSERT_TRUE(Submit().ok());
  EXPECT_TRUE(Woken());
}

TEST_F(UpdateQueueTest, AnswersAreResultsOrTheDaemonsErrors) {
  const std::uint64_t first = *Submit();
  const std::uint64_t second = *Submit();
  Answer(first, {.rows = 3, .regions_closed = 1});
  QueueCompletion refused{.code = 3, .reason = "SLOT_OUT_OF_RANGE", .field = "slots[3]", .message = "beyond"};
  Answer(second, refused);
  const auto result = queue_->Wait(first);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 3);
  EXPECT_EQ(result->regions_closed, 1);
  const auto status = queue_->Wait(second).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "beyond");
  EXPECT_EQ(ReasonOf(status), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(FieldOf(status), "slots[3]");
}

TEST_F(UpdateQueueTest, ASubmissionWaitsForRoomAndTheRingGoesRound) {
  for (std::uint64_t n = 1; n <= kUpdateQueueEntries; ++n) ASSERT_EQ(*Submit(), n);
  EXPECT_EQ(Submit().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(memory_->submitted, kUpdateQueueEntries);
  Answer(1);
  EXPECT_TRUE(queue_->Wait(1).ok());
  EXPECT_EQ(*Submit(), kUpdateQueueEntries + 1);
  for (std::uint64_t n = 2; n <= kUpdateQueueEntries + 1; ++n) Answer(n);
  EXPECT_EQ(queue_->Wait(1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(queue_->Wait(2).ok());
}

TEST_F(UpdateQueueTest, AWaitHasADeadlineAndKnowsWhatWasNeverSubmitted) {
  EXPECT_EQ(queue_->Wait(0).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(queue_->Wait(1).status().code(), absl::StatusCode::kOutOfRange);
  const std::uint64_t number = *Submit();
  EXPECT_EQ(queue_->Wait(number).status().code(), absl::StatusCode::kDeadlineExceeded);
  Answer(number);
  EXPECT_TRUE(queue_->Wait(number).ok());
}

TEST_F(UpdateQueueTest, ADaemonThatEndsTheQueueSaysWhy) {
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  Answer(1);
  memory_->end_code = 10;
  std::strcpy(memory_->end_reason, "QUEUE_BROKEN");
  std::atomic_ref(memory_->completed).store(kUpdateQueueEnded);
  EXPECT_TRUE(queue_->Wait(1).ok());
  EXPECT_EQ(ReasonOf(queue_->Wait(2).status()), "QUEUE_BROKEN");
  EXPECT_EQ(ReasonOf(Submit().status()), "QUEUE_BROKEN");
}

class PatientUpdateQueueTest : public UpdateQueueTest {
 protected:
  PatientUpdateQueueTest() : UpdateQueueTest(std::chrono::minutes(10)) {}
};

TEST_F(PatientUpdateQueueTest, ADaemonThatDiesReleasesEveryWait) {
  const std::uint64_t first = *Submit();
  const std::uint64_t second = *Submit();
  Answer(first);
  // It was killed while it wrote this answer.
  memory_->completions[second - 1].number = second;
  auto waiting = std::async(std::launch::async, [&] { return queue_->Wait(second).status(); });
  mapping_->End();
  EXPECT_EQ(waiting.get().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(queue_->Wait(first).ok());
  EXPECT_EQ(Submit().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*queue_->completed(), kUpdateQueueEnded);
}

TEST_F(UpdateQueueTest, MemoryThatIsNoQueueIsRefused) {
  const OwnedDescriptor other = MakeMemory();
  EXPECT_FALSE(QueueMapping::Map(other, kUpdateQueueBytes, OwnedDescriptor(dup(wake_.get()))).ok());
  EXPECT_FALSE(QueueMapping::Map(other, 4096, OwnedDescriptor(dup(wake_.get()))).ok());
}

TEST_F(UpdateQueueTest, ANameThatNoCacheHasIsNotSubmitted) {
  const Cache cache{.name = std::string(129, 'x'), .generation = 1, .device = "", .geometry = {}};
  EXPECT_EQ(ReasonOf(queue_->Decode(cache, {0, 1}, {}).status()), "NAME_INVALID");
  EXPECT_EQ(memory_->submitted, 0u);
}

}  // namespace
}  // namespace kvsummary
