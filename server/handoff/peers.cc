#include "server/handoff/peers.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/handoff/address.h"

namespace kvsummary {
namespace {

constexpr std::string_view kUnix = "unix:";

bool IsNumber(std::string_view text, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && text[0] != '-' && value >= least &&
         value <= most;
}

struct Literal {
  int family = 0;
  std::array<std::uint8_t, 16> bytes = {};
};

std::optional<Literal> ParseLiteral(const std::string& host) {
  Literal literal;
  for (const int family : {AF_INET, AF_INET6}) {
    literal.family = family;
    if (inet_pton(family, host.c_str(), literal.bytes.data()) == 1) return literal;
  }
  return std::nullopt;
}

bool SamePrefix(const std::array<std::uint8_t, 16>& a, const std::array<std::uint8_t, 16>& b, int bits) {
  for (int i = 0; i < bits; ++i) {
    const auto mask = static_cast<std::uint8_t>(0x80 >> (i % 8));
    if ((a[static_cast<std::size_t>(i / 8)] & mask) != (b[static_cast<std::size_t>(i / 8)] & mask))
      return false;
  }
  return true;
}

}  // namespace

absl::Status Peers::Allow(std::string_view entry) {
  if (entry.starts_with(kUnix)) {
    if (entry.size() <= kUnix.size() || entry[kUnix.size()] != '/') {
      return absl::InvalidArgumentError("a Unix socket is unix:/PATH");
    }
    paths_.emplace_back(entry);
    return absl::OkStatus();
  }
  const std::size_t slash = entry.find('/');
  const auto split = SplitHostPort(entry.substr(0, slash));
  if (!split)
    return absl::InvalidArgumentError("must be unix:/PATH, HOST, HOST:PORT, ADDRESS or ADDRESS/BITS");
  const auto literal = ParseLiteral(split->host);
  if (!literal) {
    if (slash != std::string_view::npos) return absl::InvalidArgumentError("a network needs an address");
    names_.push_back({split->host, split->port});
    return absl::OkStatus();
  }
  Network network{literal->family, literal->bytes, literal->family == AF_INET ? 32 : 128, split->port};
  if (slash != std::string_view::npos) {
    const std::string_view bits = entry.substr(slash + 1);
    if (bits.empty() || !IsNumber(bits, 0, network.prefix) || !split->port.empty()) {
      return absl::InvalidArgumentError("a network is ADDRESS/BITS");
    }
    std::from_chars(bits.data(), bits.data() + bits.size(), network.prefix);
  }
  networks_.push_back(network);
  return absl::OkStatus();
}

absl::Status Peers::Check(std::string_view address) const {
  absl::Status refused = Refuse(
      Reason::HANDOFF_PEER_NOT_ALLOWED, "handoff",
      absl::StrFormat(
          "the hand-off is from %s, which --peers of the accepting daemon does not name (a network "
          "does not match a name)",
          absl::CHexEscape(absl::string_view(address.data(), std::min<std::size_t>(address.size(), 200)))));
  if (address.starts_with(kUnix)) {
    return std::find(paths_.begin(), paths_.end(), address) != paths_.end() ? absl::OkStatus() : refused;
  }
  const auto split = SplitHostPort(address);
  if (!split || split->port.empty()) return refused;
  const auto port_fits = [&](const std::string& port) { return port.empty() || port == split->port; };
  const auto literal = ParseLiteral(split->host);
  const bool allowed = literal ? std::any_of(networks_.begin(), networks_.end(),
                                             [&](const Network& n) {
                                               return n.family == literal->family && port_fits(n.port) &&
                                                      SamePrefix(n.bytes, literal->bytes, n.prefix);
                                             })
                               : std::any_of(names_.begin(), names_.end(), [&](const Name& n) {
                                   return n.host == split->host && port_fits(n.port);
                                 });
  return allowed ? absl::OkStatus() : refused;
}

}  // namespace kvsummary
