#include "client/golden.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

namespace kvsummary {
namespace {

using Json = nlohmann::json;

std::string DataPath(const std::string& name) {
  return std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") +
         "/tests/data/golden/" + name;
}

std::string Slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::uint64_t HeaderBytes(const std::string& file) {
  std::uint64_t n = 0;
  for (int i = 7; i >= 0; --i) n = n << 8 | static_cast<std::uint8_t>(file[i]);
  return n;
}

std::string Length(std::uint64_t n) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(n >> (8 * i));
  return out;
}

class GoldenTest : public testing::Test {
 protected:
  GoldenTest() {
    char folder[] = "/tmp/kvs-XXXXXX";
    folder_ = mkdtemp(folder);
    good_ = Slurp(DataPath("verify_k9.safetensors"));
    header_ = Json::parse(good_.substr(8, HeaderBytes(good_)));
    case_ = Json::parse(header_["__metadata__"]["case"].get<std::string>());
  }
  ~GoldenTest() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<GoldenCase> ReadBytes(const std::string& bytes) {
    const std::string path = folder_ + "/case.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    return ReadGolden(path);
  }
  absl::StatusOr<GoldenCase> ReadHeader(const std::string& header) {
    return ReadBytes(Length(header.size()) + header + good_.substr(8 + HeaderBytes(good_)));
  }
  // The good file with header_ and case_ as the test left them.
  absl::StatusOr<GoldenCase> ReadChanged() {
    header_["__metadata__"]["case"] = case_.dump();
    return ReadHeader(header_.dump());
  }

  static void ExpectRefused(const absl::StatusOr<GoldenCase>& result, const std::string& reason) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(result.status().message()).find(reason), std::string::npos) << result.status();
  }

  std::string folder_;
  std::string good_;
  Json header_;
  Json case_;
};

TEST_F(GoldenTest, ReadsEveryFile) {
  struct Expected {
    const char* name;
    std::size_t steps;
  };
  for (const auto& [name, steps] : {Expected{"arithmetic", 6},
                                    {"decode_b64", 60},
                                    {"specials", 242},
                                    {"verify_k1_min_ring", 60},
                                    {"verify_k3", 60},
                                    {"verify_k9", 30}}) {
    const auto golden = ReadGolden(DataPath(std::string(name) + ".safetensors"));
    ASSERT_TRUE(golden.ok()) << golden.status();
    EXPECT_EQ(golden->name, name);
    EXPECT_EQ(golden->steps.size(), steps);
    for (const GoldenStep& step : golden->steps) EXPECT_EQ(step.backing_sha256.size(), 64u);
  }
}

TEST_F(GoldenTest, GivesTheCasesParts) {
  const auto golden = ReadChanged();
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_EQ(golden->name, "case");
  EXPECT_EQ(golden->about, "k=9: a step may close two regions");
  EXPECT_EQ(golden->block_size, 128);
  EXPECT_EQ(golden->ring_capacity, 16);
  EXPECT_EQ(golden->initial_backing.size(), 22u * 4096);
  EXPECT_EQ(golden->final_ring.size(), 128u * 512);
  const GoldenStep& step = golden->steps[0];
  EXPECT_EQ(step.kind, GoldenStep::Kind::kPrefill);
  EXPECT_EQ(step.rows, 28);
  EXPECT_EQ(step.requests(), 3);
  EXPECT_EQ(step.key.size(), 28u * 256);
  EXPECT_EQ(step.positions.size(), 28u);
  EXPECT_EQ(step.query_start_loc.back(), 28);
}

TEST_F(GoldenTest, RefusesWhatIsNoFile) {
  EXPECT_EQ(ReadGolden(folder_ + "/none").status().code(), absl::StatusCode::kNotFound);
  ExpectRefused(ReadGolden(folder_), "not a regular file");
  ExpectRefused(ReadGolden("/dev/zero"), "not a regular file");
}

TEST_F(GoldenTest, RefusesEveryTruncation) {
  ExpectRefused(ReadBytes(""), "too few for a header length");
  ExpectRefused(ReadBytes(good_.substr(0, 7)), "too few for a header length");
  ExpectRefused(ReadBytes(good_.substr(0, 8)), "exceeds the 0 bytes");
  ExpectRefused(ReadBytes(good_.substr(0, 8 + HeaderBytes(good_) - 1)), "header length");
  ExpectRefused(ReadBytes(good_.substr(0, 8 + HeaderBytes(good_))), "outside the 0 data bytes");
  ExpectRefused(ReadBytes(good_.substr(0, good_.size() - 1)), "outside");
}

TEST_F(GoldenTest, RefusesAbsurdHeaderLengths) {
  for (const std::uint64_t n :
       {~std::uint64_t{0}, ~std::uint64_t{7}, std::uint64_t{1} << 63, std::uint64_t{1} << 40}) {
    ExpectRefused(ReadBytes(Length(n) + good_.substr(8)), "header length");
  }
  ExpectRefused(ReadBytes(Length(std::uint64_t{17} << 20) + std::string(std::size_t{17} << 20, ' ')),
                "exceeds the limit");
}

TEST_F(GoldenTest, RefusesInvalidJson) {
  ExpectRefused(ReadHeader(""), "not a JSON object");
  ExpectRefused(ReadHeader("{\"a\":"), "not a JSON object");
  ExpectRefused(ReadHeader("[1]"), "not a JSON object");
  ExpectRefused(ReadHeader(std::string(1 << 20, '[')), "not a JSON object");
  ExpectRefused(ReadHeader("{\"a\":\"\xff\xfe\"}"), "not a JSON object");
  ExpectRefused(ReadHeader("{}"), "__metadata__.case");
  ExpectRefused(ReadHeader(R"({"__metadata__":3})"), "__metadata__.case");
  ExpectRefused(ReadHeader(R"({"__metadata__":{"case":3}})"), "__metadata__.case");
  ExpectRefused(ReadHeader(R"({"__metadata__":{"case":"NaN"}})"), "not a JSON object");
  ExpectRefused(ReadHeader(R"({"__metadata__":{"case":"{\"block_size\":NaN}"}})"), "not a JSON object");
  ExpectRefused(ReadHeader(R"({"__metadata__":{"case":"{}"}})"), "case.about");
}

TEST_F(GoldenTest, RefusesBadSizes) {
  const Json good = case_;
  for (const char* field : {"block_size", "blocks", "block_stride_bytes", "ring_blocks",
                            "ring_rows_per_block", "ring_capacity"}) {
    for (const Json& bad :
         {Json(nullptr), Json("64"), Json(-8), Json(0), Json(64.5), Json(1e300), Json(std::int64_t{1} << 31),
          Json(~std::uint64_t{0}), Json::array({64}), Json("\xff")}) {
      case_ = good;
      case_[field] = bad;
      header_["__metadata__"]["case"] = case_.dump(-1, ' ', false, Json::error_handler_t::replace);
      ExpectRefused(ReadHeader(header_.dump()), std::string("case.") + field + " is ");
    }
    case_ = good;
    case_.erase(field);
    ExpectRefused(ReadChanged(), std::string("case.") + field + " is missing");
  }
  case_ = good;
  case_["block_size"] = 12;
  ExpectRefused(ReadChanged(), "multiple of 8");
  case_ = good;
  case_["block_stride_bytes"] = 2048;
  ExpectRefused(ReadChanged(), "block_stride_bytes 2048");
  case_ = good;
  case_["ring_capacity"] = 17;
  ExpectRefused(ReadChanged(), "ring_capacity 17");
}

TEST_F(GoldenTest, RefusesBadSteps) {
  const Json good = case_;
  case_["steps"] = 3;
  ExpectRefused(ReadChanged(), "case.steps");
  case_ = good;
  case_["steps"][0]["kind"] = "encode";
  ExpectRefused(ReadChanged(), "case.steps[0].kind \"encode\"");
  case_ = good;
  case_["steps"][1] = nullptr;
  ExpectRefused(ReadChanged(), "case.steps[1].kind");
  case_ = good;
  case_["steps"][1]["ring_sha256"] = 3;
  ExpectRefused(ReadChanged(), "case.steps[1].ring_sha256");
  case_ = good;
  case_["steps"].push_back(good["steps"][0]);
  ExpectRefused(ReadChanged(), "tensor step030.slots is missing");
}

TEST_F(GoldenTest, RefusesEveryMissingOrMistypedTensor) {
  const Json good = header_;
  for (const char* name :
       {"initial.mean_backing", "initial.ring", "final.mean_backing", "final.ring", "step000.key",
        "step000.z", "step000.slots", "step000.positions", "step000.ring_base", "step000.query_start_loc"}) {
    header_ = good;
    header_.erase(name);
    ExpectRefused(ReadChanged(), std::string("tensor ") + name + " is missing");
    header_ = good;
    header_[name]["dtype"] = "F64";
    ExpectRefused(ReadChanged(), name);
    header_ = good;
    header_[name] = 7;
    ExpectRefused(ReadChanged(), name);
    for (const Json& shape :
         {Json(3), Json::array(), Json::array({-1}), Json::array({1e300}), Json::array({0}),
          Json::array({std::int64_t{1} << 40, 256}), Json::array({"a"})}) {
      header_ = good;
      header_[name]["shape"] = shape;
      ExpectRefused(ReadChanged(), "tensor ");
    }
  }
}

TEST_F(GoldenTest, RefusesBadOffsets) {
  const std::size_t data = good_.size() - 8 - HeaderBytes(good_);
  for (const Json& offsets :
       {Json(nullptr), Json::array({0}), Json::array({0, 1, 2}), Json::array({-1, 5}),
        Json::array({5.0, 6.0}), Json::array({90112, 0}), Json::array({data, data + 90112}),
        Json::array({0, ~std::uint64_t{0}}), Json::array({0, 90111}), Json::array({0, 0})}) {
    header_["initial.mean_backing"]["data_offsets"] = offsets;
    ExpectRefused(ReadChanged(), "tensor initial.mean_backing");
  }
}

TEST_F(GoldenTest, RefusesSizesWhoseProductOverflows) {
  // (2^31 - 1)^2 rows of 512: the product wraps round in 64 bits.
  case_["ring_blocks"] = 2147483647;
  case_["ring_rows_per_block"] = 2147483647;
  const std::int64_t rows = std::int64_t{2147483646} * 2147483647 + 16;
  for (const char* name : {"initial.ring", "final.ring"}) header_[name]["shape"] = {rows, 512};
  ExpectRefused(ReadChanged(), "tensor initial.ring holds");
}

TEST_F(GoldenTest, RefusesTensorsThatShareBytes) {
  for (const char* part : {"mean_backing", "ring"}) {
    header_[std::string("final.") + part]["data_offsets"] =
        header_[std::string("initial.") + part]["data_offsets"];
  }
  const auto initial_bytes = header_["initial.ring"]["data_offsets"][1].get<std::size_t>();
  const std::string header = header_.dump();
  ExpectRefused(
      ReadBytes(Length(header.size()) + header + good_.substr(8 + HeaderBytes(good_), initial_bytes)),
      "tensor final.mean_backing overlaps");
}

}  // namespace
}  // namespace kvsummary
