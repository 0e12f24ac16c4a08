// Which daemons this one may pull from: what --peers says. Nothing is resolved and nothing connected to.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace kvsummary {

class Peers {
 public:
  // "unix:/PATH"; an address or a network of IPv4 or IPv6 ("10.0.0.7", "10.0.0.0/8", "fd00::/8"), for every
  // port; a host's name, as hand-offs spell it; or one of these hosts with a port ("decode-3:50051").
  // INVALID_ARGUMENT.
  absl::Status Allow(std::string_view entry);

  // Whether a hand-off's address is allowed. Only unix:/PATH and HOST:PORT are. HANDOFF_PEER_NOT_ALLOWED.
  absl::Status Check(std::string_view address) const;

  // Whether some are reached over TCP.
  bool any_host() const { return !networks_.empty() || !names_.empty(); }

 private:
  struct Network {
    int family = 0;
    std::array<std::uint8_t, 16> bytes = {};
    int prefix = 0;    // bits
    std::string port;  // empty: every one
  };
  struct Name {
    std::string host;
    std::string port;
  };
  std::vector<std::string> paths_;
  std::vector<Network> networks_;
  std::vector<Name> names_;
};

}  // namespace kvsummary
