#!/bin/bash
# libkvsummary.so.1 exports its own functions and nothing else, and needs neither gRPC, protobuf nor Abseil.
set -euo pipefail
library=$TEST_SRCDIR/$TEST_WORKSPACE/client/direct/libkvsummary.so.1

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }')
echo "$exported"
if grep -vE '^kvs_[a-z_]+@@KVSUMMARY_1$' <<< "$exported"; then
  echo "FAILED: exported, but not of the interface" >&2
  exit 1
fi
[[ $(wc -l <<< "$exported") -eq 9 ]]

dynamic=$(readelf -d "$library")
grep -q 'soname: \[libkvsummary.so.1\]' <<< "$dynamic"
if grep NEEDED <<< "$dynamic" | grep -E 'grpc|proto|absl|cuda'; then
  echo "FAILED: the library needs this" >&2
  exit 1
fi
if nm -C "$library" | grep -E 'grpc|absl::|google::protobuf'; then
  echo "FAILED: this is in the library" >&2
  exit 1
fi
