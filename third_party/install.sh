#!/bin/bash
# Installs the Debian 12 packages that are missing, and only those; does nothing (0.1 s) when all are there.
#   third_party/install.sh              what a build needs
#   third_party/install.sh test         and what test.sh needs
#   third_party/install.sh container    and what deploy/test_container.sh needs
set -euo pipefail

packages=(
  bazel-bootstrap g++ pkg-config
  libgrpc++-dev libgrpc-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libspdlog-dev libfmt-dev nlohmann-json3-dev libssl-dev zlib1g-dev libre2-dev libc-ares-dev libxxhash-dev
  libgtest-dev libgmock-dev libucx-dev
)
test_packages=(
  clang-14 libclang-rt-14-dev clang-tidy-14 clang-format-14 shellcheck openssl xz-utils python3 python3-venv
  iproute2 util-linux ucx-utils
)
container_packages=(
  buildah podman runc conmon netavark catatonit uidmap iptables mmdebstrap python3 python3-venv
)

for set in "$@"; do
  case $set in
    test) packages+=("${test_packages[@]}") ;;
    container) packages+=("${container_packages[@]}") ;;
    *)
      echo "usage: third_party/install.sh [test] [container]" >&2
      exit 2
      ;;
  esac
done

if ! command -v dpkg-query apt-get > /dev/null; then
  echo "error: this is not Debian: install the counterparts of these Debian 12 packages yourself:" >&2
  echo "  ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${Status}' "$package" 2> /dev/null || true)
  [[ $status == "install ok installed" ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo > /dev/null; then
    echo "error: packages are missing, and installing them takes root or sudo. As root, run:" >&2
    echo "  apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "installing ${#missing[@]} missing packages: ${missing[*]}"
start=$SECONDS
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Without Error-Mode=any an update that fetched nothing counts as a success. OpenJDK's installation needs the
# folder of manual pages, which slim images lack.
if ! { "${as_root[@]}" mkdir -p /usr/share/man/man1 &&
  "${as_root[@]}" apt-get update -q -o APT::Update::Error-Mode=any &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qy --no-install-recommends "${missing[@]}"; } > "$log" 2>&1 < /dev/null; then
  tail -n 25 "$log" >&2
  echo "error: the installation failed (the end of apt's output is above)" >&2
  exit 1
fi
echo "installed in $((SECONDS - start)) s"
