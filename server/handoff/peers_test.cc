#include "server/handoff/peers.h"

#include <gtest/gtest.h>

#include "server/error.h"

namespace kvsummary {
namespace {

bool Allows(const std::string& entry, const std::string& address) {
  Peers peers;
  EXPECT_TRUE(peers.Allow(entry).ok()) << entry;
  const absl::Status checked = peers.Check(address);
  EXPECT_EQ(RefusalReason(checked), checked.ok() ? "" : "HANDOFF_PEER_NOT_ALLOWED");
  return checked.ok();
}

TEST(PeersTest, NothingIsAllowedUnlessItIsSaid) {
  const Peers peers;
  for (const char* address : {"127.0.0.1:1", "unix:/run/summaryd/summaryd.sock", "localhost:50051", ""}) {
    EXPECT_EQ(RefusalReason(peers.Check(address)), "HANDOFF_PEER_NOT_ALLOWED") << address;
  }
}

TEST(PeersTest, NetworksHostsNamesAndSockets) {
  EXPECT_TRUE(Allows("10.0.0.0/8", "10.255.1.2:50051"));
  EXPECT_FALSE(Allows("10.0.0.0/8", "11.0.0.1:50051"));
  EXPECT_TRUE(Allows("10.1.2.128/25", "10.1.2.129:1"));
  EXPECT_FALSE(Allows("10.1.2.128/25", "10.1.2.127:1"));
  EXPECT_TRUE(Allows("0.0.0.0/0", "1.2.3.4:1"));
  EXPECT_FALSE(Allows("0.0.0.0/0", "[::1]:1"));
  EXPECT_TRUE(Allows("10.0.0.7", "10.0.0.7:50051"));
  EXPECT_TRUE(Allows("10.0.0.7:50051", "10.0.0.7:50051"));
  EXPECT_FALSE(Allows("10.0.0.7:50051", "10.0.0.7:50052"));
  EXPECT_TRUE(Allows("fd00::/8", "[fd12::1]:50051"));
  EXPECT_FALSE(Allows("fd00::/8", "[fe80::1]:50051"));
  EXPECT_TRUE(Allows("[::1]:7", "[::1]:7"));
  EXPECT_TRUE(Allows("prefill-3", "prefill-3:50051"));
  EXPECT_FALSE(Allows("prefill-3", "prefill-33:50051"));
  EXPECT_FALSE(Allows("prefill-3:1", "prefill-3:2"));
  EXPECT_TRUE(Allows("unix:/run/a.sock", "unix:/run/a.sock"));
  EXPECT_FALSE(Allows("unix:/run/a.sock", "unix:/run/a.sock2"));
}

TEST(PeersTest, WhatElseGrpcWouldDialIsNotAllowed) {
  Peers peers;
  for (const char* entry : {"0.0.0.0/0", "::/0", "host", "unix:/a"}) ASSERT_TRUE(peers.Allow(entry).ok());
  for (const char* address : {"dns:///host:1",
                              "dns:host:1",
                              "ipv4:1.2.3.4:1",
                              "ipv4:1.2.3.4:1,5.6.7.8:2",
                              "unix-abstract:a",
                              "unix:a",
                              "unix:///a",
                              "xds:///a",
                              "1.2.3.4",
                              "host",
                              "host:0",
                              "host:65536",
                              "host:-1",
                              "host:+1",
                              "host:1x",
                              "host:",
                              ":1",
                              "[::1]",
                              "[::1:1",
                              "::1:1",
                              "1.2.3.4:1,host:2",
                              "1.2.3.4:1/a",
                              "host%00:1",
                              "user@host:1",
                              "1.2.3:1",
                              "0x7f000001:1"}) {
    EXPECT_FALSE(peers.Check(address).ok()) << address;
  }
  EXPECT_FALSE(peers.Check(std::string("host\0:1", 7)).ok());
}

TEST(PeersTest, BadEntriesAreRefused) {
  Peers peers;
  for (const char* entry : {"", "unix:", "unix:a", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/x", "10.0.0.0:1/8",
                            "host/8", "[::1", "::/129", "a b", "host:0", "*"}) {
    EXPECT_FALSE(peers.Allow(entry).ok()) << entry;
  }
}

}  // namespace
}  // namespace kvsummary
