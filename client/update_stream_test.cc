// Client::UpdateStream.
#include <string>
#include <vector>

#include "client/client.h"
#include "client/fake_daemon.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using UpdateStreamTest = FakeDaemonTest;

TEST_F(UpdateStreamTest, AStreamSendsInOrderAndSumsUpResults) {
  auto stream = client_->OpenUpdateStream();
  for (int i = 0; i < 30; ++i) {
    Arrays arrays(1, 2);
    arrays.slots[0] = i;
    ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  }
  auto result = stream->Flush();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 60);
  EXPECT_EQ(result->regions_closed, 30);
  ASSERT_EQ(daemon_.updates.size(), 30);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(daemon_.updates[i].decode().slots(0), i);
  result = stream->Flush();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->rows, 0);
}

TEST_F(UpdateStreamTest, AStreamTakesAllKindsAndSplits) {
  const Arrays arrays(2, 12);
  const std::vector<std::int32_t> starts{0, 4, 8, 12}, lens{4, 4, 4};
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 2}, arrays.Decode()).ok());
  ASSERT_TRUE(stream->Verify(cache_, {0, 2}, {arrays.slots, starts, lens, arrays.bases, arrays.data}).ok());
  ASSERT_TRUE(
      stream->Prefill(cache_, {0, 2}, {arrays.slots, arrays.positions, starts, arrays.bases, arrays.data})
          .ok());
  const auto result = stream->Flush();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 36);
  EXPECT_EQ(daemon_.updates.size(), 4 + 6 + 4);
}

TEST_F(UpdateStreamTest, ARefusalEndsTheStreamForGood) {
  daemon_.refuse_at = 3;
  const Arrays arrays(1, 1);
  auto stream = client_->OpenUpdateStream();
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = stream->Decode(cache_, {0, 1}, arrays.Decode());
  EXPECT_EQ(ReasonOf(status), "SLOT_OUT_OF_RANGE") << status;
  EXPECT_EQ(daemon_.updates.size(), 4);
  EXPECT_EQ(ReasonOf(stream->Flush().status()), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(ReasonOf(stream->Decode(cache_, {0, 1}, arrays.Decode())), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(daemon_.updates.size(), 4);
}

TEST_F(UpdateStreamTest, AnUpdateThatCannotBeSplitEndsTheStreamAfterWhatWasSent) {
  const Arrays arrays(1, 20);
  DecodeUpdate update = arrays.Decode();
  update.positions = update.positions.first(1);
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  EXPECT_EQ(ReasonOf(stream->Decode(cache_, {0, 1}, update)), "SIZE_MISMATCH");
  EXPECT_EQ(daemon_.updates.size(), 3);
  EXPECT_EQ(ReasonOf(stream->Flush().status()), "SIZE_MISMATCH");
}

TEST_F(UpdateStreamTest, AStreamEndsAtTheDeadlineOfAMessage) {
  daemon_.hang = true;
  const auto client = Connect(milliseconds(50));
  auto stream = client->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  EXPECT_EQ(stream->Flush().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(UpdateStreamTest, AStreamHasABoundedNumberOfMessagesUnanswered) {
  daemon_.hang = true;
  const auto client = Connect(milliseconds(50));
  auto stream = client->OpenUpdateStream();
  const Arrays arrays(1, 1);
  int sent = 0;
  while (sent < 1000 && stream->Decode(cache_, {0, 1}, arrays.Decode()).ok()) ++sent;
  EXPECT_EQ(sent, 8);
}

TEST_F(UpdateStreamTest, DroppingAStreamCancelsIt) {
  daemon_.hang = true;
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  {
    std::unique_lock lock(daemon_.mutex);
    daemon_.changed.wait(lock, [this] { return !daemon_.updates.empty(); });
  }
  stream.reset();  // returns although the daemon never answers; TearDown waits for its handler
  client_.reset();
}

TEST_F(UpdateStreamTest, AStreamOutlivesItsClient) {
  auto stream = client_->OpenUpdateStream();
  client_.reset();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  EXPECT_TRUE(stream->Flush().ok());
}

TEST_F(UpdateStreamTest, AnUnusedStreamEndsQuietly) { client_->OpenUpdateStream().reset(); }

TEST_F(UpdateStreamTest, AStreamTellsThatTheDaemonHasGone) {
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode()).ok());
  ASSERT_TRUE(stream->Flush().ok());
  server_->Shutdown(std::chrono::system_clock::now());
  absl::Status status = stream->Decode(cache_, {0, 1}, Arrays(1, 1).Decode());
  if (status.ok()) status = stream->Flush().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

}  // namespace
}  // namespace kvsummary
