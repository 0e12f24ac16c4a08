#!/bin/bash
# The planes on host memory, with a daemon and a client that share it.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"

golden_files_agree_on() {
  local address=unix:$dir/s
  serve daemon "$address"
  expect_code 0 ctl "$address" conformance --plane="$1" --device=host "$data"/golden/*.safetensors
  tail -n 1 "$dir/out"
  [[ $(tail -n 1 "$dir/out") =~ ^[1-9][0-9]*\ passed,\ 0\ failed$ ]] || die "not the expected last line"
  expect_code 0 ctl "$address" caches
  ! grep -q conformance "$dir/out" || die "a cache was left behind"
}

test_golden_files_agree_on_the_inline_plane() { golden_files_agree_on inline; }
test_golden_files_agree_on_the_shared_plane() { golden_files_agree_on shared; }
test_golden_files_agree_through_the_queue() { golden_files_agree_on queue; }
test_golden_files_agree_on_the_direct_plane() { golden_files_agree_on direct; }

test_replay_agrees_on_every_plane() {
  local address=unix:$dir/s plane k
  serve daemon "$address"
  for plane in inline shared queue direct; do
    for k in 0 3; do
      expect_code 0 ctl "$address" replay --trace="$data/traces/excerpt.jsonl" --requests="$(volume 6 2)" \
        --layers=2 --device=host --k="$k" --plane="$plane"
      grep -E 'mismatches +0$' "$dir/out" || die "mismatches on the $plane plane: $(cat "$dir/out")"
    done
  done
}

test_an_unknown_plane_is_refused() {
  expect_code 2 ctl "unix:$dir/none" conformance --plane=sideways x
  expect_text "inline, shared, queue and direct"
}

test_sessions_are_listed_with_what_they_hold() {
  local address=unix:$dir/s replay
  serve daemon "$address"
  expect_code 0 ctl "$address" sessions
  expect_text SESSION
  "$summaryctl" --address="$address" replay --trace="$data/traces/excerpt.jsonl" --layers=23 --device=host \
    --plane=direct > "$dir/replay.log" 2>&1 &
  replay=$!
  until ctl "$address" sessions | grep '(replay-' > /dev/null; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  kill -KILL "$replay"
  wait "$replay" 2> /dev/null || true
  until ! ctl "$address" sessions | grep replay > /dev/null; do :; done
}

test_a_worker_is_told_that_its_daemon_was_killed() {
  local address=unix:$dir/s replay got=0
  serve daemon "$address"
  "$summaryctl" --address="$address" replay --trace="$data/traces/excerpt.jsonl" --layers=23 --device=host \
    --plane=queue > "$dir/replay.log" 2>&1 &
  replay=$!
  # A buffer is registered once the queue is there.
  until [[ -n $(ctl "$address" sessions | awk '/replay/ && $6 > 0') ]]; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  stop daemon KILL
  wait "$replay" || got=$?
  [[ $got -ne 0 ]] || die "the replay went on without a daemon"
  expect_text UNAVAILABLE "$dir/replay.log"
}

run_tests
