#include "server/handoff/address.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

TEST(AddressTest, WildcardsAreKnown) {
  for (const char* host : {"0.0.0.0", "::", "0", "0.0", "0x0", "::ffff:0.0.0.0", "0:0:0:0:0:0:0:0"}) {
    EXPECT_TRUE(IsWildcard(host)) << host;
  }
  for (const char* host : {"127.0.0.1", "::1", "0.0.0.1", "10.0.0.0", "localhost", "", "unix"}) {
    EXPECT_FALSE(IsWildcard(host)) << host;
  }
}

TEST(AddressTest, OnlyWhatOthersCanDialIsAnAddress) {
  for (const char* good : {"host:50051", "10.0.0.7:1", "[fd00::1]:65535", "unix:/run/s", "127.0.0.1:9"}) {
    EXPECT_TRUE(CheckDialled(good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string("host"), std::string("host:0"), std::string("host:65536"),
        std::string("host:x"), std::string("host:-1"), std::string("host:+1"), std::string(":50051"),
        std::string("0.0.0.0:50051"), std::string("[::]:50051"), std::string(":::50051"),
        std::string("0:50051"), std::string("[::1]"), std::string("10.0.0.7"), std::string("unix:"),
        std::string("unix:/"), std::string("unix:run/s"), std::string("dns:///host:1"),
        "unix:/" + std::string(512, 'x')}) {
    EXPECT_EQ(CheckDialled(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace kvsummary
