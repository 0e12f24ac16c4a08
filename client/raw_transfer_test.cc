#include "client/raw_transfer.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

TEST(RawTransferTest, MovesAnyNumberOfBytesAgainAndAgain) {
  for (const char* address : {"unix:/run/s", "127.0.0.1:5"}) {
    const auto raw = MakeRawTransfers(address, 5 << 20, false);
    ASSERT_TRUE(raw.ok()) << raw.status();
    EXPECT_TRUE(raw->missing.empty());
    for (const auto& transfer : raw->transfers) {
      for (const std::int64_t bytes : {1, 1 << 20, (3 << 20) + 17, 5 << 20, 0, 100}) {
        const auto seconds = transfer->Move(bytes);
        ASSERT_TRUE(seconds.ok()) << transfer->name() << ", " << bytes << ": " << seconds.status();
        EXPECT_GE(*seconds, 0);
      }
    }
  }
}

TEST(RawTransferTest, StreamsAreOverTheAddressesKind) {
  EXPECT_NE((*MakeRawStream(true))->name(), (*MakeRawStream(false))->name());
}

}  // namespace
}  // namespace kvsummary
