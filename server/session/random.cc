#include "server/session/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"

namespace kvsummary {

absl::StatusOr<std::string> RandomBytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t have = 0; have < count;) {
    const ssize_t got = getrandom(bytes.data() + have, count - have, 0);
    if (got < 0 && errno != EINTR) {
      return absl::InternalError(absl::StrFormat("getrandom: %s", std::strerror(errno)));
    }
    if (got > 0) have += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace kvsummary
