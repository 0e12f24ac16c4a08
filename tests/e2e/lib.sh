# Black-box suites over the real binaries. A suite sources this file, defines functions test_*, and calls
# run_tests. Each test runs by itself under `set -e` with its own folder $dir; daemons that it leaves running
# are killed and the folder is removed. Bazel gets one test case a function.
# shellcheck shell=bash disable=SC2034  # what only the suites read

summaryd=$TEST_SRCDIR/$TEST_WORKSPACE/server/summaryd
summaryctl=$TEST_SRCDIR/$TEST_WORKSPACE/client/summaryctl
data=$TEST_SRCDIR/$TEST_WORKSPACE/tests/data

die() {
  echo "FAILED: $*" >&2
  exit 1
}

# start NAME ARGUMENT...: a daemon with its log in $dir/NAME.log and its process in pid[NAME].
declare -A pid
start() {
  local name=$1
  shift
  "$summaryd" "$@" > "$dir/$name.log" 2>&1 < /dev/null &
  pid[$name]=$!
}

# ready NAME ADDRESS: waits until the daemon answers there; fails if it ends first.
ready() {
  local first='' ping
  "$summaryctl" --address="$2" ping > "$dir/ping.log" 2>&1 &
  ping=$!
  if ! wait -n -p first "${pid[$1]}" "$ping" || [[ $first != "$ping" ]]; then
    cat "$dir/$1.log" "$dir/ping.log" >&2
    die "daemon $1 does not answer on $2"
  fi
}

# serve NAME ADDRESS ARGUMENT...: start on this address, and ready.
serve() {
  local name=$1 address=$2
  shift 2
  start "$name" --listen="$address" "$@"
  ready "$name" "$address"
}

# stop NAME [SIGNAL]: sends the signal (TERM) and waits; the exit code is in $code.
stop() {
  code=0
  kill "-${2-TERM}" "${pid[$1]}"
  wait "${pid[$1]}" 2> /dev/null || code=$?
  unset "pid[$1]"
}

# ctl ADDRESS ARGUMENT...
ctl() {
  local address=$1
  shift
  "$summaryctl" --address="$address" "$@"
}

# expect_code CODE COMMAND...: runs it, output in $dir/out and shown when the exit code is another.
expect_code() {
  local want=$1 got=0
  shift
  "$@" > "$dir/out" 2>&1 < /dev/null || got=$?
  [[ $got -eq $want ]] || {
    cat "$dir/out" >&2
    die "exit code $got, expected $want: $*"
  }
}

# expect_text TEXT: in the output of the last expect_code, or in the file given as the second argument.
expect_text() {
  grep -qiF -e "$1" "${2-$dir/out}" || {
    cat "${2-$dir/out}" >&2
    die "no '$1' in this output"
  }
}

# volume PLAIN SANITIZED: a number for this build. Sanitizers look at each kind of access, not at volume, and
# each replay takes three to eight times as long.
volume() { if [[ -n ${SANITIZED-} ]]; then echo "$2"; else echo "$1"; fi; }

# short: the excerpt's requests with few output tokens, as a trace of its own.
short() {
  python3 -c 'import json, sys
for line in open(sys.argv[1]):
    if json.loads(line)["output_length"] < 60: print(line, end="")' "$data/traces/excerpt.jsonl" > "$dir/short"
  echo "$dir/short"
}

# port NAME: the TCP port that a daemon started with port 0 says it listens on.
port() { grep -oE 'listening on [^ ]*:[0-9]+' "$dir/$1.log" | head -n 1 | grep -oE '[0-9]+$'; }

# field FILE PATH: a number of the JSON object in the file, as .store.pages
field() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for name in sys.argv[2].split(".")[1:]: value = value[int(name) if name.isdigit() else name]
print(value)' "$1" "$2" || cat "$1" >&2; }

# is EXPRESSION: of numbers, as '0.5 < 0.7'
is() { python3 -c "import sys; sys.exit(not ($1))" || die "not so: $1"; }

clean_up() {
  local process
  for process in "${pid[@]}"; do
    kill -KILL "$process" || true
    wait "$process" || true
  done 2> /dev/null
  rm -rf "$dir"
}

run_tests() {
  local name rc failed=0 cases=''
  for name in $(compgen -A function test_); do
    dir=$(mktemp -d /tmp/kvs-XXXXXX)
    (
      trap clean_up EXIT
      set -euo pipefail
      "$name"
    )
    rc=$?
    if [[ $rc -eq 0 ]]; then
      echo "ok      $name"
      cases+="<testcase name=\"$name\"/>"
    else
      echo "FAILED  $name"
      cases+="<testcase name=\"$name\"><failure message=\"exit code $rc\"/></testcase>"
      failed=1
    fi
  done
  [[ -z ${XML_OUTPUT_FILE-} ]] || echo "<testsuites><testsuite name=\"${0##*/}\">$cases</testsuite></testsuites>" \
    > "$XML_OUTPUT_FILE"
  exit "$failed"
}
