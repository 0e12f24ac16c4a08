#include "client/replay/trace.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxHashId = std::int64_t{1} << 40;

absl::StatusOr<std::int64_t> Number(const json& value, const std::string& field, std::int64_t low,
                                    std::int64_t high) {
  // Unsigned values beyond int64 would wrap in get<int64_t>.
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()});
  if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %s, not a whole number from %d to %d", field, value.dump(), low, high));
  }
  return value.get<std::int64_t>();
}

absl::StatusOr<std::int64_t> Field(const json& object, const std::string& field, std::int64_t low,
                                   std::int64_t high) {
  const auto it = object.find(field);
  if (it == object.end()) return absl::InvalidArgumentError(field + " is missing");
  return Number(*it, field, low, high);
}

absl::StatusOr<TraceRequest> ParseLine(const std::string& line) {
  const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return absl::InvalidArgumentError("not a JSON object");
  const auto timestamp = Field(object, "timestamp", 0, std::numeric_limits<std::int64_t>::max());
  if (!timestamp.ok()) return timestamp.status();
  const auto input = Field(object, "input_length", 1, kMaxIndex / 2);
  if (!input.ok()) return input.status();
  const auto output = Field(object, "output_length", 1, kMaxIndex / 2);
  if (!output.ok()) return output.status();

  TraceRequest request{*timestamp, static_cast<std::int32_t>(*input), static_cast<std::int32_t>(*output), {}};
  const auto ids = object.find("hash_ids");
  if (ids == object.end()) return absl::InvalidArgumentError("hash_ids is missing");
  const auto chunks = static_cast<std::size_t>((*input + kTraceChunkTokens - 1) / kTraceChunkTokens);
  if (!ids->is_array() || ids->size() != chunks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("hash_ids has %d entries, but input_length %d needs %d (one per %d tokens)",
                        ids->is_array() ? ids->size() : 0, *input, chunks, kTraceChunkTokens));
  }
  for (std::size_t i = 0; i < chunks; ++i) {
    const auto id = Number((*ids)[i], absl::StrFormat("hash_ids[%d]", i), 0, kMaxHashId);
    if (!id.ok()) return id.status();
    request.hash_ids.push_back(*id);
  }
  return request;
}

absl::Status CannotRead(const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrFormat("cannot read trace %s: %s", path, why));
}

}  // namespace

absl::StatusOr<std::vector<TraceRequest>> ReadTrace(const std::string& path, std::int64_t limit) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (type == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrFormat("cannot read trace %s: no such file", path));
  }
  if (type == std::filesystem::file_type::directory) return CannotRead(path, "it is a folder");
  errno = 0;
  std::ifstream file(path);
  if (!file) return CannotRead(path, std::strerror(errno));

  std::vector<TraceRequest> requests;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    auto request = ParseLine(line);
    if (!request.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("trace %s, line %d: %s", path, number, request.status().message()));
    }
    requests.push_back(*std::move(request));
    if (number == limit) break;
  }
  if (file.bad()) return CannotRead(path, std::strerror(errno));
  if (requests.empty()) return absl::InvalidArgumentError(absl::StrFormat("trace %s has no requests", path));
  return requests;
}

}  // namespace kvsummary
