#!/bin/sh
# Runs every fuzz target for SECONDS seconds and fails on the first crash; the input that crashed stays in artifacts/.
#
#   tests/fuzz/run.sh SECONDS [TARGET…]
#
# Works with a stable compiler: RUSTC_BOOTSTRAP=1 lets cargo-fuzz pass its coverage flags, and no sanitizer is needed where
# `unsafe` is forbidden. cargo-fuzz is installed into CARGO_FUZZ_ROOT (target/tools unless set) when it is missing.
set -eu
cd "$(dirname "$0")"
seconds=${1:?usage: run.sh SECONDS [TARGET…]}
shift

root=${CARGO_FUZZ_ROOT:-$PWD/target/tools}
PATH=$root/bin:$PATH
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked --quiet --root "$root"

export RUSTC_BOOTSTRAP=1
[ $# -gt 0 ] || set -- $(cargo fuzz list --fuzz-dir .)
cargo fuzz build --fuzz-dir . --sanitizer none
# A fuzzer uses one core, so there are as many at a time as cores.
printf '%s\n' "$@" | xargs -n 1 -P "$(getconf _NPROCESSORS_ONLN)" sh -c '
    seconds=$1 target=$2 log=$(mktemp)
    trap "rm -f $log" EXIT
    mkdir -p "corpus/$target" "seeds/$target"
    cargo fuzz run --fuzz-dir . --sanitizer none "$target" "corpus/$target" "seeds/$target" -- \
        -max_total_time="$seconds" -max_len=8192 -timeout=5 -rss_limit_mb=2048 -print_final_stats=1 >"$log" 2>&1 || {
        cat "$log" >&2
        exit 1
    }
    echo "fuzzed $target for $seconds s: $(sed -n "s/^stat::number_of_executed_units: *//p" "$log") inputs, no crash"
' fuzz "$seconds"
