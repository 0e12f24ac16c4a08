#!/bin/bash
# TLS between clients and daemons and between daemons, and addresses that nobody can dial.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"

certificates() { "$TEST_SRCDIR/$TEST_WORKSPACE/tests/tls/certificates.sh" "$dir"; }

# as NAME: the flags of a client with this certificate, which believes in ca.
as() { echo "--tls-ca=$dir/ca.pem --tls-cert=$dir/$1.pem --tls-key=$dir/$1.key"; }

# mutual CERTIFICATE: the flags of a daemon with this certificate, whose clients need one by ca.
mutual() { echo "--tls-cert=$dir/$1.pem --tls-key=$dir/$1.key --tls-client-ca=$dir/ca.pem"; }

# on NAME ARGUMENT...: a daemon on TCP; address[NAME] is where.
declare -A address
on() {
  local name=$1
  shift
  start "$name" --listen=127.0.0.1:0 --same-host=off "$@"
  until [[ -n $(port "$name") ]]; do
    kill -0 "${pid[$name]}" || die "daemon $name has ended: $(cat "$dir/$name.log")"
  done
  address[$name]=127.0.0.1:$(port "$name")
}

# refused TEXT ARGUMENT...: a daemon that does not start: exit code 2, with this text.
refused() {
  local text=$1
  shift
  expect_code 2 "$summaryd" --listen=127.0.0.1:0 "$@"
  expect_text "$text"
}

# fails NAME ARGUMENT...: ping of the daemon a, in the background: it takes as long as a client waits.
declare -A failing
fails() {
  local name=$1
  shift
  "$summaryctl" --address="${address[a]}" "$@" ping > "$dir/$name.out" 2>&1 &
  failing[$name]=$!
}

# failed NAME TEXT: it has failed, with this text.
failed() {
  local got=0
  wait "${failing[$1]}" || got=$?
  [[ $got -eq 1 ]] || die "exit code $got: $(cat "$dir/$1.out")"
  expect_text "$2" "$dir/$1.out"
}

# shellcheck disable=SC2046  # flags
test_clients_over_tls() {
  certificates
  on a --listen="unix:$dir/s" $(mutual daemon)
  expect_code 0 ctl "${address[a]}" $(as client) ping
  expect_code 0 ctl "unix:$dir/s" ping
  expect_code 0 ctl "unix:$dir/s" $(as client) ping
  expect_code 0 ctl "${address[a]}" $(as client) replay --trace="$(short)" --requests=4 --device=host
  fails plain
  fails nobody --tls-ca="$dir/ca.pem"
  fails stranger $(as stranger)
  fails believer --tls-ca="$dir/other_ca.pem" --tls-cert="$dir/client.pem" --tls-key="$dir/client.key"
  failed plain "without TLS"
  failed nobody "no certificate of this side"
  failed stranger "with TLS"
  failed believer "certificate verify failed"
  expect_code 1 ctl "${address[a]}" --tls-ca="$dir/none.pem" ping
  expect_text "$dir/none.pem: cannot be read"
  expect_code 2 ctl "${address[a]}" --tls-cert="$dir/client.pem" ping
  expect_text "--tls-cert needs --tls-ca"
}

test_bad_settings_are_named() {
  certificates
  refused "--tls-cert=$dir/daemon.pem: needs --tls-key" --tls-cert="$dir/daemon.pem"
  refused "--tls-cert=$dir/none: cannot be read" --tls-cert="$dir/none" --tls-key="$dir/daemon.key"
  refused "--tls-key=$dir/client.key: is not the key" --tls-cert="$dir/daemon.pem" --tls-key="$dir/client.key"
  refused "--tls-client-ca=$dir/ca.key: has no certificate" --tls-cert="$dir/daemon.pem" \
    --tls-key="$dir/daemon.key" --tls-client-ca="$dir/ca.key"
  refused "--tls-client-ca=$dir/ca.pem: needs" --tls-client-ca="$dir/ca.pem"
  refused "--tls-peer-ca" --tls-cert="$dir/daemon.pem" --tls-key="$dir/daemon.key" --peers=10.0.0.0/8
  refused --advertise --advertise=0.0.0.0:50051
  refused --advertise --advertise=prefill-3
}

# handed_over ARGUMENT...: requests go from a to b over gRPC, every byte right.
handed_over() {
  expect_code 0 ctl "${address[a]}" "$@" replay --disaggregate --device=host --trace="$(short)" --json \
    --requests="$(volume 4 2)" --layers=2
  is "$(field "$dir/out" .mismatches) == 0 and $(field "$dir/out" .regions_compared) > 0"
  is "$(field "$dir/out" .handoffs) == $(field "$dir/out" .requests) > 0"
  is "$(field "$dir/out" .transports.gRPC) == $(field "$dir/out" .handoffs)"
}

# shellcheck disable=SC2046
test_hand_offs_over_mutual_tls() {
  certificates
  on a $(mutual daemon)
  on b $(mutual daemon) --peers=127.0.0.1
  handed_over $(as client) --decode-address="${address[b]}" --decode-device=host
  handed_over $(as client) --summaryd="$summaryd"
  expect_code 0 "$summaryctl" $(as client) handoff-bench --from="${address[a]}" --to="${address[b]}" \
    --from-device=host --to-device=host --tokens=1030 --requests=2 --layers=3 --json
  is "$(field "$dir/out" .wrong_blocks) == 0 and $(field "$dir/out" .requests) == 2"
}

# shellcheck disable=SC2046
test_a_peer_with_another_certificate_is_not_pulled_from() {
  certificates
  on a $(mutual daemon)
  on b $(mutual daemon) --peers=127.0.0.1 --tls-peer-ca="$dir/other_ca.pem"
  expect_code 1 ctl "${address[a]}" $(as client) replay --disaggregate --device=host --trace="$(short)" \
    --requests=1 --decode-address="${address[b]}" --decode-device=host
  expect_text PEER_UNREACHABLE
  expect_text "certificate verify failed"
  ctl "${address[b]}" $(as client) stats --json > "$dir/stats"
  is "$(field "$dir/stats" .handoff.accepted) == 0 and $(field "$dir/stats" .handoff.failed) == 1"
}

test_a_wildcard_is_not_where_a_daemon_is_reached() {
  start a --listen=0.0.0.0:0
  until [[ -n $(port a) ]]; do kill -0 "${pid[a]}" || die "daemon a has ended"; done
  address[a]=127.0.0.1:$(port a)
  on b --peers=127.0.0.1
  expect_code 1 ctl "${address[a]}" replay --disaggregate --device=host --trace="$(short)" --requests=1 \
    --decode-address="${address[b]}" --decode-device=host
  expect_text "it needs --advertise"
  expect_text "without --advertise" "$dir/a.log"
}

# shellcheck disable=SC2046
test_a_certificate_for_another_host_is_told() {
  certificates
  on a $(mutual elsewhere)
  expect_text "the certificate in $dir/elsewhere.pem is not for 127.0.0.1" "$dir/a.log"
}

run_tests
