#include "client/status.h"

#include <grpcpp/support/status.h>

#include "client/client.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

grpc::Status Refusal() {
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  info.set_domain("kvsummary");
  info.set_reason("SLOT_OUT_OF_RANGE");
  status.add_details()->PackFrom(info);
  google::rpc::BadRequest request;
  request.add_field_violations()->set_field("slots[3]");
  status.add_details()->PackFrom(request);
  google::rpc::QuotaFailure quota;
  quota.add_violations()->set_subject("host");
  status.add_details()->PackFrom(quota);
  return grpc::Status(grpc::INVALID_ARGUMENT, "slot 99 is beyond the cache", status.SerializeAsString());
}

TEST(FromGrpc, KeepsCodeAndMessage) {
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status = FromGrpc(grpc::Status(static_cast<grpc::StatusCode>(code), "why"));
    EXPECT_EQ(static_cast<int>(status.code()), code);
    EXPECT_EQ(status.message(), "why");
    EXPECT_EQ(ReasonOf(status), "");
    EXPECT_EQ(FieldOf(status), "");
  }
}

TEST(FromGrpc, MakesEveryDetailAPayload) {
  const absl::Status status = FromGrpc(Refusal());
  EXPECT_EQ(ReasonOf(status), "SLOT_OUT_OF_RANGE");
  EXPECT_EQ(FieldOf(status), "slots[3]");
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.QuotaFailure");
  ASSERT_TRUE(payload.has_value());
  google::rpc::QuotaFailure quota;
  ASSERT_TRUE(quota.ParseFromString(std::string(*payload)));
  EXPECT_EQ(quota.violations(0).subject(), "host");
}

TEST(FromGrpc, DropsDetailsThatDoNotParse) {
  const absl::Status status = FromGrpc(grpc::Status(grpc::INTERNAL, "why", "\xff\xff no message"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "why");
  EXPECT_EQ(ReasonOf(status), "");
}

TEST(MakeError, ReadsLikeAnErrorOfTheDaemon) {
  const auto status = MakeError(absl::StatusCode::kInvalidArgument, "too short", "SIZE_MISMATCH", "rows");
  EXPECT_EQ(ReasonOf(status), "SIZE_MISMATCH");
  EXPECT_EQ(FieldOf(status), "rows");
  EXPECT_EQ(status.message(), "too short");
}

TEST(Describe, NamesCodeReasonAndField) {
  EXPECT_EQ(Describe(FromGrpc(Refusal())),
            "INVALID_ARGUMENT: slot 99 is beyond the cache (reason SLOT_OUT_OF_RANGE, field slots[3])");
  EXPECT_EQ(Describe(absl::UnavailableError("gone")), "UNAVAILABLE: gone");
}

}  // namespace
}  // namespace kvsummary
