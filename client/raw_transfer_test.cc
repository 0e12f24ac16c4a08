#include "client/raw_transfer.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

TEST(RawTransferTest, MovesAnyNumberOfBytesAgainAndAgain) {
  for (const char* address : {"unix:/run/s", "127.0.0.1:5"}) {
    const auto transfers = MakeRawTransfers(address, 5 << 20);
    ASSERT_TRUE(transfers.ok()) << transfers.status();
    for (const auto& transfer : *transfers) {
      for (const std::int64_t bytes : {1, 1 << 20, (3 << 20) + 17, 5 << 20, 0, 100}) {
        const auto status = transfer->Move(bytes);
        EXPECT_TRUE(status.ok()) << transfer->name() << ", " << bytes << ": " << status;
      }
    }
  }
}

TEST(RawTransferTest, StreamsAreOverTheAddressesKind) {
  EXPECT_NE((*MakeRawStream(true))->name(), (*MakeRawStream(false))->name());
}

}  // namespace
}  // namespace kvsummary
