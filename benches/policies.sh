#!/usr/bin/env bash
# Plays every traffic shape on three engine profiles and three pools with the default strategy and its rivals, and writes benches/policies.md: the ratio of
# each strategy to the best one for TTFT, TPOT and end-to-end latency. Virtual time: equal seeds give equal tables. Some minutes a seed on two cores.
#
#   --trace FILE       also plays the Mooncake conversation trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl)
#   --seeds 1,2,3      seeds; the table has the geometric mean over them, the summary counts each scenario with each seed [default: 1]
#   --only REGEX       only scenarios whose name matches, as in `8b-h100 even`
#   --out FILE         where the page goes [default: benches/policies.md]
set -euo pipefail
usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 64
}
trace= seeds=1 only=. out=
while [ $# -gt 0 ]; do
  case $1 in
    --trace) trace=$(realpath "${2:?--trace needs a file}") ;;
    --seeds) seeds=${2:?--seeds needs a list} ;;
    --only) only=${2:?--only needs a pattern} ;;
    --out) out=$(realpath "${2:?--out needs a file}") ;;
    *) usage ;;
  esac
  shift 2
done
cd "$(dirname "$0")/.."
cargo build --release --locked --bin attache
attache=${CARGO_TARGET_DIR:-target}/release/attache
parts=$(mktemp -d)
trap 'rm -r "$parts"' EXIT

# Each with its own defaults; llm-d's strategy is told the peak prefill rate of the profile, as its guide asks for.
rivals=pipeline,prefix-cache,least-request,cache-aware,dynamo-kv,random
# The load of each profile as a part of what 8b-h100 gets: that of its prefill rate. Quiet pools get a quarter.
profiles='8b-h100 1 22600
qwen3-32b-2xh100 0.75 16700
prefill-6000 0.27 6000'
open='adapter-churn burst code-completion floor-bursts hot-prefix long-short lora-mix reasoning retrieval shared-prefix shared-prefix-ladder unique'
# Workloads that wait for responses: their load is the number of clients.
closed='agentic-code 60 1200
interactive-chat 50 1500
multi-turn 800 8000
tool-agents 128 4000'

scaled() { awk -v n="$1" -v load="$2" 'BEGIN { n *= load; printf "%d", n < 1 ? 1 : n + 0.5 }'; }

# Prints one line a scenario: its name, a tab, and the arguments of `attache replay`, with spaces between them.
scenarios() {
  local profile load rate pool servers part context name clients requests
  while read -r profile load rate; do
    for pool in even uneven quiet; do
      servers="--profile $profile --endpoints 8" part=$load
      case $pool in
        uneven) servers="--profile $profile@1.5*2,$profile*4,$profile@0.5*2" ;;
        quiet) part=$(awk -v load="$load" 'BEGIN { print load / 4 }') ;;
      esac
      servers+=" --compare llm-d=benches/policies/llm-d-$rate.yaml"
      for name in $open; do
        # Prompts of 100,000 tokens are longer than Qwen3-32B takes.
        [ "$name $profile" = 'long-short qwen3-32b-2xh100' ] && continue
        printf '%s %s %s\t%s --workload %s --speed %s\n' "$profile" "$pool" "$name" "$servers" "$name" "$part"
      done
      while read -r name clients requests; do
        context=
        [ "$profile" = qwen3-32b-2xh100 ] && [ "$name" != multi-turn ] && context=,context=40000
        clients=$(scaled "$clients" "$part")
        [ "$name" = multi-turn ] && context=,conversations=$clients
        printf '%s %s %s\t%s --workload %s:clients=%s,requests=%s%s\n' "$profile" "$pool" "$name" "$servers" "$name" "$clients" \
          "$(scaled "$requests" "$part")" "$context"
      done <<<"$closed"
      if [ -n "$trace" ]; then
        printf '%s %s %s\t%s --trace %s --speed %s\n' "$profile" "$pool" conversations "$servers" "$parts/trace.jsonl" \
          "$(awk -v load="$part" 'BEGIN { print 4.2 * load }')"
      fi
    done
  done <<<"$profiles"
}

[ -n "$trace" ] && ln -s "$trace" "$parts/trace.jsonl"
scenarios | awk -F '\t' -v only="$only" '$1 ~ only' >"$parts/scenarios"
[ -s "$parts/scenarios" ] || { echo "no scenario matches $only" >&2; exit 64; }
total=$(($(wc -l <"$parts/scenarios") * $(tr ',' '\n' <<<"$seeds" | wc -l)))
began=$SECONDS
done=0
for seed in ${seeds//,/ }; do
  number=0
  while IFS=$'\t' read -r name arguments; do
    done=$((done + 1))
    printf '\r\033[K[%d/%d, %d s] %s, seed %s' "$done" "$total" "$((SECONDS - began))" "$name" "$seed" >&2
    # shellcheck disable=SC2086  # arguments without spaces in them
    "$attache" replay --compare "$rivals" --seed "$seed" --json "$parts/$number-$seed.json" $arguments >/dev/null 2>"$parts/errors" \
      || { printf '\n' >&2; cat "$parts/errors" >&2; exit 1; }
    number=$((number + 1))
  done <"$parts/scenarios"
done
printf '\r\033[K%d runs of scenarios in %d s\n' "$total" "$((SECONDS - began))" >&2
python3 benches/policies/table.py "$parts" "$seeds" "$only" >"$parts/page.md"
cp "$parts/page.md" "${out:-benches/policies.md}"
