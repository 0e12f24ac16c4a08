#!/bin/bash
# Runs the GPU tests on a machine with a CUDA device, from portable binaries alone.
#
#   tests/gpu/run.sh FOLDER
#   KVS_ONLY="kills bench" tests/gpu/run.sh FOLDER      some of the parts
#
# FOLDER holds binaries built with --config=portable, plain or as NAME.xz: summaryd, summaryctl, gpu_check,
# gpu_copy_check, gpu_device_check, gpu_store_check, gpu_handoff_check, cuda_memory_test, direct_check, daemon_check, bench_planes, churn, libkvsummary.so.1.
# Parts: planes (conformance and replay on a daemon), memory (what a daemon takes), torch (needs a python3 with
# torch), kills, bench (the last two without and with MPS), prefix (engines and clients at random on a daemon with a
# page store, for $CHURN_SECONDS, 60), handoff (within a daemon, and between two), kernels, device, store (what needs no daemon).
# Every step prints its name and result; logs go to $OUT, or to a temporary folder. The last line is
# `N passed, N failed`.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
from=$(cd "${1:?usage: run.sh FOLDER}" && pwd)
work=$(mktemp -d /tmp/kvs-XXXXXX)
logs=${OUT:-$work}
daemon=
mps=
passed=0
failed=0

# shellcheck disable=SC2317  # the trap calls it
cleanup() {
  [ -n "$daemon" ] && kill "$daemon" && wait "$daemon"
  [ -n "$mps" ] && stop_mps
  rm -rf "$work"
}
trap cleanup EXIT

for f in "$from"/*.xz; do
  [ -e "$f" ] && xz -dc "$f" >"$work/$(basename "$f" .xz)"
done
for f in "$from"/*; do
  case $f in *.xz) ;; *) [ -f "$f" ] && cp "$f" "$work/" ;; esac
done
chmod +x "$work"/*

pass() {
  passed=$((passed + 1))
  echo "PASS $1"
}
fail() {
  failed=$((failed + 1))
  echo "FAIL $1"
}

# step NAME COMMAND...: passes when the command does, and shows the end of its log. show NAME COMMAND...: the
# same, and shows all of it.
step() {
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$logs/$name.log" 2>&1; then
    pass "$name ($((SECONDS - start)) s): $(tail -n 1 "$logs/$name.log")"
  else
    fail "$name (status $?, $((SECONDS - start)) s)"
    tail -n 40 "$logs/$name.log"
    if [ -n "$daemon" ]; then
      echo "--- the daemon's log:"
      tail -n 10 "$logs/summaryd.log"
    fi
  fi
}
show() {
  local before=$failed
  step "$@"
  [ "$failed" -ne "$before" ] || cat "$logs/$1.log"
}

# An error that the sanitizer reports ends it with status 9.
sanitize() {
  compute-sanitizer --tool "$1" --error-exitcode 9 "$work/${2:-gpu_check}" --quick
}

export SUMMARYD_ADDRESS=unix:$work/summaryd.sock
ctl() { timeout 280 "$work/summaryctl" "$@"; }
check_daemon() { timeout 200 "$work/daemon_check" "$@"; }
start_daemon_at() { # start_daemon_at ADDRESS FLAG...
  local address=$1
  shift
  "$work/summaryd" --listen="$address" "$@" >>"$logs/summaryd.log" 2>&1 &
  daemon=$!
  step "ping${mps:+_mps}" ctl --address="$address" ping
}
start_daemon() { start_daemon_at "$SUMMARYD_ADDRESS" "$@"; }
stop_daemon() {
  # shellcheck disable=SC2317  # step calls it
  drain() { kill -TERM "$daemon" && wait "$daemon"; }
  step "drain${mps:+_mps}" drain
  daemon=
}

# A control daemon of MPS of our own. Clients find it by the environment.
start_mps() {
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  if ! nvidia-cuda-mps-control -d >"$logs/mps.log" 2>&1; then
    echo "NO MPS: nvidia-cuda-mps-control -d does not start: $(cat "$logs/mps.log")"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    return 1
  fi
  mps=1
}
stop_mps() {
  echo quit | timeout 20 nvidia-cuda-mps-control >>"$logs/mps.log" 2>&1
  cp "$work"/mps-log/*.log "$logs/" 2>/dev/null
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  mps=
}
# Whether the daemon's context is one of the MPS server's: else what is measured is not MPS.
mps_serves() {
  local servers
  servers=$(echo get_server_list | timeout 10 nvidia-cuda-mps-control 2>&1)
  echo "MPS servers: $servers"
  [[ $servers =~ ^[0-9]+ ]]
}

part_planes() {
  start_daemon
  step conformance ctl conformance --device=cuda:0 "$root"/tests/data/golden/*.safetensors
  for plane in shared queue direct; do
    step "conformance_$plane" ctl conformance --plane="$plane" --device=cuda:0 "$root"/tests/data/golden/*.safetensors
  done
  step direct_check timeout 100 "$work/direct_check"
  step replay ctl replay --trace="$root/tests/data/traces/excerpt.jsonl" --device=cuda:0 --layers=4 --sample=40
  step replay_verify ctl replay --trace="$root/tests/data/traces/excerpt.jsonl" --device=cuda:0 --layers=3 --k=3 \
    --requests=100 --cache-bytes=16MiB --sample=40
  stop_daemon
}

part_prefix() {
  start_daemon --gpu-store-bytes=8MiB --host-store-bytes=32MiB --max-lease=20
  for plane in inline direct; do
    step "replay_prefix_$plane" ctl replay --prefix --trace="$root/tests/data/traces/excerpt.jsonl" --device=cuda:0 \
      --layers=2 --requests=60 --engines=2 --restart-engine-every=10 --k=3 --cache-bytes=64MiB --sample=60 \
      --plane="$plane"
  done
  show churn timeout 280 "$work/churn" --address="$SUMMARYD_ADDRESS" --device=cuda:0 --seconds="${CHURN_SECONDS-60}"
  step check ctl check
  stop_daemon
}

part_memory() {
  local before
  before=$(check_daemon used) || before=-1
  start_daemon
  show memory check_daemon memory --before-bytes="$before"
  stop_daemon
}

part_torch() {
  if ! python3 -c 'import torch; assert torch.cuda.is_available()' 2>"$logs/torch_import.log"; then
    fail "torch: python3 has no torch with CUDA here: $(tail -n 1 "$logs/torch_import.log")"
    return
  fi
  start_daemon
  show torch timeout 120 python3 "$root/tests/gpu/torch_check.py" "$work/libkvsummary.so.1" "$work/daemon_check" \
    "$work/summaryctl"
  stop_daemon
}

# What is in use of the GPU, when only the daemon (or nobody) is left: for the log.
who_uses() {
  echo "$1: $(check_daemon used) bytes of the GPU in use; $(nvidia-smi --query-compute-apps=pid,used_memory \
    --format=csv,noheader 2>&1 | tr '\n' ';')"
}
kills() {
  who_uses "without a daemon"
  start_daemon
  show "kills${mps:+_mps}" check_daemon kills --daemon-pid="$daemon" --goal-ms="$1"
  who_uses "the daemon (pid $daemon), all workers dead"
  [ -z "$mps" ] || step mps_serves mps_serves
  stop_daemon
  who_uses "the daemon gone"
}
part_kills() {
  kills 100
  if start_mps; then
    kills 300
    stop_mps
  else
    fail "kills under MPS: there is none"
  fi
}

bench() {
  start_daemon
  show "bench_planes${mps:+_mps}" timeout 100 "$work/bench_planes" --address="$SUMMARYD_ADDRESS" --device=cuda:0
  stop_daemon
}
part_bench() {
  bench
  if start_mps; then
    bench
    stop_mps
  else
    fail "bench_planes under MPS: there is none"
  fi
}

part_kernels() {
  step gpu_check timeout 300 "$work/gpu_check"
  step memcheck sanitize memcheck
  step racecheck sanitize racecheck
  step gpu_copy_check timeout 120 "$work/gpu_copy_check"
  step copy_memcheck sanitize memcheck gpu_copy_check
  step copy_racecheck sanitize racecheck gpu_copy_check
}

part_device() {
  step cuda_memory timeout 60 "$work/cuda_memory_test"
  show gpu_device_check timeout 120 "$work/gpu_device_check"
}

part_store() {
  show gpu_store_check timeout 120 "$work/gpu_store_check"
}

# Two daemons: by memory of one that the other maps, and over gRPC.
part_handoff() {
  local same a=unix:$work/a.sock b=unix:$work/b.sock first
  show gpu_handoff_check timeout 150 "$work/gpu_handoff_check"
  for same in on off; do
    "$work/summaryd" --listen="$a" >>"$logs/summaryd_a.log" 2>&1 &
    first=$!
    start_daemon_at "$b" --peers="$a" --same-host="$same"
    step "ping_a_$same" ctl --address="$a" ping
    show "handoff_long_$same" ctl handoff-bench --from="$a" --to="$b" --tokens=131077 --requests=10
    show "handoff_short_$same" ctl handoff-bench --from="$a" --to="$b" --tokens=517 --requests=100
    step "disaggregate_$same" ctl --address="$a" replay --disaggregate --decode-address="$b" --k=3 --layers=3 \
      --trace="$root/tests/data/traces/excerpt.jsonl" --requests=40
    kill -TERM "$first" && wait "$first"
    stop_daemon
  done
}

for part in ${KVS_ONLY:-planes prefix handoff memory torch kills bench device store kernels}; do
  if ! declare -F "part_$part" >/dev/null; then
    fail "there is no part $part"
    continue
  fi
  "part_$part"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
