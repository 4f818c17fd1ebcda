//! Judges the servers of a pool against each other, and against the models that the pool names.

use super::probe::Probe;
use crate::finding::{Check, Report};
use attache_config::settings::PoolSettings;
use attache_pool::{Counter, Histogram};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

static MODELS: Check = Check {
    id: "pool-models",
    about: "the servers list the models that the pool names",
    why: "A server answers 404 for a model that it does not have.",
};
static SAME_MODELS: Check = Check {
    id: "pool-same-models",
    about: "all servers of the pool list the same models and adapters",
    why: "The picker takes the servers of a pool for equal, and may choose one without the model.",
};
static ADAPTERS: Check = Check {
    id: "server-adapters",
    about: "listed LoRA adapters against the slots of the server",
    why: "Adapters beyond the slots are loaded and dropped in turn, and their requests wait.",
};
static SAME_VERSION: Check = Check {
    id: "pool-same-version",
    about: "all servers of the pool have the same version",
    why: "Versions differ in chat templates, block hashes and events, so caches may not match.",
};
static SAME_BLOCKS: Check = Check {
    id: "pool-same-block-size",
    about: "all servers of the pool have the same block size",
    why: "The index has one block size; servers with another one are treated as if they had no events.",
};
static SAME_HASHES: Check = Check {
    id: "pool-same-hashes",
    about: "all servers of the pool hash blocks alike",
    why: "Servers that share blocks, and other readers of their events, find nothing under another hash.",
};
static SAME_LENGTH: Check = Check {
    id: "pool-same-length",
    about: "all servers of the pool have the same `max_model_len`",
    why: "A prompt that fits one server is rejected by another with status 400.",
};
static PROCESS: Check = Check {
    id: "server-same-process",
    about: "no server is in the pool under two addresses",
    why: "Its load is counted twice and its cache is searched in two places.",
};

pub(super) const CHECKS: &[&Check] =
    &[&MODELS, &SAME_MODELS, &ADAPTERS, &SAME_VERSION, &SAME_BLOCKS, &SAME_HASHES, &SAME_LENGTH, &PROCESS];

/// Most names that a finding lists.
const MAX_SHOWN: usize = 5;

pub(super) fn judge(probes: &[Probe], pool: &PoolSettings, report: &mut Report) {
    let subject = format!("pool {}", pool.name);
    models(&subject, probes, &named(pool), report);
    same_models(&subject, probes, report);
    adapters(probes, report);
    let version = |probe: &Probe| probe.version.clone();
    let fix = "bring all servers to one version; during a rollout, wait until it ends";
    same(&SAME_VERSION, &subject, ("version", fix), &groups(probes, version), report);
    let blocks = |probe: &Probe| Some(probe.values()?.block_size?.to_string());
    let fix = "start all servers of the pool with the same `--block-size`";
    same(&SAME_BLOCKS, &subject, ("block size", fix), &groups(probes, blocks), report);
    let hash = |probe: &Probe| probe.metrics.as_ref()?.cache.hash_algorithm.clone();
    let fix = "start all servers with the same `--prefix-caching-hash-algo` and `PYTHONHASHSEED`";
    same(&SAME_HASHES, &subject, ("hash algorithm", fix), &groups(probes, hash), report);
    let fix = "start all servers with the same `--max-model-len`, or put them into pools of their own";
    same(&SAME_LENGTH, &subject, ("max_model_len", fix), &groups(probes, max_model_len), report);
    processes(probes, report);
}

/// The servers' names of the models that the pool names: conditions, default model and targets of rewrites.
fn named(pool: &PoolSettings) -> BTreeSet<String> {
    let rewrites = &pool.rewrites;
    let is_rewritten = |model: &String| rewrites.exact.contains_key(model) || !rewrites.any.is_empty();
    let asked = pool.matches.models.iter().chain(&pool.default_model).filter(|model| !is_rewritten(model));
    let targets = rewrites.exact.values().flatten().chain(&rewrites.any);
    let targets = targets.map(|target| target.model.to_string());
    asked.cloned().chain(targets).collect()
}

/// The addresses of the servers for each value that they have.
fn groups(probes: &[Probe], value: impl Fn(&Probe) -> Option<String>) -> BTreeMap<String, Vec<String>> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for probe in probes {
        if let Some(value) = value(probe) {
            groups.entry(value).or_default().push(probe.member.spec.address.to_string());
        }
    }
    groups
}

fn list(names: &[String]) -> String {
    let shown = names.iter().take(MAX_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > MAX_SHOWN { format!("{shown} and {} more", names.len() - MAX_SHOWN) } else { shown }
}

fn same(
    check: &'static Check,
    subject: &str,
    (what, fix): (&str, &str),
    groups: &BTreeMap<String, Vec<String>>,
    report: &mut Report,
) {
    if groups.len() > 1 {
        let said = groups.iter().map(|(value, servers)| format!("{value} on {}", list(servers)));
        let found = format!("{what} differs: {}", said.collect::<Vec<_>>().join("; "));
        report.push(check.warning(subject, found, fix));
    } else if let Some((value, servers)) = groups.iter().next().filter(|(_, servers)| servers.len() > 1) {
        report.push(check.ok(subject, format!("{what} is {value} on {} servers", servers.len())));
    }
}

fn models(subject: &str, probes: &[Probe], named: &BTreeSet<String>, report: &mut Report) {
    let lists: Vec<_> = probes.iter().filter_map(|probe| Some((probe, probe.model_list()?))).collect();
    if lists.is_empty() {
        return;
    }
    for model in named {
        let without: Vec<String> = lists
            .iter()
            .filter(|(_, list)| list.get(model).is_none())
            .map(|(probe, _)| probe.member.spec.address.to_string())
            .collect();
        let fix = format!(
            "start the servers with `--served-model-name {model}` or load the adapter, or correct `match.models`"
        );
        report.push(match without.len() {
            0 => MODELS.ok(subject, format!("all servers list {model}")),
            n if n == lists.len() => MODELS.error(subject, format!("no server lists the model {model}"), fix),
            _ => MODELS.warning(subject, format!("the model {model} is not listed by {}", list(&without)), fix),
        });
    }
}

fn same_models(subject: &str, probes: &[Probe], report: &mut Report) {
    let ids = |probe: &Probe| probe.model_list().map(|list| list.ids().map(str::to_owned).collect::<BTreeSet<_>>());
    let lists: Vec<_> = probes.iter().filter_map(|probe| Some((probe, ids(probe)?))).collect();
    let union: BTreeSet<String> = lists.iter().flat_map(|(_, ids)| ids.iter().cloned()).collect();
    let mut is_equal = lists.len() > 1;
    for (probe, ids) in &lists {
        let missing: Vec<String> = union.difference(ids).cloned().collect();
        if !missing.is_empty() {
            is_equal = false;
            report.push(SAME_MODELS.warning(
                &probe.member.subject,
                format!("does not list {}, which other servers of the pool do", list(&missing)),
                "load the same adapters on all servers (`/v1/load_lora_adapter`, `--lora-modules`), or use a pool for each \
                 base model",
            ));
        }
    }
    if is_equal {
        report.push(SAME_MODELS.ok(subject, format!("{} servers list the same models", lists.len())));
    }
}

/// Adapters are models with a parent.
fn adapters(probes: &[Probe], report: &mut Report) {
    for probe in probes {
        let (Some(list), Some(lora)) = (probe.model_list(), probe.values().and_then(|m| m.lora.as_ref())) else {
            continue;
        };
        let is_adapter = |id: &&str| list.get(id).and_then(|entry| entry.get("parent")).is_some_and(Value::is_string);
        let adapters = list.ids().filter(is_adapter).count();
        let slots = usize::try_from(lora.max).unwrap_or(usize::MAX);
        if slots == 0 || adapters == 0 {
            continue;
        }
        let found = format!("{adapters} adapters are loaded, {slots} fit into one batch (`max_lora`)");
        report.push(match adapters > slots {
            true => ADAPTERS.warning(&probe.member.subject, found, format!("raise `--max-loras` to {adapters}")),
            false => ADAPTERS.ok(&probe.member.subject, found),
        });
    }
}

/// The longest prompt with response, of the base models that a server lists.
fn max_model_len(probe: &Probe) -> Option<String> {
    let list = probe.model_list()?;
    let lengths = list.ids().filter_map(|id| list.get(id)?.get("max_model_len")?.as_u64());
    lengths.max().map(|length| length.to_string())
}

/// Two addresses are one process if all its counters are equal, with a sum of times above 0. Such sums have so many
/// digits that two processes never have the same one.
fn processes(probes: &[Probe], report: &mut Report) {
    let busy = |probe: &&Probe| {
        let times =
            [Histogram::Queue, Histogram::FirstToken, Histogram::Prefill, Histogram::Decode, Histogram::Latency];
        let sum = |m: &attache_pool::EndpointMetrics| {
            times.into_iter().filter_map(|histogram| m.counters.get(Counter::Sum(histogram))).sum::<f64>()
        };
        probe.values().is_some_and(|metrics| sum(metrics) > 0.0)
    };
    let known: Vec<&Probe> = probes.iter().filter(busy).collect();
    for (i, probe) in known.iter().enumerate() {
        let is_same = |other: &&&Probe| {
            let identity = |p: &Probe| p.values().map(|m| (m.process_start, m.counters));
            identity(other) == identity(probe)
        };
        if let Some(other) = known.iter().take(i).find(is_same) {
            report.push(PROCESS.error(
                &probe.member.subject,
                format!("is the same process as {}: all its counters are equal", other.member.spec.address),
                "remove one of the two addresses from `endpoints`",
            ));
        }
    }
}
