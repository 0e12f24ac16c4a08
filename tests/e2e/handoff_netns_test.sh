#!/bin/bash
# Hand-offs between daemons in two network namespaces, over a link that breaks.
#
# The script runs itself again as root of user and network namespaces of its own, so it needs no privileges, sees no
# interface of the machine and leaves none. In them: one namespace for each daemon, with a link between the two
# that carries the hand-offs, and one to each from here, where the clients are.
# shellcheck disable=SC2317  # run_tests calls the functions

PATH+=:/usr/sbin:/sbin  # of ip and tc

# What the tests need: namespaces, pairs of interfaces, and a limit to a link's rate.
probe='ip link set lo up && ip link add p0 type veth peer name p1 && tc qdisc add dev p0 root tbf rate 1mbit \
  burst 16kb latency 1ms'
if [[ ${1-} != inside ]]; then
  for inside in "unshare --user --map-root-user --net" "unshare --net"; do
    # shellcheck disable=SC2086  # words
    if why=$($inside bash -c "$probe" 2>&1); then exec $inside "$0" inside; fi
  done
  echo "SKIPPED: no network namespaces here: $why"
  [[ -z ${XML_OUTPUT_FILE-} ]] || echo "<testsuites><testsuite name=\"handoff_netns_test\"><testcase
    name=\"all\" result=\"skipped\"><skipped message=\"no network namespaces here\"/></testcase></testsuite></testsuites>" \
    > "$XML_OUTPUT_FILE"
  exit 0
fi

# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"
trace=$data/traces/excerpt.jsonl

# Daemon a prefills, b decodes. $link is the address on the link between them, $here the one for clients.
declare -A link=([a]=10.77.0.1 [b]=10.77.0.2) here=([a]=10.78.1.1:5000 [b]=10.78.2.1:5000)

# within NAME COMMAND...: in the daemon's namespace.
within() {
  nsenter --net="/proc/${pid[net_$1]}/ns/net" "${@:2}"
}

# namespaces RATE: a and b with their links; what goes over the one between them is limited to the rate.
namespaces() {
  local name
  ip link set lo up
  for name in a b; do
    unshare --net sleep infinity &
    pid[net_$name]=$!
    until [[ $(readlink "/proc/${pid[net_$name]}/ns/net") != $(readlink /proc/$$/ns/net) ]]; do :; done
    ip link delete "here_$name" 2> /dev/null || true # of the test before, if it is still there
    ip link add "here_$name" type veth peer name here netns "${pid[net_$name]}"
    ip address add "${here[$name]%.1:*}.2/24" dev "here_$name"
    ip link set "here_$name" up
    within "$name" ip link set lo up
    within "$name" ip address add "${here[$name]%:*}/24" dev here
    within "$name" ip link set here up
  done
  ip link add link_a netns "${pid[net_a]}" type veth peer name link_b netns "${pid[net_b]}"
  for name in a b; do
    within "$name" ip address add "${link[$name]}/24" dev "link_$name"
    within "$name" ip link set "link_$name" up
  done
  within a tc qdisc add dev link_a root tbf rate "$1" burst 256kb latency 100ms
}

# daemon NAME ARGUMENT...: on TCP alone, in its namespace.
daemon() {
  local name=$1
  shift
  nsenter --net="/proc/${pid[net_$name]}/ns/net" "$summaryd" --listen="${link[$name]}:5000" --listen="${here[$name]}" --advertise="${link[$name]}:5000" \
    "$@" > "$dir/$name.log" 2>&1 < /dev/null &
  pid[$name]=$!
  ready "$name" "${here[$name]}"
}

# number NAME PATH: of a daemon's stats, as .handoff.offers
number() {
  ctl "${here[$1]}" stats --json > "$dir/stats"
  field "$dir/stats" "$2"
}

cut() { within a ip link set link_a down; }
mend() { within a ip link set link_a up; }

# bench ARGUMENT...: in the background; its output is in $dir/bench, its process in pid[bench].
bench() {
  "$summaryctl" handoff-bench --from="${here[a]}" --to="${here[b]}" --from-device=host --to-device=host --json "$@" \
    > "$dir/bench" 2>&1 < /dev/null &
  pid[bench]=$!
}

# Waits until the bench has ended; its exit code is in $code.
bench_ends() {
  code=0
  wait "${pid[bench]}" || code=$?
  unset "pid[bench]"
}

# sent_beyond BYTES: waits until a has sent so many.
sent_beyond() {
  until [[ $(number a .handoff.sent_bytes) -gt $1 ]]; do
    kill -0 "${pid[bench]}" || die "the bench ended early: $(cat "$dir/bench")"
  done
}

# A source may hear that a request has arrived a moment after the client does.
nothing_is_left() {
  local name
  for name in a b; do
    until [[ $(number "$name" .handoff.offers) -eq 0 && $(number "$name" .handoff.staged_bytes) -eq 0 ]]; do :; done
    expect_code 0 ctl "${here[$name]}" caches
    ! grep -qE 'replay|handoff' "$dir/out" || die "a cache is left on $name: $(cat "$dir/out")"
  done
}

test_replay_over_a_network() {
  local k
  namespaces 4gbit
  daemon a
  daemon b --peers=10.77.0.0/24
  for k in 0 3; do
    expect_code 0 ctl "${here[a]}" replay --disaggregate --device=host --decode-address="${here[b]}" \
      --decode-device=host --trace="$trace" --requests=4 --layers=2 --k="$k" --concurrency=2 --json
    is "$(field "$dir/out" .mismatches) == 0 and $(field "$dir/out" .transports.gRPC) == 4"
  done
  expect_code 0 ctl "${here[a]}" replay --disaggregate --device=host --decode-address="${here[b]}" \
    --decode-device=host --trace="$trace" --requests=4 --layers=2 --layer-wise --chunk-tokens=1024 --json
  is "$(field "$dir/out" .mismatches) == 0"
  nothing_is_left
}

test_a_peer_beyond_the_network_is_refused() {
  namespaces 4gbit
  daemon a
  daemon b --peers=10.77.1.0/24
  expect_code 1 ctl "${here[a]}" replay --disaggregate --device=host --decode-address="${here[b]}" \
    --decode-device=host --trace="$trace" --requests=1
  expect_text HANDOFF_PEER_NOT_ALLOWED
}

# 23 layers of 131,072 tokens: 96 MB, for which the link takes four seconds.
tokens=$(volume 131072 32768)
rate=$(volume 200mbit 50mbit)
bytes=$((23 * tokens * 32))
under_way=$((36 << 20)) # a stream's credit, and what sockets hold
large=(--tokens="$tokens" --requests=1)

# cut_for SECONDS: amid the second request (the first warms up); all arrives, and what had come comes once.
cut_for() {
  namespaces "$rate"
  daemon a
  daemon b --peers="${link[a]}"
  bench "${large[@]}"
  sent_beyond $((bytes + bytes * 5 / 8))
  cut
  sleep "$1" # what is tested
  mend
  bench_ends
  cat "$dir/bench"
  [[ $code -eq 0 ]] || die "exit code $code: $(cat "$dir/b.log")"
  is "$(field "$dir/bench" .wrong_blocks) == 0"
  nothing_is_left
  is "$(number a .handoff.completed) == 2 and $(number b .handoff.accepted) == 2"
  # Beyond two requests only what was under way when the connection broke.
  is "$(number a .handoff.sent_bytes) < 2 * $bytes + $under_way"
}

test_a_link_that_is_cut_for_a_second() { cut_for 1; }

# Long enough for both ends to give the connection up.
test_a_link_that_is_cut_for_five_seconds() {
  cut_for 5
  is "$(field "$dir/bench" .reconnects) >= 1"
}

test_a_link_that_is_cut_for_good() {
  local start
  namespaces "$rate"
  daemon a --handoff-lifetime=5
  daemon b --peers="${link[a]}"
  bench "${large[@]}"
  sent_beyond $((bytes / 8))
  cut
  start=$SECONDS
  bench_ends
  [[ $code -eq 1 ]] || die "exit code $code: $(cat "$dir/bench")"
  grep -qE 'PEER_UNREACHABLE|HANDOFF_EXPIRED' "$dir/bench" || die "not by name: $(cat "$dir/bench")"
  [[ $((SECONDS - start)) -lt 30 ]] || die "it took $((SECONDS - start)) s"
  until [[ $(number a .handoff.offers) -eq 0 ]]; do :; done
  is "$(number b .handoff.failed) == 1 and $(number b .handoff.accepted) == 0"
  nothing_is_left
}

run_tests
