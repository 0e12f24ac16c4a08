#!/bin/bash
# certificates.sh FOLDER: makes certificates and keys for a test, good for a day: NAME.pem and NAME.key.
#   ca, other_ca  sign the rest
#   daemon        by ca, for 127.0.0.1
#   client        by ca
#   elsewhere     by ca, for a host of another name
#   stranger      by other_ca, for 127.0.0.1
set -euo pipefail
cd "$1"

# make NAME EXTENSION ARGUMENT...
make() {
  local name=$1 extension=$2
  shift 2
  openssl req -x509 -config <(printf '[req]\ndistinguished_name = dn\n[dn]\n') -newkey ec \
    -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 1 -subj "/CN=$name" -addext "$extension" "$@" \
    -keyout "$name.key" -out "$name.pem" 2> log || {
    cat log >&2
    exit 1
  }
}
by() { echo "-CA $1.pem -CAkey $1.key"; }

make ca basicConstraints=critical,CA:TRUE
make other_ca basicConstraints=critical,CA:TRUE
# shellcheck disable=SC2046  # two flags
{
  make daemon subjectAltName=IP:127.0.0.1 $(by ca)
  make client subjectAltName=DNS:client $(by ca)
  make elsewhere subjectAltName=DNS:elsewhere $(by ca)
  make stranger subjectAltName=IP:127.0.0.1 $(by other_ca)
}
