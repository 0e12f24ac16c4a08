#include "client/replay/trace.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvsummary {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class TraceTest : public testing::Test {
 protected:
  TraceTest() {
    char folder[] = "/tmp/kvs-XXXXXX";
    folder_ = mkdtemp(folder);
    path_ = folder_ + "/trace.jsonl";
  }
  ~TraceTest() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::vector<TraceRequest>> Read(const std::string& text, std::int64_t limit = 0) {
    std::ofstream(path_) << text;
    return ReadTrace(path_, limit);
  }
  // The error of a trace whose second line is `line`.
  std::string ErrorOf(const std::string& line) {
    const auto trace = Read(kGood + line + "\n");
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument) << line;
    const std::string message(trace.status().message());
    EXPECT_THAT(message, HasSubstr(path_ + ", line 2: "));
    return message;
  }

  const std::string kGood =
      R"({"timestamp": 27, "input_length": 513, "output_length": 4, "hash_ids": [0, 7]})"
      "\n";
  std::string folder_, path_;
};

TEST_F(TraceTest, ReadsRequests) {
  const auto trace = Read(kGood + R"({"timestamp":28,"input_length":512,"output_length":1,"hash_ids":[9]})");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 2U);
  EXPECT_EQ((*trace)[0].timestamp_ms, 27);
  EXPECT_EQ((*trace)[0].input_length, 513);
  EXPECT_EQ((*trace)[0].output_length, 4);
  EXPECT_THAT((*trace)[0].hash_ids, ElementsAre(0, 7));
  EXPECT_THAT((*trace)[1].hash_ids, ElementsAre(9));
}

TEST_F(TraceTest, LimitEndsBeforeWhatFollows) {
  const auto trace = Read(kGood + "not read\n", 1);
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->size(), 1U);
}

TEST_F(TraceTest, UnreadableFilesAreNamed) {
  EXPECT_EQ(ReadTrace(path_, 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadTrace(path_, 0).status().message()), HasSubstr(path_));
  EXPECT_EQ(ReadTrace(folder_, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Read("").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TraceTest, BadLinesAreNamed) {
  EXPECT_THAT(ErrorOf("{\"timestamp\": 1"), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf("[1, 2]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "output_length": 1, "hash_ids": [1]})"),
              HasSubstr("input_length is missing"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 1, "output_length": 1})"),
              HasSubstr("hash_ids is missing"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": -3, "output_length": 1, "hash_ids": [1]})"),
              HasSubstr("input_length is -3"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": -1, "input_length": 3, "output_length": 1, "hash_ids": [1]})"),
              HasSubstr("timestamp is -1"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 1, "output_length": 0, "hash_ids": [1]})"),
              HasSubstr("output_length is 0"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 1.5, "output_length": 1, "hash_ids": [1]})"),
              HasSubstr("input_length is 1.5"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 18446744073709551615, "input_length": 1})"),
              HasSubstr("timestamp is 18446744073709551615"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]})"),
              HasSubstr("hash_ids has 1 entries, but input_length 513 needs 2"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]})"),
              HasSubstr("hash_ids has 2 entries"));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1, "x"]})"),
              HasSubstr("hash_ids[1] is \"x\""));
  EXPECT_THAT(ErrorOf(R"({"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1, -2]})"),
              HasSubstr("hash_ids[1] is -2"));
}

}  // namespace
}  // namespace kvsummary
