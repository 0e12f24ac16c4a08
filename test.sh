#!/bin/bash
# Installs what is missing and runs every check that needs no GPU. The last line is 'N passed, N failed':
# the test cases of the plain build, and one for each step.
#   --quick   without the sanitizers and the container
set -uo pipefail
cd "$(dirname "$0")" || exit 1

quick=false
for arg in "$@"; do
  case $arg in
    --quick) quick=true ;;
    -h | --help)
      echo "usage: ./test.sh [--quick]   (--quick: without the sanitizers and the container)"
      exit 0
      ;;
    *)
      echo "error: unknown argument '$arg'; usage: ./test.sh [--quick]" >&2
      exit 2
      ;;
  esac
done

passed=0 failed=0 times=''
started=$(mktemp)
trap 'rm -f "$started"' EXIT

step() { # step NAME COMMAND...
  local name=$1 start=$SECONDS verdict=passed seconds
  shift
  echo "=== $name"
  if "$@"; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    verdict=FAILED
  fi
  seconds=$((SECONDS - start))
  echo "=== $name: $verdict, $seconds s"
  times+=$(printf '%5d s  %-6s  %s' "$seconds" "$verdict" "$name")$'\n'
}

scripts() { find . -path ./.git -prune -o -type f \( -name '*.sh' -o -path './.ci/*' \) -print; }

sources() { # sources SUFFIX...: our files with these suffixes
  local suffix
  for suffix in "$@"; do
    find kernels server client tests third_party -type f -name "*.$suffix"
  done
}

check_format() { sources cc h cu cuh | xargs clang-format-14 --dry-run -Werror; }

check_shell() { scripts | xargs shellcheck; }

check_protos() {
  local buf
  buf=$(command -v buf || third_party/pip_tool.sh buf-bin==1.75.0 buf) && "$buf" lint proto
}

# What this configuration compiles, but for the tests and what speaks gRPC: its headers take clang-tidy 10 to
# 20 s a file.
check_tidy() {
  third_party/tools/compile_commands.py &&
    python3 -c 'import json; [print(c["file"]) for c in json.load(open("compile_commands.json"))]' |
    grep -E "^$PWD/(kernels|server|client)/" | grep -v '_test[.]' | xargs grep -L grpc |
    xargs -n 1 -P "$(nproc)" clang-tidy-14 --quiet --warnings-as-errors='*' -p . 2> /dev/null
}

bazel_test() { bazel test --config=ci "$@" //...; }

count_cases() { # of the bazel test since the start: passed and failed
  python3 - "$started" <<'PY'
import glob, os, sys
import xml.etree.ElementTree as et
since = os.path.getmtime(sys.argv[1])
passed = failed = 0
for path in glob.glob("bazel-testlogs/**/test.xml", recursive=True):
    if os.path.getmtime(path) < since:
        continue
    for case in et.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            print(f"=== skipped: {case.get('name')}: {case.find('skipped').get('message')}", file=sys.stderr)
        elif case.get("result", "completed") == "completed" and case.get("status", "run") == "run":
            passed += 1
print(passed, failed)
PY
}

step install third_party/install.sh test
[[ $failed -eq 0 ]] || { echo "0 passed, 1 failed"; exit 1; }

step format check_format
step shellcheck check_shell
step "buf lint" check_protos
step build bazel build --config=ci //...
step test bazel_test
read -r cases bad < <(count_cases)
echo "=== test cases: $cases passed, $bad failed"
step clang-tidy check_tidy
step "portable build" bazel build --config=ci --config=portable //server:summaryd //client:summaryctl
if ! $quick; then
  # One build for both. The suffix of the later configuration names the output directory: the sanitizers last.
  step "asan and ubsan" bazel_test --config=cpu --config=asan-ubsan
  if [[ $(id -u) -eq 0 ]]; then
    step container deploy/test_container.sh
  else
    echo "=== container: skipped, it takes root"
  fi
fi

printf '=== where the time went\n%s%5d s  in all\n' "$times" "$SECONDS"
echo "steps: $passed passed, $failed failed"
echo "$((cases + passed)) passed, $((bad + failed)) failed"
[[ $failed -eq 0 && $bad -eq 0 && $cases -gt 0 ]]
