//! The output of `attache replay --list`.

use crate::plugins::registry;
use attache_sim::profiles;
use attache_workload::synthetic::WORKLOADS;
use std::fmt::Write;

/// Workloads, profiles and policies, each with a sentence.
pub(super) fn all() -> String {
    let mut out = String::from("Workloads (--workload name:key=value,…):\n");
    for workload in WORKLOADS {
        let kind = if workload.is_closed { "closed loop" } else { "open loop" };
        let _ = writeln!(out, "  {}: {} ({kind}; {})", workload.name, workload.summary, workload.source);
        for parameter in workload.parameters {
            let _ = writeln!(out, "      {}={}  {}", parameter.name, parameter.default, parameter.meaning);
        }
    }
    out.push_str("\nEngine profiles (--profile name[@speed][:role][*number],… or FILE.yaml in place of a name):\n");
    profiles::list().lines().for_each(|line| {
        let _ = writeln!(out, "  {line}");
    });
    out.push_str(
        "\nPolicies (--compare name or name={parameters}; +late-binding behind it: while the pool is full \
                  requests wait, as with\n",
    );
    out.push_str("`flowControl: {enabled: true}`; +at-once: they do not, whatever the configuration says):\n");
    for strategy in registry().strategies() {
        let _ = writeln!(out, "  {}: {}", strategy.name, strategy.summary);
    }
    out
}
