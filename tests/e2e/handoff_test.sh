#!/bin/bash
# Hand-offs between two real daemons of a host, and within one.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"
trace=$data/traces/excerpt.jsonl

# on KIND NAME ARGUMENT...: a daemon on a Unix socket, or on TCP alone; address[NAME] is where.
declare -A address
on() {
  local kind=$1 name=$2
  shift 2
  if [[ $kind == unix ]]; then
    address[$name]=unix:$dir/$name
    start "$name" --listen="${address[$name]}" "$@"
  else
    start "$name" --listen=127.0.0.1:0 "$@"
    until [[ -n $(port "$name") ]]; do
      kill -0 "${pid[$name]}" || die "daemon $name has ended: $(cat "$dir/$name.log")"
    done
    address[$name]=127.0.0.1:$(port "$name")
  fi
  ready "$name" "${address[$name]}"
}

# pair KIND: a, which prefills, and b, which may pull from it.
pair() {
  on "$1" a
  if [[ $1 == unix ]]; then on unix b --peers="${address[a]}"; else on tcp b --peers=127.0.0.1; fi
}

# replay ARGUMENT...: prefills on a; the report is in $dir/out, and every byte is right.
replay() {
  expect_code 0 ctl "${address[a]}" replay --disaggregate --device=host --trace="$(short)" --json "$@"
  is "$(field "$dir/out" .mismatches) == 0"
  is "$(field "$dir/out" .handoffs) == $(field "$dir/out" .requests) > 0"
  is "$(field "$dir/out" .regions_compared) > 0 and $(field "$dir/out" .ring_rows_compared) > 0"
}

# came_by TRANSPORT: all hand-offs of the last replay.
came_by() {
  is "$(field "$dir/out" ".transports.$1") == $(field "$dir/out" .handoffs)"
}

# number NAME PATH: of a daemon's stats, as .handoff.offers
number() {
  ctl "${address[$1]}" stats --json > "$dir/stats"
  field "$dir/stats" "$2"
}

# nothing_is_left NAME...: neither offers nor caches. A source may hear that a request has arrived a moment after the client does.
nothing_is_left() {
  local name
  for name in "$@"; do
    until [[ $(number "$name" .handoff.offers) -eq 0 && $(number "$name" .handoff.staged_bytes) -eq 0 ]]; do :; done
    expect_code 0 ctl "${address[$name]}" caches
    ! grep -qE 'replay|handoff' "$dir/out" || die "a cache is left on $name: $(cat "$dir/out")"
  done
}

two_daemons() {
  local k requests
  requests=$(volume 6 3)
  pair "$1"
  for k in 0 3; do
    replay --decode-address="${address[b]}" --decode-device=host --requests="$requests" --layers=2 --k="$k" \
      --concurrency=2 --chunk-tokens=1024 "${@:3}"
    came_by "$2"
  done
  nothing_is_left a b
  is "$(number a .handoff.offered) == 2 * $requests and $(number a .handoff.completed) == 2 * $requests"
  is "$(number b .handoff.accepted) == 2 * $requests and $(number b .handoff.failed) == 0"
}

test_two_daemons_on_unix_sockets() { two_daemons unix "same host"; }
test_two_daemons_on_tcp() { two_daemons tcp gRPC; }
test_layer_by_layer_on_unix_sockets() { two_daemons unix "same host" --layer-wise; }
test_layer_by_layer_on_tcp() { two_daemons tcp gRPC --layer-wise; }

test_within_one_daemon() {
  local k
  on unix a
  for k in 0 3; do
    replay --decode-address="${address[a]}" --decode-device=host --requests="$(volume 6 3)" --layers=2 \
      --k="$k" --concurrency=3
    came_by "same daemon"
    replay --decode-address="${address[a]}" --decode-device=host --requests=3 --layers=2 --k="$k" --layer-wise \
      --chunk-tokens=512
    came_by "same daemon"
  done
  nothing_is_left a
}

test_all_planes_hand_over() {
  local plane
  pair unix
  for plane in shared queue direct; do
    replay --decode-address="${address[b]}" --decode-device=host --requests=2 --plane="$plane" --block-size=16
  done
  nothing_is_left a b
}

test_replay_starts_the_second_daemon_and_ends_it() {
  on unix a
  replay --summaryd="$summaryd" --requests=3
  nothing_is_left a
  [[ -z $(own_daemons) ]] || die "a daemon is left: $(own_daemons)"
  on tcp b
  address[a]=${address[b]}
  replay --summaryd="$summaryd" --requests=3
  [[ -z $(own_daemons) ]] || die "a daemon is left: $(own_daemons)"
}

# Daemons that the replays of this test have started.
own_daemons() {
  local process
  for process in /proc/[0-9]*/cmdline; do
    tr '\0' ' ' < "$process" && echo
  done 2> /dev/null | grep -E "summaryd --listen=unix:/tmp/kvs-[^ ]*/s --peers=(unix:$dir/|127.0.0.1)" || true
}

test_a_replay_that_is_killed_leaves_nothing() {
  local replay
  on unix a
  "$summaryctl" --address="${address[a]}" replay --disaggregate --device=host --trace="$trace" --layers=23 \
    --concurrency=2 --summaryd="$summaryd" > "$dir/replay.log" 2>&1 &
  replay=$!
  until [[ $(number a .handoff.offered) -gt 2 ]]; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  kill -KILL "$replay"
  wait "$replay" 2> /dev/null || true
  until [[ $(number a .handoff.offers) -eq 0 ]]; do :; done
  is "$(number a .handoff.staged_bytes) == 0"
  until [[ -z $(own_daemons) ]]; do :; done
}

test_a_replay_that_is_interrupted_ends_its_daemon() {
  local replay got=0
  on unix a
  "$summaryctl" --address="${address[a]}" replay --disaggregate --device=host --trace="$trace" --layers=4 \
    --concurrency=2 --summaryd="$summaryd" > "$dir/replay.log" 2>&1 &
  replay=$!
  until [[ $(number a .handoff.completed) -gt 0 ]]; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  kill -INT "$replay"
  wait "$replay" || got=$?
  [[ $got -eq 130 ]] || die "exit code $got: $(cat "$dir/replay.log")"
  [[ -z $(own_daemons) ]] || die "a daemon is left: $(own_daemons)"
  nothing_is_left a
}

# Either daemon is killed while requests go over: the replay ends with an error, and the other daemon has nothing left of it.
killed_in_between() {
  local victim=$2 other replay got=0
  [[ $victim == a ]] && other=b || other=a
  pair "$1"
  "$summaryctl" --address="${address[a]}" replay --disaggregate --device=host --trace="$trace" --layers=23 \
    --concurrency=2 --decode-address="${address[b]}" --decode-device=host > "$dir/replay.log" 2>&1 &
  replay=$!
  until [[ $(number b .handoff.accepted) -gt 1 ]]; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  stop "$victim" KILL
  wait "$replay" || got=$?
  [[ $got -eq 1 ]] || die "exit code $got: $(cat "$dir/replay.log")"
  grep -qE 'UNAVAILABLE|PEER_UNREACHABLE' "$dir/replay.log" || die "no reason: $(cat "$dir/replay.log")"
  until [[ $(number "$other" .handoff.offers) -eq 0 && $(number "$other" .handoff.staged_bytes) -eq 0 ]]; do :; done
}

test_the_source_is_killed_on_a_unix_socket() { killed_in_between unix a; }
test_the_source_is_killed_on_tcp() { killed_in_between tcp a; }
test_the_target_is_killed_on_a_unix_socket() { killed_in_between unix b; }
test_the_target_is_killed_on_tcp() { killed_in_between tcp b; }

test_only_peers_are_pulled_from() {
  on unix a
  on unix b
  expect_code 1 ctl "${address[a]}" replay --disaggregate --device=host --trace="$trace" --requests=1 \
    --decode-address="${address[b]}"
  expect_text HANDOFF_PEER_NOT_ALLOWED
  nothing_is_left a b
}

test_a_daemon_that_hands_nothing_over_says_so() {
  on unix a --handoff-bytes=0
  expect_code 1 ctl "${address[a]}" replay --disaggregate --device=host --trace="$trace" --requests=1 \
    --decode-address="${address[a]}"
  expect_text HANDOFF_OFF
}

test_no_summaryd_to_start() {
  on unix a
  expect_code 1 ctl "${address[a]}" replay --disaggregate --trace="$trace" --requests=1 --summaryd="$dir/none"
  expect_text "$dir/none"
  expect_code 1 ctl "${address[a]}" replay --disaggregate --trace="$trace" --requests=1 --summaryd=/bin/false
  expect_text /bin/false
}

# bench FROM TO TRANSPORT
bench() {
  expect_code 0 "$summaryctl" handoff-bench --from="${address[$1]}" --to="${address[$2]}" --from-device=host \
    --to-device=host --tokens=1030 --requests=6 --layers=3 --concurrency=2 --json
  [[ $(field "$dir/out" .transport) == "$3" ]] || die "not by $3: $(cat "$dir/out")"
  is "$(field "$dir/out" .requests) == 6 and $(field "$dir/out" .request_bytes) == 3 * (128 * 256 + 6 * 1024)"
  is "$(field "$dir/out" .accept_gb_per_second) > 0 and $(field "$dir/out" .raw.0.gb_per_second) > 0"
  is "$(field "$dir/out" .raw.1.gb_per_second) > 0 and $(field "$dir/out" .wrong_blocks) == 0"
}

test_the_bench_tells_each_transport() {
  pair unix
  bench a a "same daemon"
  bench a b "same host"
  nothing_is_left a b
  stop a
  stop b
  pair tcp
  bench a b gRPC
  expect_code 0 "$summaryctl" handoff-bench --from="${address[a]}" --to="${address[b]}" --tokens=512 --requests=2
  expect_text "loopback TCP"
  nothing_is_left a b
}

run_tests
