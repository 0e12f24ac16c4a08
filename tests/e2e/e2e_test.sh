#!/bin/bash
# A daemon's life as its clients see it.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"

test_cache_is_made_listed_dumped_and_deleted() {
  local address=unix:$dir/s
  serve daemon "$address"
  expect_code 0 ctl "$address" create-cache --name=engine-0 --device=host --layers=2 --blocks=4 \
    --block-size=64 --ring-blocks=2 --capacity=10 --k=3
  expect_code 0 ctl "$address" caches
  expect_text engine-0
  expect_code 0 ctl "$address" dump --name=engine-0
  expect_text 00000000
  expect_code 1 ctl "$address" create-cache --name=engine-0 --device=host --layers=2 --blocks=4 \
    --block-size=64 --ring-blocks=2 --capacity=10
  expect_text already
  expect_code 0 ctl "$address" delete-cache --name=engine-0
  expect_code 1 ctl "$address" dump --name=engine-0
  expect_text engine-0
  stop daemon
  [[ $code -eq 0 ]] || die "exit code $code after SIGTERM"
  [[ ! -e $dir/s ]] || die "the socket is still there"
}

test_golden_files_agree() {
  local address=unix:$dir/s
  serve daemon "$address"
  expect_code 0 ctl "$address" conformance "$data"/golden/*.safetensors
  tail -n 1 "$dir/out"
  [[ $(tail -n 1 "$dir/out") =~ ^[1-9][0-9]*\ passed,\ 0\ failed$ ]] || die "not the expected last line"
}

test_replay_checks_pages_and_reports() {
  local address=unix:$dir/s
  serve daemon "$address"
  expect_code 0 ctl "$address" replay --trace="$data/traces/excerpt.jsonl" --requests=6 --layers=2
  cat "$dir/out"
  expect_code 0 ctl "$address" replay --trace="$data/traces/excerpt.jsonl" --requests=3 --layers=1 --k=3 --json
  python3 -m json.tool "$dir/out" > /dev/null || die "this is not JSON: $(cat "$dir/out")"
  expect_code 0 ctl "$address" caches
  ! grep -q replay "$dir/out" || die "the replay left a cache behind"
}

test_sigterm_during_a_replay_drains() {
  local address=unix:$dir/s replay
  serve daemon "$address"
  ctl "$address" replay --trace="$data/traces/excerpt.jsonl" --layers=23 > "$dir/replay.log" 2>&1 &
  replay=$!
  until ctl "$address" caches | grep replay > /dev/null; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  stop daemon
  [[ $code -eq 0 ]] || die "exit code $code after SIGTERM: $(cat "$dir/daemon.log")"
  code=0
  wait "$replay" || code=$?
  [[ $code -eq 1 ]] || die "the replay's exit code is $code: $(cat "$dir/replay.log")"
}

run_tests
