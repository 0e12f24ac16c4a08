#include "server/session/session.h"

#include <gtest/gtest.h>

#include <future>
#include <set>
#include <thread>

#include "server/error.h"

namespace kvsummary {
namespace {

class FakeBuffer final : public Buffer {
 public:
  FakeBuffer(std::int64_t bytes, std::string identity, bool* gone = nullptr)
      : Buffer(nullptr, bytes, "", std::move(identity)), gone_(gone) {}
  ~FakeBuffer() override {
    if (gone_ != nullptr) *gone_ = true;
  }

 private:
  bool* gone_;
};

std::shared_ptr<Session> MustOpen(SessionManager& sessions, const std::string& name) {
  auto session = sessions.Open(name);
  EXPECT_TRUE(session.ok()) << session.status();
  return *session;
}

TEST(Sessions, IdsAreSecretAndNumbersCountUp) {
  SessionManager sessions;
  std::set<std::string> ids;
  for (std::uint64_t i = 1; i <= 50; ++i) {
    const auto session = MustOpen(sessions, "worker");
    EXPECT_EQ(session->id().size(), kSessionIdBytes);
    EXPECT_EQ(session->number(), i);
    ids.insert(session->id());
  }
  EXPECT_EQ(ids.size(), 50u);
  EXPECT_EQ(sessions.List().front()->number(), 1u);
  EXPECT_EQ(sessions.List().back()->number(), 50u);
}

TEST(Sessions, BadNamesAndIdsAreRefused) {
  SessionManager sessions;
  EXPECT_EQ(RefusalReason(sessions.Open("").status()), "NAME_INVALID");
  EXPECT_EQ(RefusalReason(sessions.Open("a b").status()), "NAME_INVALID");
  EXPECT_EQ(RefusalReason(sessions.Find("").status()), "SESSION_REQUIRED");
  EXPECT_EQ(RefusalReason(sessions.Find(std::string(17, 'x')).status()), "SESSION_REQUIRED");
  EXPECT_EQ(RefusalReason(sessions.Find(std::string(16, 'x')).status()), "SESSION_NOT_FOUND");
}

TEST(Sessions, AreLimited) {
  SessionManager sessions;
  for (std::size_t i = 0; i < kMaxSessions; ++i) MustOpen(sessions, "s");
  EXPECT_EQ(RefusalReason(sessions.Open("s").status()), "SESSION_LIMIT");
  sessions.End(sessions.List().front());
  EXPECT_TRUE(sessions.Open("s").ok());
}

TEST(Sessions, TheLastThatEndedAreRemembered) {
  SessionManager sessions;
  const auto first = MustOpen(sessions, "s");
  EXPECT_EQ(*sessions.NumberOf(first->id()), first->number());
  sessions.End(first);
  for (std::size_t i = 0; i + 1 < kMaxSessions; ++i) sessions.End(MustOpen(sessions, "s"));
  EXPECT_EQ(*sessions.NumberOf(first->id()), first->number());
  EXPECT_EQ(RefusalReason(sessions.Find(first->id()).status()), "SESSION_ENDED");
  sessions.End(MustOpen(sessions, "s"));
  EXPECT_EQ(RefusalReason(sessions.NumberOf(first->id()).status()), "SESSION_NOT_FOUND");
  EXPECT_EQ(RefusalReason(sessions.Find(first->id()).status()), "SESSION_NOT_FOUND");
  EXPECT_EQ(RefusalReason(sessions.NumberOf("short").status()), "SESSION_REQUIRED");
}

TEST(Sessions, EndFreesEverythingOnce) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  bool gone = false;
  const auto id = session->ReserveBuffer();
  ASSERT_TRUE(id.ok());
  ASSERT_TRUE(session->FillBuffer(*id, std::make_shared<FakeBuffer>(8, "", &gone)).ok());
  int told = 0;
  session->OnEnd(&told, [&] { ++told; });
  sessions.End(session);
  sessions.End(session);
  EXPECT_TRUE(gone);
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(session->ended());
  EXPECT_TRUE(sessions.List().empty());
  EXPECT_EQ(RefusalReason(sessions.Find(session->id()).status()), "SESSION_ENDED");
  EXPECT_EQ(RefusalReason(session->FindBuffer(*id).status()), "SESSION_ENDED");
  EXPECT_EQ(RefusalReason(session->ReserveBuffer().status()), "SESSION_ENDED");
  EXPECT_EQ(RefusalReason(session->FillBuffer(*id, std::make_shared<FakeBuffer>(8, ""))), "SESSION_ENDED");
  session->OnEnd(&sessions, [&] { ++told; });  // at once
  EXPECT_EQ(told, 2);
}

TEST(Sessions, AListenerMayUseTheSessionAndForgetItself) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  bool refused = false;
  session->OnEnd(&refused, [&] {
    refused = !session->ReserveBuffer().ok();
    session->Forget(&refused);
  });
  sessions.End(session);
  EXPECT_TRUE(refused);
}

TEST(Sessions, ForgetWaitsForTheListenerThatIsBeingCalled) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  std::promise<void> entered;
  std::promise<void> release;
  bool left = false;
  session->OnEnd(&left, [&] {
    entered.set_value();
    release.get_future().wait();
    left = true;
  });
  std::thread ending([&] { sessions.End(session); });
  entered.get_future().wait();
  auto forgotten = std::async(std::launch::async, [&] {
    session->Forget(&left);
    return left;
  });
  release.set_value();
  EXPECT_TRUE(forgotten.get());
  ending.join();
}

TEST(Sessions, AForgottenListenerIsNotCalled) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  int told = 0;
  session->OnEnd(&told, [&] { ++told; });
  session->Forget(&told);
  sessions.End(session);
  EXPECT_EQ(told, 0);
}

TEST(Buffers, AreFoundOnlyOnceFilledAndOnlyInTheirSession) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  const auto other = MustOpen(sessions, "b");
  const auto id = session->ReserveBuffer();
  ASSERT_TRUE(id.ok());
  EXPECT_NE(*id, 0u);
  EXPECT_EQ(RefusalReason(session->FindBuffer(*id).status()), "BUFFER_NOT_READY");
  const auto buffer = std::make_shared<FakeBuffer>(8, "m");
  ASSERT_TRUE(session->FillBuffer(*id, buffer).ok());
  EXPECT_EQ(*session->FindBuffer(*id), buffer);
  EXPECT_EQ(RefusalReason(other->FindBuffer(*id).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(RefusalReason(session->FindBuffer(*id + 1).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(session->buffer_totals().count, 1);
  EXPECT_EQ(session->buffer_totals().bytes, 8);
}

TEST(Buffers, TheSameMemoryTwiceIsRefusedAndItsIdForgotten) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  const auto first = *session->ReserveBuffer();
  const auto second = *session->ReserveBuffer();
  ASSERT_TRUE(session->FillBuffer(first, std::make_shared<FakeBuffer>(8, "m")).ok());
  EXPECT_EQ(RefusalReason(session->FillBuffer(second, std::make_shared<FakeBuffer>(8, "m"))),
            "BUFFER_REGISTERED");
  EXPECT_EQ(RefusalReason(session->FindBuffer(second).status()), "BUFFER_NOT_FOUND");
  EXPECT_TRUE(session->FindBuffer(first).ok());
}

TEST(Buffers, AreLimited) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  for (std::size_t i = 0; i < kMaxSessionBuffers; ++i) ASSERT_TRUE(session->ReserveBuffer().ok());
  EXPECT_EQ(RefusalReason(session->ReserveBuffer().status()), "SESSION_LIMIT");
  ASSERT_TRUE(session->RemoveBuffer(1).ok());
  EXPECT_TRUE(session->ReserveBuffer().ok());
}

TEST(Buffers, TheLastUserOfARemovedOneSaysThatItIsUnmapped) {
  SessionManager sessions;
  const auto session = MustOpen(sessions, "a");
  const auto id = *session->ReserveBuffer();
  bool gone = false;
  bool told_after = false;
  ASSERT_TRUE(session->FillBuffer(id, std::make_shared<FakeBuffer>(8, "m", &gone)).ok());
  auto user = *session->FindBuffer(id);
  {
    auto removed = *session->RemoveBuffer(id);
    removed->OnUnmapped([&] { told_after = gone; });
  }
  EXPECT_EQ(RefusalReason(session->RemoveBuffer(id).status()), "BUFFER_NOT_FOUND");
  EXPECT_FALSE(told_after);
  user.reset();
  EXPECT_TRUE(told_after);
}

}  // namespace
}  // namespace kvsummary
