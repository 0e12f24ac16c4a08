#!/bin/bash
# Builds the image and runs it for real, with buildah and podman in a store of its own (no engine, no
# registry): size, start, a replay from a second container over the shared socket volume, the drain on
# SIGTERM, and the compose file. Takes root. The last line is 'N passed, N failed'.
#   --in-image   compile inside the image as `docker build` does, instead of handing in portable binaries
#                built here (takes some minutes)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

in_image=false
case ${1-} in
  '') ;;
  --in-image) in_image=true ;;
  *)
    echo "usage: deploy/test_container.sh [--in-image]" >&2
    exit 2
    ;;
esac

fail() {
  echo "error: $*" >&2
  echo "$passed passed, $((failed + 1)) failed"
  exit 1
}

passed=0 failed=0
check() { # check WHAT COMMAND...
  local what=$1
  shift
  if "$@" > "$work/output" 2>&1; then
    passed=$((passed + 1))
    echo "ok      $what"
  else
    failed=$((failed + 1))
    echo "FAILED  $what: $*"
    tail -n 20 "$work/output"
  fi
}

now_ms() { date +%s%3N; }

[[ $(id -u) -eq 0 ]] || fail "this takes root"
third_party/install.sh container || fail "packages are missing"

work=$(mktemp -d /tmp/kvs-XXXXXX)
address=unix:/run/summaryd/summaryd.sock
daemon=summaryd-test
# A store apart from the user's; limits and a runtime that need neither systemd nor CAP_SYS_RESOURCE.
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf
cat > "$CONTAINERS_CONF" <<TEXT
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
TEXT
cat > "$CONTAINERS_STORAGE_CONF" <<TEXT
[storage]
driver = "overlay"
graphroot = "$work/store"
runroot = "$work/run"
TEXT

cleanup() {
  podman rm -fa -t 0 > /dev/null 2>&1
  podman volume rm -fa > /dev/null 2>&1
  podman rmi -fa > /dev/null 2>&1
  umount "$work/store/overlay" 2> /dev/null
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- the image
base=localhost/debian:bookworm
sources=()
[[ ! -f /etc/apt/sources.list.d/debian.sources ]] || sources=(/etc/apt/sources.list.d/debian.sources)
start=$(now_ms)
if ! { mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  bookworm "$work/base.tar" "${sources[@]}" &&
  podman import -q "$work/base.tar" $base; } > "$work/base.log" 2>&1; then
  tail "$work/base.log"
  fail "no base image"
fi
rm -f "$work/base.tar"
echo "base image: $(($(now_ms) - start)) ms"

binaries=()
if ! $in_image; then
  bazel build --config=ci --config=portable --show_result=0 //server:summaryd //client:summaryctl \
    > "$work/bazel.log" 2>&1 || { tail -n 30 "$work/bazel.log" && fail "the portable build"; }
  mkdir "$work/binaries"
  cp bazel-bin/server/summaryd bazel-bin/client/summaryctl "$work/binaries/"
  binaries=(--build-context "binaries=$work/binaries")
fi
start=$(now_ms)
# Isolation chroot: needs no network of its own for the packages.
buildah bud --format docker --isolation chroot --build-arg BUILD_BASE=$base --build-arg RUNTIME_BASE=$base \
  "${binaries[@]}" -f deploy/Dockerfile -t summaryd . > "$work/build.log" 2>&1 ||
  { tail -n 40 "$work/build.log" && fail "the image build"; }
echo "image build: $(($(now_ms) - start)) ms"
size=$(podman image inspect --format '{{.Size}}' summaryd)
echo "image size: $((size / 1000000)) MB"
check "the image is smaller than 150 MB" test "$size" -lt 150000000

# --- the daemon, and clients in containers of their own: no privilege, no network, nothing writable but the
# socket's volume
run=(podman run --pull never --read-only --read-only-tmpfs=false --cap-drop=all
  --security-opt=no-new-privileges --network none -v "socket:/run/summaryd")
client() { # client USER ARGUMENT...
  local user=$1
  shift
  "${run[@]}" --rm --no-healthcheck --user "$user" -v "$PWD/tests/data/traces:/traces:ro" --entrypoint /usr/bin/summaryctl \
    summaryd "--address=$address" "$@"
}
podman volume create socket > /dev/null || fail "no volume"
start=$(now_ms)
check "the daemon starts" "${run[@]}" -d --name $daemon summaryd
check "and answers" podman exec $daemon /usr/bin/summaryctl --address=$address ping
echo "start to the first answer: $(($(now_ms) - start)) ms"
check "it runs as user 10001" test "$(podman top $daemon huser | tail -n 1)" = 10001
check "its health check passes" podman healthcheck run $daemon
start=$(now_ms)
check "a second container replays traffic" client 10001:10001 replay --trace=/traces/excerpt.jsonl
cat "$work/output"
echo "replay: $(($(now_ms) - start)) ms"

check "another user, even of its group, is kept out" grep PERMISSION_DENIED \
  <<< "$(client 20000:10001 ping 2>&1)"

# --- the drain
start=$(now_ms)
check "SIGTERM ends it" podman stop -t 20 $daemon
echo "stop: $(($(now_ms) - start)) ms"
check "with exit code 0" test "$(podman inspect --format '{{.State.ExitCode}}' $daemon)" = 0
podman logs $daemon 2>&1 | tail -n 5
podman rm $daemon > /dev/null

# --- the compose file
podman_compose=$(third_party/pip_tool.sh podman-compose==1.6.0 podman-compose) || fail "no podman-compose"
compose() { "$podman_compose" -p composed -f deploy/compose.yaml "$@"; }
check "compose starts both" compose up -d
check "the composed replay ends with 0" test "$(podman wait composed_replay_1)" = 0
podman logs composed_replay_1 2>&1 | tail -n 5
check "compose stops both" compose down -v

echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
