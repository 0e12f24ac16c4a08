// A status where there is no Abseil: in libkvsummary.so, and in what it shares with the gRPC client.
#pragma once

#include <string>

namespace kvsummary {

struct [[nodiscard]] PlainStatus {
  int code = 0;         // of absl::StatusCode; 0: done
  std::string reason;   // name as in kvsummary/v1/errors.proto; may be empty
  std::string message;  // for people

  bool ok() const { return code == 0; }
};

// The codes in use.
inline constexpr int kPlainInvalidArgument = 3;
inline constexpr int kPlainDeadlineExceeded = 4;
inline constexpr int kPlainResourceExhausted = 8;
inline constexpr int kPlainFailedPrecondition = 9;
inline constexpr int kPlainUnimplemented = 12;
inline constexpr int kPlainInternal = 13;
inline constexpr int kPlainUnavailable = 14;

}  // namespace kvsummary
