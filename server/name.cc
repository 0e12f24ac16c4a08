#include "server/name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "server/error.h"

namespace kvsummary {

absl::Status CheckName(const std::string& name) {
  const bool good = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == ':' || c == '/' || c == '-';
  });
  if (good && !name.empty() && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return Refuse(Reason::NAME_INVALID, "name",
                "a name has 1 to 128 letters, digits, '.', '_', ':', '/' and '-'");
}

}  // namespace kvsummary
