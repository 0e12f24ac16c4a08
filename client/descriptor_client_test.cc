#include "client/descriptor_client.h"

#include <sys/stat.h>

#include <cstring>

#include "client/fake_descriptor_socket.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

constexpr std::uint8_t kTicket[kTicketBytes] = {1, 2, 3};

PlainStatus RedeemFrom(const FakeAnswer& answer, Redeemed* redeemed) {
  FakeDescriptorSocket daemon([&](const DescriptorRequest&, const OwnedDescriptor&) { return answer; });
  return RedeemTicket(daemon.path(), kTicket, OpenSelfPidfd().get(), redeemed);
}

TEST(DescriptorClientTest, SendsTheTicketWithADescriptorAndGetsOne) {
  const OwnedDescriptor memfd = MakeMemfd(4096);
  bool ticket_came = false;
  bool descriptor_came = false;
  FakeDescriptorSocket daemon([&](const DescriptorRequest& request, const OwnedDescriptor& descriptor) {
    ticket_came = std::memcmp(request.ticket, kTicket, kTicketBytes) == 0;
    descriptor_came = descriptor.valid();
    return FakeAnswer{.reply = {.size_bytes = 4096}, .descriptors = {memfd.get()}};
  });
  Redeemed redeemed;
  const auto status = RedeemTicket(daemon.path(), kTicket, OpenSelfPidfd().get(), &redeemed);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_TRUE(ticket_came);
  EXPECT_TRUE(descriptor_came);
  EXPECT_EQ(redeemed.size_bytes, 4096);
  struct stat sent = {}, received = {};
  fstat(memfd.get(), &sent);
  fstat(redeemed.descriptor.get(), &received);
  EXPECT_EQ(sent.st_ino, received.st_ino);
}

TEST(DescriptorClientTest, AnAnswerMayBringNoDescriptor) {
  Redeemed redeemed;
  EXPECT_TRUE(RedeemFrom({}, &redeemed).ok());
  EXPECT_FALSE(redeemed.descriptor.valid());
}

TEST(DescriptorClientTest, ARefusalHasTheDaemonsCodeAndReason) {
  FakeAnswer refusal;
  refusal.reply.code = 5;
  std::strcpy(refusal.reply.reason, "TICKET_UNKNOWN");
  Redeemed redeemed;
  const auto status = RedeemFrom(refusal, &redeemed);
  EXPECT_EQ(status.code, 5);
  EXPECT_EQ(status.reason, "TICKET_UNKNOWN");
}

TEST(DescriptorClientTest, AReasonWithoutAnEndIsCut) {
  FakeAnswer refusal;
  refusal.reply.code = 5;
  std::memset(refusal.reply.reason, 'X', sizeof(refusal.reply.reason));
  Redeemed redeemed;
  EXPECT_EQ(RedeemFrom(refusal, &redeemed).reason.size(), std::size_t{kDescriptorReasonBytes});
}

TEST(DescriptorClientTest, ATruncatedAnswerIsRefused) {
  Redeemed redeemed;
  EXPECT_EQ(RedeemFrom({.reply = {}, .bytes = 79}, &redeemed).code, kPlainInternal);
}

TEST(DescriptorClientTest, AnAnswerOfAnotherProtocolIsRefused) {
  Redeemed redeemed;
  EXPECT_EQ(RedeemFrom({.reply = {.magic = 7}}, &redeemed).code, kPlainInternal);
}

TEST(DescriptorClientTest, SurplusDescriptorsAreRefusedAndClosed) {
  const OwnedDescriptor memfd = MakeMemfd(1);
  Redeemed redeemed;
  const int before = OwnedDescriptor(dup(0)).get();
  const auto status =
      RedeemFrom({.reply = {}, .descriptors = {memfd.get(), memfd.get(), memfd.get()}}, &redeemed);
  EXPECT_EQ(status.code, kPlainInternal);
  EXPECT_EQ(OwnedDescriptor(dup(0)).get(), before) << "a descriptor is left open";
}

TEST(DescriptorClientTest, ADaemonThatHangsUpIsUnavailable) {
  Redeemed redeemed;
  EXPECT_EQ(RedeemFrom({.reply = {}, .bytes = 0}, &redeemed).code, kPlainUnavailable);
}

TEST(DescriptorClientTest, NobodyAtThePathIsUnavailable) {
  Redeemed redeemed;
  EXPECT_EQ(RedeemTicket("/tmp/kvs-nobody/fd", kTicket, 0, &redeemed).code, kPlainUnavailable);
  EXPECT_EQ(RedeemTicket("", kTicket, 0, &redeemed).code, kPlainInvalidArgument);
  EXPECT_EQ(RedeemTicket(std::string(200, 'x'), kTicket, 0, &redeemed).code, kPlainInvalidArgument);
}

}  // namespace
}  // namespace kvsummary
