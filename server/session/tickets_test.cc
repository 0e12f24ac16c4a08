#include "server/session/tickets.h"

#include <gtest/gtest.h>

#include "proto/descriptor_socket.h"
#include "server/error.h"

namespace kvsummary {
namespace {

class TicketsTest : public ::testing::Test {
 protected:
  Tickets::Purpose Answering(std::int64_t bytes) {
    return [bytes](Descriptor) -> absl::StatusOr<DescriptorAnswer> {
      DescriptorAnswer answer;
      answer.size_bytes = bytes;
      return answer;
    };
  }
  std::string Issue(std::int64_t bytes) {
    auto ticket = tickets_.Issue(session_, Answering(bytes));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return *ticket;
  }
  std::string Refused(const std::string& ticket) {
    return RefusalReason(tickets_.Redeem(ticket, Descriptor()).status());
  }

  Tickets tickets_;
  SessionManager sessions_;
  std::shared_ptr<Session> session_ = *sessions_.Open("a");
};

TEST_F(TicketsTest, AreGoodForOneUse) {
  const auto ticket = Issue(7);
  EXPECT_EQ(ticket.size(), static_cast<std::size_t>(kTicketBytes));
  EXPECT_NE(ticket, Issue(8));
  EXPECT_EQ(tickets_.Count(session_->number()), 2);
  const auto answer = tickets_.Redeem(ticket, Descriptor());
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->size_bytes, 7);
  EXPECT_EQ(tickets_.Count(session_->number()), 1);
  EXPECT_EQ(Refused(ticket), "TICKET_UNKNOWN");
}

TEST_F(TicketsTest, UnknownOnesAreRefused) { EXPECT_EQ(Refused(std::string(32, 'x')), "TICKET_UNKNOWN"); }

TEST_F(TicketsTest, EndWithTheirSession) {
  const auto ticket = Issue(7);
  auto other = *sessions_.Open("b");
  const auto others = tickets_.Issue(other, Answering(9));
  sessions_.End(session_);
  EXPECT_EQ(Refused(ticket), "TICKET_UNKNOWN");
  EXPECT_EQ(tickets_.Count(session_->number()), 0);
  EXPECT_TRUE(tickets_.Redeem(*others, Descriptor()).ok());
}

TEST_F(TicketsTest, NoneAfterTheEndOfTheSession) {
  sessions_.End(session_);
  EXPECT_EQ(RefusalReason(tickets_.Issue(session_, Answering(1)).status()), "SESSION_ENDED");
  EXPECT_EQ(tickets_.Count(session_->number()), 0);
}

TEST_F(TicketsTest, AreLimitedPerSession) {
  std::string last;
  for (std::size_t i = 0; i < kMaxSessionTickets; ++i) last = Issue(1);
  EXPECT_EQ(RefusalReason(tickets_.Issue(session_, Answering(1)).status()), "SESSION_LIMIT");
  auto other = *sessions_.Open("b");
  EXPECT_TRUE(tickets_.Issue(other, Answering(1)).ok());
  EXPECT_TRUE(tickets_.Redeem(last, Descriptor()).ok());
  Issue(1);
}

}  // namespace
}  // namespace kvsummary
