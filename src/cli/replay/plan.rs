//! Parses the arguments of `attache replay`: policies, servers, changes.

use crate::plugins::registry;
use anyhow::{Context, bail, ensure};
use attache_config::document;
use attache_config::settings::{Disaggregation, PoolSettings};
use attache_config::units::parse_duration;
use attache_config::{recommended_flow, usual_flow};
use attache_disagg::Mode;
use attache_disagg::policy::default_together;
use attache_flow::PoolFlow;
use attache_pool::{EndpointSpec, Roles};
use attache_replay::legs::Patience;
use attache_replay::world::{FleetChange, TimedChange, with_role};
use attache_scheduling::registry::canonical;
use attache_scheduling::{Decider, SplitPolicy};
use attache_sim::engine::EngineConfig;
use attache_sim::profiles;
use attache_types::clock::Timestamp;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// More servers than a real pool has; each has a metrics table of its own.
pub(super) const MAX_SERVERS: usize = 10_000;

/// A policy with its name in the report.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    /// Name of the policy in the report.
    pub(super) name: String,
    /// Settings of the pool with this policy.
    pub(super) pool: PoolSettings,
}

/// Splits at commas outside of brackets and strings.
fn split(list: &str) -> Vec<&str> {
    let (mut parts, mut begin, mut depth, mut in_string, mut escaped) = (Vec::new(), 0, 0_u32, false, false);
    for (at, c) in list.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            '{' | '[' if !in_string => depth += 1,
            '}' | ']' if !in_string => depth = depth.saturating_sub(1),
            ',' if depth == 0 && !in_string => {
                parts.push(list.get(begin..at).unwrap_or_default());
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(list.get(begin..).unwrap_or_default());
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// When a policy decides, by the suffix of its name; without a suffix as configured.
#[derive(Clone, Copy, Debug)]
enum Binding {
    /// When the pool has capacity: with the configured `flowControl`, else with the recommended one.
    Late,
    /// When the request arrives.
    AtOnce,
}

impl Binding {
    const ALL: [Self; 2] = [Self::Late, Self::AtOnce];

    fn suffix(self) -> &'static str {
        match self {
            Self::Late => "+late-binding",
            Self::AtOnce => "+at-once",
        }
    }

    fn of(self, pool: PoolSettings) -> anyhow::Result<PoolSettings> {
        let flow = match (self, pool.flow.filter(PoolFlow::queues_when_saturated)) {
            (Self::AtOnce, _) => None,
            (Self::Late, Some(flow)) => Some(flow),
            (Self::Late, None) => Some(recommended_flow().context("the recommended `flowControl` can't be used")?),
        };
        Ok(PoolSettings { flow, ..pool })
    }
}

/// Flow control with another strategy than that of `base`: as configured there, else what the strategy has by default.
fn flow_of(base: &PoolSettings, strategy: &str) -> Option<PoolFlow> {
    let configured = base.flow.as_ref().filter(|flow| !flow.holds_long_prompts());
    configured.cloned().or_else(|| usual_flow(strategy))
}

/// The name in `name` and in `name={parameters}`, as the registry has it.
fn strategy_name(spelling: &str) -> &str {
    canonical(spelling.split_once('=').map_or(spelling, |(name, _)| name).trim())
}

/// Parameters in braces: JSON, or the flow style of YAML, which configuration files use.
fn parameters_of(text: &str) -> anyhow::Result<Value> {
    let node = document::parse(text.as_bytes(), &mut Vec::new()).map_err(|d| anyhow::anyhow!("{}", d.message))?;
    Ok(node.value.to_json())
}

/// The policies in `--compare`: `name` and `name={parameters}` (JSON or YAML), `label=name` and `label=file.yaml`, each
/// with an optional suffix `+late-binding` or `+at-once`, after those of the configuration itself.
///
/// # Errors
/// The invalid name, parameter or file.
pub(super) fn policies(
    base: &PoolSettings,
    compare: &[String],
    read: impl Fn(&Path) -> anyhow::Result<PoolSettings>,
) -> anyhow::Result<Vec<Policy>> {
    let mut policies = vec![Policy { name: base.strategy.clone(), pool: base.clone() }];
    for spelling in compare.iter().flat_map(|list| split(list)) {
        let (plain, binding) = match Binding::ALL.iter().find_map(|b| Some((spelling.strip_suffix(b.suffix())?, *b))) {
            Some((plain, binding)) => (plain.trim(), Some(binding)),
            None => (spelling, None),
        };
        let (name, rest) = match plain.split_once('=') {
            Some((name, rest)) => (name.trim(), Some(rest.trim())),
            None => (plain, None),
        };
        let labelled = rest.filter(|rest| registry().strategy(strategy_name(rest)).is_some());
        let (label, name, rest) = match labelled.map(|strategy| (strategy, strategy.split_once('='))) {
            Some((_, Some((strategy, parameters)))) => (Some(name), strategy.trim(), Some(parameters.trim())),
            Some((strategy, None)) => (Some(name), strategy, None),
            None => (None, name, rest),
        };
        let with_suffix = |name: &str| format!("{name}{}", binding.map_or("", Binding::suffix));
        let policy = match rest {
            Some(file) if !file.starts_with('{') => {
                let other = read(Path::new(file))?;
                // Prefix cache and discovery settings belong to the replay and are the same for all policies.
                let pool = PoolSettings {
                    prefix: base.prefix.clone(),
                    scrape: base.scrape.clone(),
                    endpoints: base.endpoints.clone(),
                    ..other
                };
                Policy { name: with_suffix(name), pool }
            }
            parameters => {
                let parameters = parameters.map(parameters_of).transpose();
                let parameters = parameters.with_context(|| {
                    format!("--compare {name}: its parameters can't be read; as in `{name}={{key: 1, other: two}}`")
                })?;
                let pool = PoolSettings {
                    flow: flow_of(base, canonical(name)),
                    strategy: canonical(name).to_owned(),
                    strategy_parameters: parameters.unwrap_or(Value::Null),
                    rules: Vec::new(),
                    by_request: None,
                    ..base.clone()
                };
                Policy { name: label.map_or_else(|| spelling.to_owned(), with_suffix), pool }
            }
        };
        let policy = match binding {
            Some(binding) => Policy { pool: binding.of(policy.pool)?, ..policy },
            None => policy,
        };
        // A repeated policy adds nothing.
        if !policies.iter().any(|p| p.name == policy.name) {
            policies.push(policy);
        }
    }
    Ok(policies)
}

/// A simulated server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SimulatedServer {
    pub(super) engine: EngineConfig,
    /// Role as in a role label; `None` for whole requests.
    pub(super) role: Option<Arc<str>>,
}

impl SimulatedServer {
    /// The endpoint as discovery reports it, with the address from `spec`.
    pub(super) fn spec(&self, spec: EndpointSpec) -> EndpointSpec {
        with_role(spec, self.role.as_ref())
    }
}

/// Whether any server computes prompts or encodes images for others.
pub(super) fn may_split(fleets: &[Vec<SimulatedServer>]) -> bool {
    let roles = |s: &SimulatedServer| s.role.as_deref().and_then(Roles::of_word).unwrap_or_default();
    fleets.iter().flatten().any(|server| roles(server).has(Roles::PREFILL) || roles(server).has(Roles::ENCODE))
}

/// Parses `--disaggregation`: `predicted`, `always`, `never`, `prefix-based:16`.
///
/// # Errors
/// If the word is invalid.
pub(super) fn decider(spelling: &str) -> anyhow::Result<Decider> {
    let form = || format!("--disaggregation `{spelling}`: predicted, always, never or prefix-based:TOKENS is allowed");
    Ok(match spelling.split_once(':') {
        None if spelling == "predicted" => Decider::Predicted,
        None if spelling == "always" => Decider::Always,
        None if spelling == "never" => Decider::Never,
        Some(("prefix-based", tokens)) => {
            Decider::PrefixBased { non_cached_tokens: tokens.parse().ok().with_context(form)?, prompt_tokens: 0 }
        }
        _ => bail!(form()),
    })
}

/// The policies, each with every one of the `deciders` in `--disaggregation` instead of its own; several
/// deciders add their name to the policy's. Without deciders, a fleet `with_roles` uses the defaults for
/// settings that its configuration lacks.
///
/// # Errors
/// If a word is invalid.
pub(super) fn split_by(policies: Vec<Policy>, deciders: &[String], with_roles: bool) -> anyhow::Result<Vec<Policy>> {
    let splitting = |policy: &Policy, decider: Decider| {
        let before = policy.pool.disaggregation.clone();
        let Disaggregation { split, mode } = before.unwrap_or_else(|| Disaggregation {
            split: SplitPolicy { decider, together: default_together(), whole: true, required: false },
            mode: Mode::Header { source_tokens: None },
        });
        let split = SplitPolicy { decider, ..split };
        PoolSettings { disaggregation: Some(Disaggregation { split, mode }), ..policy.pool.clone() }
    };
    if deciders.is_empty() {
        let unsaid = |policy: &Policy| with_roles && policy.pool.disaggregation.is_none();
        return Ok(policies
            .into_iter()
            .map(|p| if unsaid(&p) { Policy { pool: splitting(&p, Decider::default()), ..p } } else { p })
            .collect());
    }
    let mut all = Vec::new();
    for policy in &policies {
        for word in deciders {
            let name = if deciders.len() > 1 { format!("{}+{word}", policy.name) } else { policy.name.clone() };
            all.push(Policy { name, pool: splitting(policy, decider(word)?) });
        }
    }
    Ok(all)
}

/// Retry and hedging settings of the pool's prefill.
pub(super) fn patience(pool: &PoolSettings) -> Patience {
    match pool.disaggregation.as_ref().map(|d| &d.mode) {
        Some(Mode::Direct(direct)) => Patience { bounds: direct.bounds, fallback: direct.fallback },
        _ => Patience::default(),
    }
}

/// The servers that `8b-h100*6,small-l40s@0.5:prefill*2` stands for: profile, speed, role and number of each. The list
/// is repeated up to `count` servers, if given.
///
/// # Errors
/// If a part is invalid.
pub(super) fn servers(spelling: &str, count: Option<usize>) -> anyhow::Result<Vec<SimulatedServer>> {
    let mut servers = Vec::new();
    for part in split(spelling) {
        let (kind, number) = match part.rsplit_once('*') {
            Some((kind, n)) => (
                kind,
                n.trim().parse::<usize>().ok().with_context(|| format!("`{part}`: `{n}` is no number of servers"))?,
            ),
            None => (part, 1),
        };
        let (kind, role) = match kind.split_once(':') {
            Some((kind, role)) => (kind, Some(role.trim())),
            None => (kind, None),
        };
        if let Some(role) = role.filter(|role| Roles::of_word(role).is_none()) {
            bail!("`{part}`: `{role}` is no role; {} are allowed", Roles::words().join(", "));
        }
        let (name, speed) = match kind.split_once('@') {
            Some((name, s)) => {
                (name, s.trim().parse::<f64>().ok().with_context(|| format!("`{part}`: `{s}` is no speed"))?)
            }
            None => (kind, 1.0),
        };
        let engine = engine(name.trim())?.scaled(speed)?;
        ensure!(number <= MAX_SERVERS, "`{part}`: {number} servers, at most {MAX_SERVERS} are simulated");
        servers.extend(std::iter::repeat_n(SimulatedServer { engine, role: role.map(Arc::from) }, number));
    }
    ensure!(!servers.is_empty(), "no servers are named; a profile is needed, as in `8b-h100`");
    if let Some(count) = count {
        ensure!((1..=MAX_SERVERS).contains(&count), "{count} servers; 1 to {MAX_SERVERS} can be simulated");
        servers = servers.iter().cycle().take(count).cloned().collect();
    }
    ensure!(servers.len() <= MAX_SERVERS, "{} servers, at most {MAX_SERVERS} are simulated", servers.len());
    Ok(servers)
}

/// The engine profile of this name, or of the file with this name.
///
/// # Errors
/// If the profile is unknown or the file invalid.
pub(super) fn engine(name: &str) -> anyhow::Result<EngineConfig> {
    let is_file = Path::new(name).extension().is_some_and(|e| e == "yaml" || e == "yml");
    if !is_file {
        return Ok(profiles::by_name(name)?);
    }
    let bytes = std::fs::read(name).with_context(|| format!("the profile {name}"))?;
    profiles::file::read(&bytes).with_context(|| format!("the profile {name}"))
}

/// Parses a change: `10m lose 3`, `5m restart 0` or `1h join small-l40s`; `join` alone adds a server of the first kind.
///
/// # Errors
/// If the change is invalid.
pub(super) fn change(spelling: &str, fleet: &[SimulatedServer]) -> anyhow::Result<TimedChange> {
    let form = "a change is a moment, `lose N`, `restart N` or `join [PROFILE]`, as in `10m lose 3`";
    let mut words = spelling.split_whitespace();
    let at = words.next().context(form)?;
    let at = parse_duration(at).map_err(|e| anyhow::anyhow!("`{spelling}`: {e}"))?;
    let (what, which, more) = (words.next(), words.next(), words.next());
    ensure!(more.is_none(), "`{spelling}`: {form}");
    let server = || -> anyhow::Result<usize> {
        let number = which.and_then(|n| n.parse::<usize>().ok());
        number.with_context(|| format!("`{spelling}`: which server is not said; they are numbered from 0"))
    };
    let change = match what {
        Some("lose") => FleetChange::Lose(server()?),
        Some("restart") => FleetChange::Restart(server()?),
        Some("join") => {
            let SimulatedServer { engine, role } = match which {
                Some(profile) => one(profile)?,
                None => fleet.first().context("there is no server to be like")?.clone(),
            };
            FleetChange::Join(Box::new(engine), role)
        }
        _ => bail!("`{spelling}`: {form}"),
    };
    Ok(TimedChange { at: Timestamp(0).after(at), change })
}

/// Checks that all `changes`, in order of time, can happen to a fleet of this size.
///
/// # Errors
/// The first change that can't.
pub(super) fn possible(changes: &[TimedChange], servers: usize) -> anyhow::Result<()> {
    let (mut there, mut gone) = (servers, BTreeSet::new());
    for TimedChange { at, change } in changes {
        let at = || Duration::from_nanos(at.0);
        let which = match change {
            FleetChange::Join(..) => {
                there += 1;
                continue;
            }
            FleetChange::Lose(i) | FleetChange::Restart(i) => *i,
        };
        ensure!(
            which < there,
            "--change after {:?}: there is no server {which}; there are {there}, numbered from 0",
            at()
        );
        ensure!(!gone.contains(&which), "--change after {:?}: server {which} was lost before", at());
        if matches!(change, FleetChange::Lose(_)) {
            gone.insert(which);
        }
    }
    Ok(())
}

fn one(profile: &str) -> anyhow::Result<SimulatedServer> {
    servers(profile, Some(1))?.into_iter().next().context("no server is named")
}

/// Block size of the servers' KV events, tokens.
///
/// # Errors
/// If servers have different block sizes: prompts have only one.
pub(super) fn block_size(servers: &[SimulatedServer]) -> anyhow::Result<u32> {
    let sizes: BTreeSet<u32> = servers.iter().map(|server| server.engine.block_size).collect();
    let mut all = sizes.iter();
    match (all.next(), all.next()) {
        (Some(size), None) => Ok(*size),
        _ => bail!("--kv-events: the servers have blocks of {sizes:?} tokens; events support only one size"),
    }
}

#[cfg(test)]
mod tests;
