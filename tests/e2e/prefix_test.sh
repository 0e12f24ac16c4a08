#!/bin/bash
# The page store: engines that start from each other's prefixes, restarts, kills, and what an operator sees of it.
# shellcheck disable=SC2317  # run_tests calls the functions
# shellcheck source=tests/e2e/lib.sh
source "$TEST_SRCDIR/$TEST_WORKSPACE/tests/e2e/lib.sh"
churn=$TEST_SRCDIR/$TEST_WORKSPACE/tests/churn/churn
trace=$data/traces/excerpt.jsonl

# replay ADDRESS ARGUMENT...: the report is in $dir/out; no byte may differ.
replay() {
  local address=$1
  shift
  expect_code 0 ctl "$address" replay --prefix --trace="$trace" --cache-bytes=64MiB --json "$@"
  [[ $(field "$dir/out" .mismatches) == 0 ]] || die "mismatches: $(cat "$dir/out")"
}

test_a_second_run_starts_from_what_the_first_has_published() {
  local address=unix:$dir/s
  serve daemon "$address" --host-store-bytes=64MiB
  replay "$address" --requests="$(volume 20 8)" --layers=2 --concurrency=1
  local first second
  first=$(field "$dir/out" .hit_rate)
  is "$first == $(field "$dir/out" .infinite_hit_rate)" # with room for everything
  replay "$address" --requests="$(volume 20 8)" --layers=2 --concurrency=1
  second=$(field "$dir/out" .hit_rate)
  is "$first < 0.5 and $second > 0.97"
  is "$(field "$dir/out" .loaded_bytes) > 0 and $(field "$dir/out" .loaded_regions_compared) > 0"
  is "$(field "$dir/out" .prefix_hit_tokens) > 0.97 * $(field "$dir/out" .prompt_tokens)"
  expect_code 0 ctl "$address" check
  expect_text clean
  expect_code 0 ctl "$address" stats --json
  is "$(field "$dir/out" .store.pages) > 0 and $(field "$dir/out" .store.leases) == 0"
  expect_code 0 ctl "$address" stats
  expect_text store.tiers.0.capacity_bytes
  expect_code 0 ctl "$address" namespaces
  expect_text replay
}

test_another_seed_finds_nothing_of_the_first() {
  local address=unix:$dir/s
  serve daemon "$address" --host-store-bytes=64MiB
  replay "$address" --requests="$(volume 8 4)" --seed=1
  replay "$address" --requests="$(volume 8 4)" --seed=2
  is "$(field "$dir/out" .hit_rate) == $(field "$dir/out" .infinite_hit_rate)"
}

test_tiers_and_policies_serve_the_same_bytes() {
  local address policy
  for policy in lru s3fifo; do
    address=unix:$dir/$policy
    serve "$policy" "$address" --host-store-bytes=3MiB --gpu-store-bytes=1MiB --store-policy="$policy"
    replay "$address" --requests="$(volume 24 12)" --concurrency=8 --sample=24
    replay "$address" --requests="$(volume 24 12)" --concurrency=8 --sample=24
    is "$(field "$dir/out" .tiers.0.evicted_pages) > 0"
    is "$(field "$dir/out" .tiers.1.demoted_pages) > 0"
    expect_code 0 ctl "$address" check
    stop "$policy"
  done
}

test_engines_that_are_killed_and_replaced_go_on_from_the_store() {
  local address=unix:$dir/s plane requests
  requests=$(volume 18 9)
  serve daemon "$address" --host-store-bytes=64MiB
  for plane in inline shared direct; do
    replay "$address" --requests="$requests" --engines=3 --concurrency=4 --restart-engine-every=2 \
      --publish-output --k=3 --plane="$plane" --device=host --sample="$requests"
    is "$(field "$dir/out" .requests) == $requests and $(field "$dir/out" .engines) > 3"
  done
  expect_code 0 ctl "$address" caches
  ! grep -q replay "$dir/out" || die "a replay left a cache behind"
  expect_code 0 ctl "$address" check
  expect_text clean
  expect_code 0 ctl "$address" stats --json
  is "$(field "$dir/out" .store.leases) == 0"
}

test_an_engine_that_is_killed_leaves_nothing_pinned() {
  local address=unix:$dir/s replay
  serve daemon "$address" --host-store-bytes=16MiB
  "$summaryctl" --address="$address" replay --prefix --trace="$trace" --layers=4 --cache-bytes=64MiB \
    > "$dir/replay.log" 2>&1 &
  replay=$!
  until ctl "$address" stats --json > "$dir/stats" && [[ $(field "$dir/stats" .store.pages) -gt 100 ]]; do
    kill -0 "$replay" || die "the replay ended early: $(cat "$dir/replay.log")"
  done
  kill -KILL "$replay"
  wait "$replay" 2> /dev/null || true
  until ! ctl "$address" sessions | grep replay > /dev/null; do :; done
  expect_code 0 ctl "$address" check
  expect_text "0 leases: clean"
  expect_text "pinned 0"
}

test_clients_at_random_leave_the_books_in_order() {
  local address=unix:$dir/s
  serve daemon "$address" --host-store-bytes=4MiB --gpu-store-bytes=1MiB --max-lease=20
  expect_code 0 "$churn" --address="$address" --seconds="${CHURN_SECONDS-6}" --device=host
  cat "$dir/out"
  expect_text clean
}

test_a_daemon_without_a_store_says_so() {
  local address=unix:$dir/s
  serve daemon "$address"
  replay "$address" --requests=3
  is "$(field "$dir/out" .stored_pages) == 0 and $(field "$dir/out" .dropped_pages) > 0"
  expect_code 0 ctl "$address" check
}

test_a_store_that_does_not_fit_is_refused() {
  expect_code 1 timeout 30 "$summaryd" --listen="unix:$dir/s" --host-bytes=1MiB --host-store-bytes=2MiB
  expect_text MiB
  expect_code 2 timeout 30 "$summaryd" --listen="unix:$dir/s" --store-policy=random
  expect_text "lru or s3fifo"
}

run_tests
