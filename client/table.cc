#include "client/table.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_format.h"

namespace kvsummary {

std::string Grouped(std::int64_t value) {
  std::string text = absl::StrFormat("%d", value);
  for (auto i = static_cast<std::ptrdiff_t>(text.size()) - 3; i > 0; i -= 3) {
    text.insert(text.begin() + i, ',');
  }
  return text;
}

std::string TableLine(const std::string& name, const std::string& value) {
  return absl::StrFormat("  %-28s%20s\n", name, value);
}

std::string TableLine(const std::string& name, std::int64_t value) { return TableLine(name, Grouped(value)); }

double Percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const auto nth =
      values.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

std::string LatencyLine(const std::string& name, const std::vector<double>& us) {
  if (us.empty()) return "";
  return absl::StrFormat("  %-28s%20s  (%s calls)\n", name,
                         absl::StrFormat("%s / %s", Grouped(static_cast<std::int64_t>(Percentile(us, 0.5))),
                                         Grouped(static_cast<std::int64_t>(Percentile(us, 0.99)))),
                         Grouped(std::ssize(us)));
}

}  // namespace kvsummary
