#include "client/golden.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxFileBytes = std::int64_t{1} << 30;
constexpr std::uint64_t kMaxHeaderBytes = 16 << 20;
constexpr std::int64_t kLengthBytes = 8;  // of the header length that a file starts with
constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kChannelsOfRow = 256;

// Values and arrays of one file by name. The first failure is kept and everything after it is a no-op,
// so that the caller states what it wants in order and asks for the status once.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  absl::Status Open() {
    std::error_code error;
    const auto type = std::filesystem::status(path_, error).type();
    if (type == std::filesystem::file_type::not_found) {
      return absl::NotFoundError(absl::StrCat("golden file ", path_, " does not exist"));
    }
    if (type != std::filesystem::file_type::regular) return Fail("not a regular file");
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path_, error));
    if (error) return Fail(absl::StrCat("cannot read: ", error.message()));
    if (size > kMaxFileBytes) {
      return Fail(absl::StrFormat("file of %d bytes, the limit is %d", size, kMaxFileBytes));
    }
    if (size < kLengthBytes) return Fail(absl::StrFormat("%d bytes are too few for a header length", size));
    bytes_.resize(static_cast<std::size_t>(size));
    std::ifstream in(path_, std::ios::binary);
    if (!in.read(reinterpret_cast<char*>(bytes_.data()), size)) return Fail("cannot read");

    std::uint64_t header_bytes = 0;
    for (int i = kLengthBytes - 1; i >= 0; --i) header_bytes = header_bytes << 8 | bytes_[i];
    const auto room = static_cast<std::uint64_t>(size - kLengthBytes);
    if (header_bytes > room) {
      return Fail(absl::StrFormat("header length %d exceeds the %d bytes that follow", header_bytes, room));
    }
    if (header_bytes > kMaxHeaderBytes) {
      return Fail(absl::StrFormat("header length %d exceeds the limit of %d", header_bytes, kMaxHeaderBytes));
    }
    const std::uint8_t* begin = bytes_.data() + kLengthBytes;
    tensors_ = Json::parse(begin, begin + header_bytes, nullptr, /*allow_exceptions=*/false);
    if (!tensors_.is_object()) return Fail("header is not a JSON object");
    data_ = std::span<const std::uint8_t>(bytes_).subspan(kLengthBytes + header_bytes);

    const Json* metadata = Find(tensors_, "__metadata__");
    const Json* text = metadata != nullptr ? Find(*metadata, "case") : nullptr;
    if (text == nullptr || !text->is_string()) return Fail("header has no text __metadata__.case");
    case_ = Json::parse(text->get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
    if (!case_.is_object()) return Fail("__metadata__.case is not a JSON object");
    return absl::OkStatus();
  }

  const Json& header_case() const { return case_; }
  const absl::Status& status() const { return status_; }

  const absl::Status& Fail(const std::string& reason) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("golden file ", path_, ": ", reason));
    return status_;
  }

  static const Json* Find(const Json& object, const char* field) {
    if (!object.is_object()) return nullptr;
    const auto it = object.find(field);
    return it != object.end() ? &*it : nullptr;
  }

  std::string Text(const Json& object, const std::string& where, const char* field) {
    const Json* value = Find(object, field);
    if (value == nullptr || !value->is_string()) {
      Fail(absl::StrCat(where, field, " is missing or not a text"));
      return {};
    }
    return value->get<std::string>();
  }

  // A whole number in [least, kMaxSize].
  std::int64_t Size(const char* field, std::int64_t least) {
    const Json* value = Find(case_, field);
    if (value != nullptr && value->is_number_unsigned()) {
      const auto n = value->get<std::uint64_t>();
      if (n >= static_cast<std::uint64_t>(least) && n <= static_cast<std::uint64_t>(kMaxSize)) {
        return static_cast<std::int64_t>(n);
      }
    }
    Fail(absl::StrFormat(
        "case.%s is %s, not a whole number from %d to %d", field,
        value != nullptr ? value->dump(-1, ' ', false, Json::error_handler_t::replace) : "missing", least,
        kMaxSize));
    return least;
  }

  // Length of a one-dimensional tensor, or of the first dimension of any.
  std::int64_t Length(const std::string& name) {
    const Json* tensor = Tensor(name);
    const Json* shape = tensor != nullptr ? Find(*tensor, "shape") : nullptr;
    if (shape == nullptr || !shape->is_array() || shape->empty() || !shape->front().is_number_unsigned() ||
        shape->front().get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxSize)) {
      Fail(absl::StrCat("tensor ", name, " is missing or has no length"));
      return 0;
    }
    return shape->front().get<std::int64_t>();
  }

  template <class T>
  std::vector<T> Array(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape) {
    if (!status_.ok()) return {};
    const Json* tensor = Tensor(name);
    if (tensor == nullptr) {
      Fail(absl::StrCat("tensor ", name, " is missing"));
      return {};
    }
    const Json* type = Find(*tensor, "dtype");
    const Json* dims = Find(*tensor, "shape");
    if (type == nullptr || *type != dtype || dims == nullptr || *dims != Json(shape)) {
      Fail(absl::StrFormat("tensor %s is not %s %s", name, dtype, Json(shape).dump()));
      return {};
    }
    const Json* offsets = Find(*tensor, "data_offsets");
    if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2 ||
        !(*offsets)[0].is_number_unsigned() || !(*offsets)[1].is_number_unsigned()) {
      Fail(absl::StrCat("tensor ", name, " has no data_offsets"));
      return {};
    }
    const auto begin = (*offsets)[0].get<std::uint64_t>();
    const auto end = (*offsets)[1].get<std::uint64_t>();
    if (begin > end || end > data_.size()) {
      Fail(absl::StrFormat("tensor %s: data_offsets [%d, %d] are outside the %d data bytes", name, begin, end,
                           data_.size()));
      return {};
    }
    std::uint64_t bytes = sizeof(T);
    bool fits = true;
    for (const std::int64_t n : shape) fits = fits && !__builtin_mul_overflow(bytes, n, &bytes);
    if (!fits || bytes != end - begin) {
      Fail(absl::StrFormat("tensor %s holds %d bytes, not %s of %d bytes each", name, end - begin,
                           Json(shape).dump(), sizeof(T)));
      return {};
    }
    // No file needs more; one whose tensors share bytes could ask for any amount of memory.
    if (bytes > data_.size() - used_) {
      Fail(absl::StrCat("tensor ", name, " overlaps others"));
      return {};
    }
    used_ += bytes;
    std::vector<T> out(bytes / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), data_.data() + begin, bytes);
    return out;
  }

 private:
  const Json* Tensor(const std::string& name) const { return Find(tensors_, name.c_str()); }

  const std::string path_;
  absl::Status status_;
  std::vector<std::uint8_t> bytes_;
  std::span<const std::uint8_t> data_;  // in bytes_
  std::size_t used_ = 0;                // bytes of data_ that arrays were made from
  Json tensors_;
  Json case_;
};

void ReadGeometry(Reader& reader, GoldenCase& out) {
  out.about = reader.Text(reader.header_case(), "case.", "about");
  out.block_size = static_cast<std::int32_t>(reader.Size("block_size", 8));
  out.blocks = reader.Size("blocks", 1);
  out.block_stride_bytes = reader.Size("block_stride_bytes", 1);
  out.ring_blocks = reader.Size("ring_blocks", 1);
  out.ring_rows_per_block = reader.Size("ring_rows_per_block", 1);
  out.ring_capacity = static_cast<std::int32_t>(reader.Size("ring_capacity", 1));
  if (out.block_size % 8 != 0) {
    reader.Fail(absl::StrFormat("case.block_size %d is not a multiple of 8", out.block_size));
  }
  if (out.block_stride_bytes < out.page_bytes()) {
    reader.Fail(absl::StrFormat("case.block_stride_bytes %d is below the %d bytes of a block",
                                out.block_stride_bytes, out.page_bytes()));
  }
  if (out.ring_capacity > out.ring_rows_per_block) {
    reader.Fail(absl::StrFormat("case.ring_capacity %d exceeds ring_rows_per_block %d", out.ring_capacity,
                                out.ring_rows_per_block));
  }
}

GoldenStep ReadStep(Reader& reader, const Json& json, std::size_t index) {
  const std::string name = absl::StrFormat("step%03d.", index);
  const std::string where = absl::StrFormat("case.steps[%d].", index);
  GoldenStep step;
  const std::string kind = reader.Text(json, where, "kind");
  if (kind == "decode") {
    step.kind = GoldenStep::Kind::kDecode;
  } else if (kind == "verify") {
    step.kind = GoldenStep::Kind::kVerify;
  } else if (kind == "prefill") {
    step.kind = GoldenStep::Kind::kPrefill;
  } else {
    reader.Fail(absl::StrFormat("%skind \"%s\" is unknown", where, kind));
  }
  step.mean_sha256 = reader.Text(json, where, "mean_sha256");
  step.backing_sha256 = reader.Text(json, where, "backing_sha256");
  step.ring_sha256 = reader.Text(json, where, "ring_sha256");
  step.rows = reader.Length(name + "slots");
  step.key = reader.Array<std::uint16_t>(name + "key", "BF16", {step.rows, kChannelsOfRow});
  step.z = reader.Array<std::uint16_t>(name + "z", "BF16", {step.rows, kChannelsOfRow});
  step.slots = reader.Array<std::int64_t>(name + "slots", "I64", {step.rows});
  step.ring_bases = reader.Array<std::int64_t>(name + "ring_base", "I64", {step.rows});
  if (step.kind != GoldenStep::Kind::kVerify) {
    step.positions = reader.Array<std::int64_t>(name + "positions", "I64", {step.rows});
  }
  if (step.kind != GoldenStep::Kind::kDecode) {
    const std::int64_t entries = reader.Length(name + "query_start_loc");
    if (entries < 1) reader.Fail(absl::StrCat("tensor ", name, "query_start_loc is empty"));
    step.query_start_loc = reader.Array<std::int32_t>(name + "query_start_loc", "I32", {entries});
  }
  if (step.kind == GoldenStep::Kind::kVerify) {
    step.seq_lens = reader.Array<std::int32_t>(name + "seq_lens", "I32", {step.requests()});
  }
  return step;
}

}  // namespace

const char* GoldenKindName(GoldenStep::Kind kind) {
  switch (kind) {
    case GoldenStep::Kind::kDecode:
      return "decode";
    case GoldenStep::Kind::kVerify:
      return "verify";
    case GoldenStep::Kind::kPrefill:
      return "prefill";
  }
  return "";
}

absl::StatusOr<GoldenCase> ReadGolden(const std::string& path) {
  Reader reader(path);
  if (absl::Status status = reader.Open(); !status.ok()) return status;
  GoldenCase out;
  out.name = std::filesystem::path(path).stem().string();
  ReadGeometry(reader, out);
  const std::int64_t backing = out.blocks * out.block_stride_bytes;
  out.initial_backing = reader.Array<std::uint8_t>("initial.mean_backing", "U8", {backing});
  out.initial_ring =
      reader.Array<std::uint16_t>("initial.ring", "BF16", {out.ring_rows(), 2 * kChannelsOfRow});
  out.final_backing = reader.Array<std::uint8_t>("final.mean_backing", "U8", {backing});
  out.final_ring = reader.Array<std::uint16_t>("final.ring", "BF16", {out.ring_rows(), 2 * kChannelsOfRow});
  const Json* steps = Reader::Find(reader.header_case(), "steps");
  if (steps == nullptr || !steps->is_array()) return reader.Fail("case.steps is missing or not a list");
  for (std::size_t i = 0; i < steps->size() && reader.status().ok(); ++i) {
    out.steps.push_back(ReadStep(reader, (*steps)[i], i));
  }
  if (!reader.status().ok()) return reader.status();
  return out;
}

}  // namespace kvsummary
