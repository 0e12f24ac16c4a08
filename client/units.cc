#include "client/units.h"

#include <charconv>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

struct Unit {
  const char* name;
  std::int64_t bytes;
};

constexpr Unit kUnits[] = {
    {"", 1},
    {"b", 1},
    {"kib", std::int64_t{1} << 10},
    {"mib", std::int64_t{1} << 20},
    {"gib", std::int64_t{1} << 30},
    {"tib", std::int64_t{1} << 40},
    {"kb", 1'000},
    {"mb", 1'000'000},
    {"gb", 1'000'000'000},
    {"tb", 1'000'000'000'000},
};

}  // namespace

absl::StatusOr<std::int64_t> ParseBytes(std::string_view text) {
  const std::string quoted = absl::StrCat("\"", std::string(text), "\"");
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) {
    return absl::InvalidArgumentError(quoted + ": more than 2^63 - 1 bytes");
  }
  if (error != std::errc() || number < 0) {
    return absl::InvalidArgumentError(quoted + ": not a size such as 4096, 64KiB or 8GiB");
  }
  const std::string suffix(text.substr(static_cast<std::size_t>(end - text.data())));
  const std::string unit = absl::AsciiStrToLower(absl::StripLeadingAsciiWhitespace(suffix));
  for (const Unit& u : kUnits) {
    if (unit != u.name) continue;
    if (number > std::numeric_limits<std::int64_t>::max() / u.bytes) {
      return absl::InvalidArgumentError(quoted + ": more than 2^63 - 1 bytes");
    }
    return number * u.bytes;
  }
  return absl::InvalidArgumentError(quoted +
                                    ": unknown unit; known are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB");
}

std::string FormatBytes(std::int64_t bytes) {
  static constexpr const char* kNames[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kNames[unit]);
}

}  // namespace kvsummary
