#include "server/rpc/listen.h"

#include <sys/un.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace kvsummary {

absl::StatusOr<ListenAddress> ParseListenAddress(const std::string& text) {
  constexpr std::string_view kUnix = "unix:";
  // gRPC decodes %XX in an address: it would listen elsewhere than the lock says.
  if (absl::StrContains(text, "%")) {
    return absl::InvalidArgumentError(absl::StrFormat("\"%s\" has a %%, which no address may have", text));
  }
  // Anybody can connect to an abstract socket: it has no mode.
  if (absl::StartsWith(text, "unix-abstract:")) {
    return absl::InvalidArgumentError("abstract sockets are not supported: use unix:PATH");
  }
  if (absl::StartsWith(text, "unix:")) {
    ListenAddress address{.grpc = text, .path = text.substr(kUnix.size())};
    if (address.path.empty()) return absl::InvalidArgumentError("unix: needs a path");
    if (address.path.size() >= sizeof(sockaddr_un::sun_path)) {
      return absl::InvalidArgumentError(absl::StrFormat("the socket path %s has %d bytes; at most %d fit",
                                                        address.path, address.path.size(),
                                                        sizeof(sockaddr_un::sun_path) - 1));
    }
    return address;
  }
  const auto colon = text.rfind(':');
  int port = -1;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\" is not unix:PATH, HOST:PORT or :PORT with a port from 0 to 65535", text));
  }
  const std::string host = colon == 0 ? "127.0.0.1" : text.substr(0, colon);
  return ListenAddress{.grpc = absl::StrFormat("%s:%d", host, port), .path = ""};
}

}  // namespace kvsummary
