#!/bin/bash
# Compares the page store's hit rates with those of an independent simulation of its policy (simulate_lru.py), over a
# trace whose requests come one after the other, at budgets of shares of the trace's distinct prompt blocks.
#
#   tests/bench/hit_rates.sh TRACE [REQUESTS] [SHARE...]
#
# REQUESTS: only the first so many, 0 (the default) for all. SHARES in percent, default 1 10 100. Builds the binaries
# unless $SUMMARYD and $SUMMARYCTL name some. Ends with 1 when a rate is off by more than 1 % of itself, or bytes differ.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[[ $# -ge 1 ]] || { sed -n '2,8p' "$0" | cut -c3-; exit 2; }
trace=$(realpath "$1") requests=${2-0}
shift $(($# < 2 ? $# : 2))
[[ $# -gt 0 ]] || set -- 1 10 100
page_bytes=2048 # of a block of 64 tokens and one layer

if [[ -z ${SUMMARYD-} || -z ${SUMMARYCTL-} ]]; then
  (cd "$root" && bazel build //server:summaryd //client:summaryctl)
  SUMMARYD=$root/bazel-bin/server/summaryd SUMMARYCTL=$root/bazel-bin/client/summaryctl
fi
dir=$(mktemp -d /tmp/kvs-XXXXXX)
daemon=''
stop() {
  [[ -z $daemon ]] || { kill "$daemon" && wait "$daemon"; } || true
  daemon=''
}
trap 'stop; rm -rf "$dir"' EXIT

"$root/tests/bench/simulate_lru.py" "$trace" --requests="$requests" "${@/%/%}" > "$dir/simulated"
head -n 1 "$dir/simulated"
failed=0 line=1
printf '%8s %12s %14s %10s %10s %10s %12s %10s\n' share blocks budget simulated measured off regions mismatches
for share in "$@"; do
  line=$((line + 1))
  read -r blocks simulated < <(sed -n "${line}p" "$dir/simulated" |
    python3 -c 'import json, sys; s = json.load(sys.stdin); print(s["capacity"], s["hit_rate"])')
  budget=$((blocks * page_bytes))
  "$SUMMARYD" --listen="unix:$dir/s" --host-store-bytes="$budget" > "$dir/daemon.log" 2>&1 &
  daemon=$!
  "$SUMMARYCTL" --address="unix:$dir/s" replay --prefix --trace="$trace" --requests="$requests" --layers=1 \
    --concurrency=1 --k=15 --cache-bytes=64MiB --json > "$dir/replay.json" || {
    cat "$dir/daemon.log" >&2
    exit 1
  }
  "$SUMMARYCTL" --address="unix:$dir/s" check > "$dir/check" || { cat "$dir/check" && failed=1; }
  stop
  python3 - "$dir/replay.json" "$share" "$blocks" "$budget" "$simulated" << 'PY' || failed=1
import json, sys
replay = json.load(open(sys.argv[1]))
share, blocks, budget, simulated = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
off = replay["hit_rate"] / simulated - 1
print(f'{share + " %":>8} {blocks:12,} {budget:14,} {simulated:10.5f} {replay["hit_rate"]:10.5f} {off:10.3%} '
      f'{replay["loaded_regions_compared"]:12,} {replay["mismatches"]:10,}', flush=True)
sys.exit(abs(off) > 0.01 or replay["mismatches"] > 0)
PY
done
exit "$failed"
