#!/usr/bin/env bash
# Plays every workload of policies.sh on eight servers that may share requests, split as the default decides, always, never and by llm-d's constant, each with
# five seeds, and prints the table of disaggregation.md ("All workloads"). Some minutes. Needs the Mooncake conversation trace as policies.sh does.
set -euo pipefail
trace=$(realpath "${1:?usage: benches/splits.sh TRACE}")
cd "$(dirname "$0")/.."
cargo build --release --locked --bin attache
attache=${CARGO_TARGET_DIR:-target}/release/attache
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

row() {
  local prefill=$1 decode=$2 name=$3 profile=$4
  shift 4
  for seed in 1 2 3 4 5; do
    "$attache" replay --compare '' --profile "$profile:prefill*$prefill,$profile:decode*$decode" --seed "$seed" \
      --disaggregation predicted,always,never,prefix-based:16 --json "$out/$seed.json" "$@" >/dev/null
  done
  python3 - "$out" "$name" "$prefill + $decode" <<'PYTHON'
import json, pathlib, sys

seeds = [[run["ttft_seconds"]["mean"] for run in json.load(open(file))["runs"]] for file in sorted(pathlib.Path(sys.argv[1]).iterdir())]
means = [sum(column) / len(seeds) for column in zip(*seeds)]
ratio = lambda predicted, always, never, *_: predicted / min(always, never)
predicted, *others = (f"{mean:.0f}" if mean >= 100 else f"{mean:.3f}" for mean in means)
missed = ", not met" if ratio(*means) > 1.05 else ""
single = [ratio(*run) for run in seeds]
print(f"| {sys.argv[2]} | {sys.argv[3]} | {predicted} | {ratio(*means):.2f}{missed} | {min(single):.2f} to {max(single):.2f} | {' | '.join(others)} |")
PYTHON
}

echo '| workload | servers | `predicted` | of best | by seed | `always` | `never` | `prefix-based:16` |'
echo '|---|---|---|---|---|---|---|---|'
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
