#include "server/rpc/pull_link.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "server/error.h"

namespace kvsummary {
namespace {

// Nobody is there.
constexpr char kAddress[] = "unix:/tmp/kvs-no-daemon/socket";

TEST(PullLinkTest, OneThatIsClosedPullsNothing) {
  Stats stats;
  for (const bool idle : {false, true}) {
    const auto link =
        std::make_shared<PullLink>(kAddress, PullLinks::Options(), grpc::InsecureChannelCredentials(), stats);
    if (idle) {
      EXPECT_TRUE(link->CloseIfIdle());
    } else {
      link->Close();
    }
    EXPECT_EQ(link->Pull("secret", "transfer", nullptr), nullptr);
    EXPECT_TRUE(link->closed());
  }
}

TEST(PullLinkTest, LinksThatAreClosedRefuseByName) {
  Stats stats;
  PullLinks links({}, stats);
  links.Close();
  const auto pulling = links.Pull(kAddress, "secret", "transfer", nullptr);
  EXPECT_EQ(RefusalReason(pulling.status()), "PEER_UNREACHABLE");
}

}  // namespace
}  // namespace kvsummary
