#!/bin/bash
# Starting, refusing to start, and what a start leaves behind.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"

# refused ARGUMENT...: the daemon ends with 1 at once.
refused() { expect_code 1 timeout 30 "$summaryd" "$@"; }
misused() { expect_code 2 timeout 30 "$summaryd" "$@"; }

test_second_daemon_on_a_socket_is_refused() {
  serve first "unix:$dir/s"
  refused --listen="unix:$dir/s"
  expect_text "$dir/s"
  expect_text "another"
  expect_code 0 ctl "unix:$dir/s" ping
  stop first
  [[ $code -eq 0 ]] || die "exit code $code"
}

test_stale_socket_is_replaced() {
  serve first "unix:$dir/s"
  stop first KILL
  [[ -S $dir/s ]] || die "no stale socket to replace"
  serve second "unix:$dir/s"
}

test_socket_is_free_again_after_a_stop() {
  serve first "unix:$dir/s"
  stop first
  serve second "unix:$dir/s"
}

test_a_file_that_is_no_socket_is_kept() {
  echo precious > "$dir/s"
  refused --listen="unix:$dir/s"
  expect_text "$dir/s"
  [[ $(cat "$dir/s") == precious ]] || die "the file was touched"
}

test_socket_is_its_owners_alone() {
  umask 000
  serve daemon "unix:$dir/s"
  [[ $(stat -c %a "$dir/s") == 600 ]] || die "mode $(stat -c %a "$dir/s")"
}

test_socket_in_a_missing_folder_is_refused() {
  refused --listen="unix:$dir/missing/s"
  expect_text "$dir/missing"
}

test_socket_path_too_long_is_refused() {
  misused --listen="unix:$dir/$(printf 'x%.0s' {1..120})"
  expect_text 107
}

test_descriptors_are_limited_by_the_hard_limit() {
  ulimit -Sn 256
  serve daemon "unix:$dir/s"
  [[ $(awk '/^Max open files/ { print $4 }' "/proc/${pid[daemon]}/limits") == "$(ulimit -Hn)" ]] ||
    die "$(grep '^Max open files' "/proc/${pid[daemon]}/limits")"
}

test_several_addresses() {
  start daemon --listen="unix:$dir/a" --listen="unix:$dir/b" --listen=127.0.0.1:0
  ready daemon "unix:$dir/a"
  expect_code 0 ctl "unix:$dir/b" ping
  expect_code 0 ctl "127.0.0.1:$(port daemon)" ping
}

test_port_in_use_is_refused() {
  start first --listen="unix:$dir/s" --listen=127.0.0.1:0
  ready first "unix:$dir/s"
  local port
  port=$(port first)
  refused --listen="127.0.0.1:$port"
  expect_text "$port"
  expect_code 0 ctl "127.0.0.1:$port" ping
}

# listens ADDRESS PORT: something listens on a TCP address that matches, in the kernel's hexadecimal.
listens() { grep -qE "^ *[0-9]+: $1:$(printf %04X "$2") [0-9A-F:]+ 0A" /proc/net/tcp /proc/net/tcp6; }

test_loopback_only_unless_told_otherwise() {
  start near --listen="unix:$dir/n" --listen=:0
  ready near "unix:$dir/n"
  listens '[0F]*0100007F' "$(port near)" || die "not on 127.0.0.1: $(cat "$dir/near.log")"
  ! listens '0+' "$(port near)" || die "on all addresses: $(cat "$dir/near.log")"
  start wide --listen="unix:$dir/w" --listen=0.0.0.0:0
  ready wide "unix:$dir/w"
  listens '[0F]*0+' "$(port wide)" || die "not on all addresses: $(cat "$dir/wide.log")"
}

test_budget_is_obeyed() {
  local address=unix:$dir/s cache=(create-cache --device=host --layers=1 --block-size=64 --ring-blocks=2 --capacity=8)
  serve daemon "$address" --host-bytes=1MiB
  expect_code 1 ctl "$address" "${cache[@]}" --name=big --blocks=1024 # 2 MiB of pages
  expect_text MEMORY_BUDGET_EXCEEDED
  expect_code 0 ctl "$address" "${cache[@]}" --name=small --blocks=128
  expect_code 1 ctl "$address" "${cache[@]}" --name=second --blocks=400
  expect_code 0 ctl "$address" delete-cache --name=small
  expect_code 0 ctl "$address" "${cache[@]}" --name=second --blocks=400
}

test_a_closed_log_does_not_end_it() {
  mkfifo "$dir/log"
  "$summaryd" --listen="unix:$dir/s" > "$dir/log" 2>&1 < /dev/null &
  pid[daemon]=$!
  head -n 1 < "$dir/log" > "$dir/daemon.log" # the reader ends before the daemon does
  ready daemon "unix:$dir/s"
  stop daemon
  [[ $code -eq 0 ]] || die "exit code $code"
}

test_bad_flags_end_with_2() {
  misused --no-such-flag
  expect_text no-such-flag
  misused --host-bytes=much --listen="unix:$dir/s"
  expect_text host-bytes
  misused --host-bytes=-1 --listen="unix:$dir/s"
  misused --listen=
  misused --listen=127.0.0.1:notaport
  misused --listen="unix:$dir/%73"
  expect_code 2 "$summaryctl" --no-such-flag ping
  expect_code 2 "$summaryctl" --address="unix:$dir/s" no-such-command
  expect_text no-such-command
  expect_code 2 "$summaryctl" --address="unix:$dir/s" create-cache --layers=two
}

test_unreadable_files_are_named() {
  local address=unix:$dir/s
  serve daemon "$address"
  expect_code 1 ctl "$address" replay --trace="$dir/missing.jsonl"
  expect_text "$dir/missing.jsonl"
  echo '{"timestamp": 0, "input_length": ' > "$dir/broken.jsonl"
  expect_code 1 ctl "$address" replay --trace="$dir/broken.jsonl"
  expect_text "$dir/broken.jsonl"
  expect_code 1 ctl "$address" conformance "$dir/missing.safetensors"
  expect_text "$dir/missing.safetensors"
  head -c 1000 "$data/golden/decode_b64.safetensors" > "$dir/cut.safetensors"
  expect_code 1 ctl "$address" conformance "$dir/cut.safetensors"
  expect_text "$dir/cut.safetensors"
  expect_code 0 ctl "$address" ping
}

run_tests
