// What helpers of two daemons say to each other: active messages. A target asks for a range of the source's
// staging memory with a header alone; the source answers with a header and, when it grants, the bytes.
// Numbers are little-endian. A change of these structs takes new ids.
#pragma once

#include <cstdint>

namespace kvsummary {

enum UcxMessage : unsigned { kUcxFetchMessage = 1, kUcxChunkMessage = 2 };

struct UcxFetchHeader {
  std::uint64_t request;  // named in the answer
  std::uint64_t token;
  std::int64_t from;
  std::int64_t bytes;
  std::uint32_t staging;
  std::uint32_t unused;
};

struct UcxChunkHeader {
  std::uint64_t request;
  std::int32_t code;  // absl::StatusCode
  std::uint32_t unused;
};

}  // namespace kvsummary
