#include "server/handoff/address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <memory>

#include "absl/strings/ascii.h"
#include "server/handoff/handoff_text.h"

namespace kvsummary {
namespace {

bool IsPort(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= 65535;
}

}  // namespace

std::optional<HostPort> SplitHostPort(std::string_view text) {
  HostPort result;
  std::string_view rest;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    result.host = text.substr(1, end - 1);
    rest = text.substr(end + 1);
    if (!rest.empty() && !rest.starts_with(':')) return std::nullopt;
  } else {
    const std::size_t colon = text.find(':');
    const bool v6 = colon != std::string_view::npos && text.find(':', colon + 1) != std::string_view::npos;
    result.host = v6 ? text : text.substr(0, colon);
    rest = v6 || colon == std::string_view::npos ? std::string_view() : text.substr(colon);
  }
  if (!rest.empty()) {
    if (!IsPort(rest.substr(1))) return std::nullopt;
    result.port = rest.substr(1);
  }
  const bool good = !result.host.empty() && std::all_of(result.host.begin(), result.host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' || c == ':';
  });
  if (!good) return std::nullopt;
  return result;
}

bool IsWildcard(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  if (found->ai_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr.s_addr == INADDR_ANY;
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(found->ai_addr)->sin6_addr;
  const bool v4_inside = IN6_IS_ADDR_V4MAPPED(&address);
  return std::all_of(address.s6_addr + (v4_inside ? 12 : 0), address.s6_addr + sizeof(address),
                     [](std::uint8_t byte) { return byte == 0; });
}

absl::Status CheckDialled(std::string_view address) {
  constexpr std::string_view kUnix = "unix:";
  if (address.size() > kMaxAddressBytes) return absl::InvalidArgumentError("is too long");
  if (address.starts_with(kUnix)) {
    if (address.size() > kUnix.size() + 1 && address[kUnix.size()] == '/') return absl::OkStatus();
    return absl::InvalidArgumentError("a Unix socket is unix:/PATH");
  }
  const auto split = SplitHostPort(address);
  if (!split || split->port.empty()) {
    return absl::InvalidArgumentError("must be HOST:PORT or unix:/PATH, with a port from 1 to 65535");
  }
  if (IsWildcard(split->host)) {
    return absl::InvalidArgumentError("stands for every interface, which others cannot dial");
  }
  return absl::OkStatus();
}

}  // namespace kvsummary
