#!/bin/bash
# Runs the GPU tests on a machine with a CUDA device, from portable binaries alone.
#
#   tests/gpu/run.sh FOLDER
#
# FOLDER holds binaries built with --config=portable, plain or as NAME.xz: gpu_check. Every step prints its
# name and result; logs go to $OUT, or to a temporary folder. The last line is `N passed, N failed`.
set -u
from=$(cd "${1:?usage: run.sh FOLDER}" && pwd)
work=$(mktemp -d /tmp/kvs-XXXXXX)
trap 'rm -rf "$work"' EXIT
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
  compute-sanitizer --tool "$1" --error-exitcode 9 "$work/gpu_check" --quick
}

step gpu_check timeout 300 "$work/gpu_check"
step memcheck sanitize memcheck
step racecheck sanitize racecheck

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
