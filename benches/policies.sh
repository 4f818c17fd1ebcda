#!/usr/bin/env bash
# Plays every policy that means something for whole requests on servers that nobody has measured (not `pd`, the `slo` family, `fallback` and
# `least-utilization`) on every workload and writes benches/policies.md. Takes a minute or two. Needs the Mooncake conversation trace
# (github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl) as its argument.
set -euo pipefail
trace=$(realpath "${1:?usage: benches/policies.sh TRACE}")
cd "$(dirname "$0")/.."
cargo build --release --locked --bin attache
parts=$(mktemp -d)
trap 'rm -r "$parts"' EXIT
ln -s "$trace" "$parts/conversation_trace.jsonl"

policies=least-request,pipeline,prefix-cache,random,power-of-two,round-robin,least-busy-time,least-latency,prefix-cache-preble,dynamo-kv,cache-aware,chwbl,prefix-hash,prefix-affinity,session-affinity,throughput,least-kv-cache,least-gpu-cache,load-balance,vtc-basic
part=0
play() {
  target/release/attache replay --compare "$policies" --markdown "$parts/$part.md" "$@" >/dev/null
  part=$((part + 1))
}
conversations() {
  play --trace "$parts/conversation_trace.jsonl" --profile prefill-6000 --metrics-every 1s --compare llm-d=benches/policies/llm-d-6000.yaml "$@"
}
conversations --endpoints 8 --speed 1,1.15
conversations --endpoints 16 --speed 1.8
llm_d=llm-d=benches/policies/llm-d-16700.yaml
play --profile qwen3-32b-2xh100 --endpoints 8 --compare "$llm_d" --workload burst --workload hot-prefix --workload lora-mix \
  --workload multi-turn --workload shared-prefix --workload unique
play --profile 8b-h100 --endpoints 8 --compare "$llm_d" --workload agentic-code --workload interactive-chat --workload long-short
play --profile qwen3-32b-2xh100 --endpoints 8 --compare "$llm_d" --workload shared-prefix-ladder

# What waiting for a turn buys, beside the same policy without it.
late_binding() {
  target/release/attache replay --trace "$parts/conversation_trace.jsonl" --profile prefill-6000 --metrics-every 1s \
    --compare predicted-latency+late-binding --markdown "$parts/$part.md" "$@" >/dev/null
  part=$((part + 1))
}
for seed in 1 2 3; do late_binding --endpoints 8 --speed 1.15 --seed "$seed"; done

{
  echo "# What each policy buys"
  echo
  echo "Written by \`benches/policies.sh TRACE\`; virtual time and, where nothing is said, seed 1, so it comes out the same everywhere. What it shows, and what was tried, is in"
  echo "[experiments.md](experiments.md#what-a-policy-buys). \`pipeline\` is GIE's default (queue 2, KV cache 2, prefix 3), \`llm-d\` its newest default"
  echo "(affinity filter and token load). All of them read the same approximate index."
  for ((i = 0; i < part; i++)); do
    echo
    sed "s|$parts/conversation_trace.jsonl|conversation_trace.jsonl|; s| --markdown [^ ]*||" "$parts/$i.md"
  done
} >benches/policies.md
