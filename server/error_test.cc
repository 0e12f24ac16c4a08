#include "server/error.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kvsummary/v1/errors.pb.h"

namespace kvsummary {
namespace {

TEST(Reasons, AreExactlyTheDocumentedOnes) {
  std::set<std::string> ours;
#define X(name, code) ours.insert("ERROR_REASON_" #name);
  KVSUMMARY_REASONS(X)
#undef X
  std::set<std::string> documented;
  const auto* descriptor = v1::ErrorReason_descriptor();
  for (int i = 1; i < descriptor->value_count(); ++i) documented.insert(descriptor->value(i)->name());
  EXPECT_EQ(ours, documented);
}

TEST(Refuse, CarriesCodeReasonAndField) {
  const auto status = Refuse(Reason::SLOT_OUT_OF_RANGE, "slots[3]", "too far");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "too far");
  EXPECT_EQ(RefusalReason(status), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(RefusalField(status), "slots[3]");
}

TEST(Refuse, OtherStatusesHaveNoReason) {
  EXPECT_EQ(RefusalReason(absl::InternalError("x")), "");
  EXPECT_EQ(RefusalField(absl::OkStatus()), "");
}

}  // namespace
}  // namespace kvsummary
