// A hand-off as a router carries it: text of letters, digits, '-' and '_', which names a daemon, where it can
// be reached and the secret of an offer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvsummary {

inline constexpr std::size_t kInstanceBytes = 16;  // a daemon's life: random
inline constexpr std::size_t kSecretBytes = 16;    // an offer: random
inline constexpr std::size_t kTransferBytes = 16;  // a consumer of one
inline constexpr std::size_t kMaxAddressBytes = 512;

struct Handoff {
  std::string instance;
  std::string secret;
  std::string address;  // as gRPC dials it
  std::int32_t layers = 0;
  std::int64_t committed_tokens = -1;  // -1: not known yet

  friend bool operator==(const Handoff&, const Handoff&) = default;
};

// Below 1,024 characters. The sizes are those above.
std::string FormatHandoff(const Handoff& handoff);
// HANDOFF_INVALID.
absl::StatusOr<Handoff> ParseHandoff(std::string_view text);

}  // namespace kvsummary
