#!/bin/bash
# From a fresh Debian 12 to a daemon that serves real traffic: installs what is missing, builds, starts
# summaryd on a Unix socket (first CUDA device if there is one, else host memory), replays an excerpt of an
# hour of chat traffic, prints the report and stops the daemon.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'TEXT'
usage: ./quickstart.sh [--keep]
  --keep   leave the daemon running, and say where it listens and how to stop it
TEXT
}

keep=false
for arg in "$@"; do
  case $arg in
    --keep) keep=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "error: unknown argument '$arg'" >&2
      usage >&2
      exit 2
      ;;
  esac
done

say() { echo "==> $*"; }

third_party/install.sh

say "building summaryd and summaryctl (the first time takes some minutes)"
start=$SECONDS
quiet=()
[[ -t 2 ]] || quiet=(--color=no --curses=no --noshow_progress "--ui_event_filters=-info,-stdout")
bazel build "${quiet[@]}" --show_result=0 //server:summaryd //client:summaryctl
say "built in $((SECONDS - start)) s"

folder=$(mktemp -d /tmp/summaryd-XXXXXX)
address=unix:$folder/summaryd.sock
log=$folder/summaryd.log
daemon=

stop() {
  status=$?
  if [[ -n $daemon ]] && kill -TERM "$daemon" 2> /dev/null; then
    wait "$daemon" || status=$?
    say "the daemon has stopped"
  fi
  if [[ $status -ne 0 && -s $log ]]; then
    echo "error: exit status $status; the daemon's log ends with" >&2
    tail -n 20 "$log" >&2
  fi
  rm -rf "$folder"
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Copies: a later build replaces the files under bazel-bin while a kept daemon still runs.
cp bazel-bin/server/summaryd bazel-bin/client/summaryctl "$folder/"
# setsid: neither Ctrl-C here nor, with --keep, the end of this terminal reaches it.
setsid "$folder/summaryd" --listen="$address" > "$log" 2>&1 < /dev/null &
daemon=$!

# ping waits until the daemon answers; a daemon that cannot start ends first.
"$folder/summaryctl" --address="$address" ping > "$folder/ping" 2>&1 &
ping=$!
if ! wait -n -p first "$daemon" "$ping" || [[ $first != "$ping" ]]; then
  kill "$ping" 2> /dev/null || true
  cat "$folder/ping" >&2
  echo "error: summaryd did not start" >&2
  exit 1
fi
say "summaryd listens on $address"
cat "$folder/ping"

say "replaying an excerpt of real traffic"
"$folder/summaryctl" --address="$address" replay --trace=tests/data/traces/excerpt.jsonl

if $keep; then
  trap - EXIT
  disown "$daemon"
  say "summaryd keeps running (pid $daemon, log $log). Try"
  echo "      $folder/summaryctl --address=$address caches"
  echo "    and stop it with"
  echo "      kill $daemon; tail --pid=$daemon -f /dev/null; rm -r $folder"
fi
