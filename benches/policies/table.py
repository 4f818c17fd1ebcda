"""Writes the page of benches/policies.sh from the reports of its scenarios: DIRECTORY SEEDS PATTERN."""

import json
import math
import pathlib
import sys

parts, seeds, pattern = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
names = [line.split("\t")[0] for line in (parts / "scenarios").read_text().splitlines()]
FIGURES = [("TTFT", "ttft_seconds"), ("TPOT", "tpot_seconds"), ("E2E", "latency_seconds")]
LABELS = {
    "predicted-latency": "`predicted-latency` (Attaché)",
    "pipeline": "`pipeline` (GIE)",
    "llm-d": "llm-d",
    "prefix-cache": "`prefix-cache` (AIBrix)",
    "least-request": "`least-request` (AIBrix)",
    "cache-aware": "`cache-aware` (SGLang)",
    "dynamo-kv": "`dynamo-kv` (Dynamo)",
    "random": "`random`",
}


def unanswered(run):
    return run["requests"]["refused"] + run["requests"]["lost"]


def is_more(count, other):
    """As attache::replay::report::compare::is_more: not by chance."""
    return count > other and count - other > 2 * math.sqrt(count + other)


def geometric(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def percent(part, whole):
    return f"{100 * part / whole:.0f} %"


# By scenario, seed and policy: the ratio of each figure to the best policy that answers as many requests as any.
ratios, fewer = {}, set()
for number, name in enumerate(names):
    for seed in seeds:
        runs = {run["policy"]: run for run in json.loads((parts / f"{number}-{seed}.json").read_text())["runs"]}
        least = min(map(unanswered, runs.values()))
        short = {policy for policy, run in runs.items() if is_more(unanswered(run), least)}
        fewer |= {(name, seed, policy) for policy in short}
        for figure, key in FIGURES:
            means = {policy: run[key]["mean"] for policy, run in runs.items() if run[key]["mean"]}
            best = min((mean for policy, mean in means.items() if policy not in short), default=None)
            for policy, mean in means.items():
                if best:
                    ratios[name, seed, policy, figure] = mean / best
policies = [policy for policy in LABELS if any(key[2] == policy for key in ratios)]

print("# What each strategy buys")
print()
print("Written by `benches/policies.sh`; virtual time, so equal seeds give equal tables. Seeds: " + ", ".join(seeds) + ".")
print("What it shows, and what was tried, is in [experiments.md](experiments.md).")
if pattern != ".":
    print(f"Only scenarios that match `{pattern}` are here.")
print()
print("* **Profiles**: `8b-h100`, `qwen3-32b-2xh100` and `prefill-6000`, each with the load that its prefill rate allows.")
print("  Contexts cost nothing on `prefill-6000`: its TPOT shows only how long responses wait for prompts of others.")
print("* **Pools** of eight servers: even; uneven (two of speed 1.5, four of 1, two of 0.5); quiet (even, a quarter of the load).")
print("* **Strategies** have their own defaults. llm-d's newest (affinity filter and token load) is told the profile's peak prefill.")
print("* **Figures**: ratios of means to the best strategy of the scenario. TPOT counts responses of at least 8 tokens.")
print("  † marks a strategy that left more requests unanswered than another: it counts as within nothing.")
print()
print("## Summary")
print()
print(f"{len(names)} scenarios, each with {len(seeds)} seeds." if len(seeds) > 1 else f"{len(names)} scenarios.")
print("Shares of scenarios within 2 % and 15 % of the best, worst ratio, and geometric mean.")
print()
heads = [f"{figure} {head}" for figure, _ in FIGURES for head in ("≤ 2 %", "≤ 15 %", "worst", "mean")]
print("| strategy | " + " | ".join(heads) + " |")
print("|---" * (len(heads) + 1) + "|")
for policy in policies:
    cells = []
    for figure, _ in FIGURES:
        keys = [(name, seed) for name in names for seed in seeds if (name, seed, policy, figure) in ratios]
        values = [ratios[(*key, policy, figure)] for key in keys]
        able = [ratios[(*key, policy, figure)] for key in keys if (*key, policy) not in fewer]
        within = [sum(value <= bound for value in able) for bound in (1.02, 1.15)]
        cells += [*(percent(count, len(values)) for count in within), f"{max(values):.2f}", f"{geometric(values):.3f}"]
    print(f"| {LABELS[policy]} | " + " | ".join(cells) + " |")
print()
print("## Scenarios")
print()
print("TTFT / TPOT / E2E, each by that of the best strategy; bold is the best end-to-end latency.")
print()
print("| profile, pool, traffic | " + " | ".join(LABELS[policy] for policy in policies) + " |")
print("|---" * (len(policies) + 1) + "|")
for name in names:
    table = {}
    for policy in policies:
        means = []
        for figure, _ in FIGURES:
            values = [ratios[name, seed, policy, figure] for seed in seeds if (name, seed, policy, figure) in ratios]
            means.append(geometric(values) if values else None)
        table[policy] = means
    best = min((means[2] for means in table.values() if means[2]), default=None)
    cells = []
    for policy, means in table.items():
        text = " / ".join("–" if mean is None else f"{mean:.2f}" for mean in means)
        text = f"**{text}**" if means[2] == best else text
        cells.append(text + ("†" if any((name, seed, policy) in fewer for seed in seeds) else ""))
    print(f"| {name} | " + " | ".join(cells) + " |")
