#!/usr/bin/env bash
# Plays every workload of policies.sh on eight servers that may share requests, split as the default decides, always, never and by llm-d's constant, and
# prints the table of README.md ("What a split buys"). Half a minute. Needs the Mooncake conversation trace as policies.sh does.
set -euo pipefail
trace=$(realpath "${1:?usage: benches/splits.sh TRACE}")
cd "$(dirname "$0")/.."
cargo build --release --locked --bin attache
out=$(mktemp)
trap 'rm "$out"' EXIT

row() {
  local prefill=$1 decode=$2 name=$3 profile=$4
  shift 4
  target/release/attache replay --compare '' --profile "$profile:prefill*$prefill,$profile:decode*$decode" \
    --disaggregation predicted,always,never,prefix-based:16 --json "$out" "$@" >/dev/null
  python3 - "$out" "$name" "$prefill + $decode" <<'PYTHON'
import json, sys

runs = json.load(open(sys.argv[1]))["runs"]
predicted, always, never, prefix_based = (run["ttft_seconds"]["mean"] for run in runs)
shown = [f"{mean:.0f}" if mean >= 100 else f"{mean:.3f}" for mean in (predicted, always, never, prefix_based)]
best = predicted / min(always, never)
print(f"| {sys.argv[2]} | {sys.argv[3]} | {shown[0]} | {best:.2f}{', not met' if best > 1.05 else ''} | {' | '.join(shown[1:])} |")
PYTHON
}

echo '| workload | servers | `predicted` | of best | `always` | `never` | `prefix-based:16` |'
echo '|---|---|---|---|---|---|---|'
for servers in '2 6' '4 4' '1 7'; do
  read -r prefill decode <<<"$servers"
  for name in burst hot-prefix lora-mix multi-turn shared-prefix unique; do
    row "$prefill" "$decode" "$name" qwen3-32b-2xh100 --workload "$name"
  done
  for name in agentic-code interactive-chat long-short; do
    row "$prefill" "$decode" "$name" 8b-h100 --workload "$name"
  done
  row "$prefill" "$decode" conversation_trace.jsonl prefill-6000 --metrics-every 1s --trace "$trace"
done
row 2 6 shared-prefix-ladder qwen3-32b-2xh100 --workload shared-prefix-ladder
