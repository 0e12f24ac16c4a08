#!/bin/bash
# Runs the GPU tests on a machine with a CUDA device, from portable binaries alone.
#
#   tests/gpu/run.sh FOLDER
#
# FOLDER holds binaries built with --config=portable, plain or as NAME.xz: summaryd, summaryctl, gpu_check,
# gpu_copy_check, gpu_device_check, cuda_memory_test, direct_check.
# Every step prints its name and result; logs go to $OUT, or to a temporary folder. The last line is
# `N passed, N failed`.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
from=$(cd "${1:?usage: run.sh FOLDER}" && pwd)
work=$(mktemp -d /tmp/kvs-XXXXXX)
daemon=
trap '[ -n "$daemon" ] && kill "$daemon"; wait; rm -rf "$work"' EXIT
logs=${OUT:-$work}
passed=0
failed=0

for f in "$from"/*.xz; do
  [ -e "$f" ] && xz -dc "$f" >"$work/$(basename "$f" .xz)"
done
for f in "$from"/*; do
  case $f in *.xz) ;; *) [ -f "$f" ] && cp "$f" "$work/" ;; esac
done
chmod +x "$work"/*

# step NAME COMMAND...: passes when the command does, and shows the end of its log.
step() {
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$logs/$name.log" 2>&1; then
    passed=$((passed + 1))
    echo "PASS $name ($((SECONDS - start)) s): $(tail -n 1 "$logs/$name.log")"
  else
    failed=$((failed + 1))
    echo "FAIL $name ($((SECONDS - start)) s)"
    tail -n 25 "$logs/$name.log"
  fi
}

# An error that the sanitizer reports ends it with status 9.
sanitize() {
  compute-sanitizer --tool "$1" --error-exitcode 9 "$work/${2:-gpu_check}" --quick
}

# The daemon on the first CUDA device, and everything a client checks through it.
export SUMMARYD_ADDRESS=unix:$work/summaryd.sock
ctl() { timeout 280 "$work/summaryctl" "$@"; }
"$work/summaryd" --listen="$SUMMARYD_ADDRESS" >"$logs/summaryd.log" 2>&1 &
daemon=$!
step ping ctl ping
step conformance ctl conformance --device=cuda:0 "$root"/tests/data/golden/*.safetensors
for plane in shared direct; do
  step "conformance_$plane" ctl conformance --plane="$plane" --device=cuda:0 "$root"/tests/data/golden/*.safetensors
done
step direct_check timeout 100 "$work/direct_check"
step replay ctl replay --trace="$root/tests/data/traces/excerpt.jsonl" --device=cuda:0 --layers=4 --sample=40
step replay_verify ctl replay --trace="$root/tests/data/traces/excerpt.jsonl" --device=cuda:0 --layers=3 --k=3 \
  --requests=100 --cache-bytes=16MiB --sample=40
drain() { kill -TERM "$daemon" && wait "$daemon"; }
step drain drain
daemon=

step cuda_memory timeout 60 "$work/cuda_memory_test"
step gpu_check timeout 300 "$work/gpu_check"
step memcheck sanitize memcheck
step racecheck sanitize racecheck
step gpu_device_check timeout 120 "$work/gpu_device_check"
step gpu_copy_check timeout 120 "$work/gpu_copy_check"
step copy_memcheck sanitize memcheck gpu_copy_check
step copy_racecheck sanitize racecheck gpu_copy_check

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
