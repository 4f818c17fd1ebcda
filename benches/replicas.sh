#!/usr/bin/env bash
# Plays the Mooncake conversation trace with one picker and with eight, which share state over a bus or share nothing, and prints the tables of replicas.md.
# About a minute. Needs the trace as policies.sh does.
set -euo pipefail
trace=$(realpath "${1:?usage: benches/replicas.sh TRACE}")
cd "$(dirname "$0")/.."
cargo build --release --locked --bin attache
attache=${CARGO_TARGET_DIR:-target}/release/attache
rate=3.4 # requests per second: the mean of the trace

play() {
  "$attache" replay --trace "$trace" --compare '' "$@"
}

echo "Arrival times at random, $rate requests per second:"
play --poisson "$rate" --pickers 1,2,4,8 --sync 5ms,off
for loss in 1% 10%; do
  echo "The same with a bus that loses $loss of its messages:"
  play --poisson "$rate" --pickers 1,8 --sync 5ms --sync-loss "$loss"
done
echo "Arrival times of the trace, which are multiples of 3 s:"
play --pickers 1,2,4,8 --sync 5ms,off
