// Addresses of daemons, as hand-offs carry them: unix:/PATH or HOST:PORT. Nothing is resolved.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace kvsummary {

struct HostPort {
  std::string host;  // without brackets
  std::string port;  // empty: none
};

// HOST, HOST:PORT, [V6] or [V6]:PORT, and V6 without a port.
std::optional<HostPort> SplitHostPort(std::string_view text);

// Whether it stands for every interface of a host, as 0.0.0.0 or [::], which nobody can dial.
bool IsWildcard(const std::string& host);

// Whether other daemons could dial it. INVALID_ARGUMENT.
absl::Status CheckDialled(std::string_view address);

}  // namespace kvsummary
