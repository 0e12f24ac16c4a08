#include "server/device/open_once.h"

#include <gtest/gtest.h>

namespace kvsummary {
namespace {

struct Counted {
  explicit Counted(int* open) : count(open) { ++*count; }
  ~Counted() { --*count; }
  int* const count;
};

class OpenOnceTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<Counted>> Get(const std::string& key) {
    return opened_->Get(key, [this]() -> absl::StatusOr<std::unique_ptr<Counted>> {
      ++opens_;
      return std::make_unique<Counted>(&open_);
    });
  }

  std::unique_ptr<OpenOnce<Counted>> opened_ = std::make_unique<OpenOnce<Counted>>();
  int opens_ = 0;
  int open_ = 0;
};

TEST_F(OpenOnceTest, AKeyIsOpenOnceAndClosedWithItsLastUse) {
  auto first = *Get("a");
  auto second = *Get("a");
  auto other = *Get("b");
  EXPECT_EQ(first, second);
  EXPECT_NE(first, other);
  EXPECT_EQ(opens_, 2);
  first.reset();
  EXPECT_EQ(open_, 2);
  second.reset();
  EXPECT_EQ(open_, 1);
  EXPECT_EQ(opened_->size(), 1u);
}

TEST_F(OpenOnceTest, AClosedKeyIsOpenedAnew) {
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(Get("a").ok());
    EXPECT_EQ(opens_, i);
    EXPECT_EQ(open_, 0);
  }
}

TEST_F(OpenOnceTest, WhatDoesNotOpenIsNotRemembered) {
  const auto refused = opened_->Get(
      "a", []() -> absl::StatusOr<std::unique_ptr<Counted>> { return absl::NotFoundError("no such thing"); });
  EXPECT_TRUE(absl::IsNotFound(refused.status()));
  EXPECT_EQ(opened_->size(), 0u);
  EXPECT_TRUE(Get("a").ok());
}

TEST_F(OpenOnceTest, MayEndBeforeWhatIsOpen) {
  auto first = *Get("a");
  opened_.reset();
  EXPECT_EQ(open_, 1);
  first.reset();
  EXPECT_EQ(open_, 0);
}

}  // namespace
}  // namespace kvsummary
