//! The words of `attache replay`: policies, servers, changes.

use crate::clock::Timestamp;
use crate::config::settings::PoolSettings;
use crate::config::units::parse_duration;
use crate::replay::world::{Change, TimedChange};
use crate::sim::engine::EngineConfig;
use crate::sim::profiles;
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::path::Path;

/// More servers than any pool has; each has a page table of its own.
const MAX_SERVERS: usize = 10_000;

/// A way to decide, with the name that the report gives it.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    /// In the report.
    pub(super) name: String,
    /// The pool's settings with it.
    pub(super) pool: PoolSettings,
}

/// Splits at commas that stand in no brackets and in no string.
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

/// The policies that `--compare` names: `name`, `name={json}` and `label=file.yaml`, after those of the configuration itself.
///
/// # Errors
/// What is wrong with a name, its parameters or a file.
pub(super) fn policies(
    base: &PoolSettings,
    compare: &[String],
    read: impl Fn(&Path) -> anyhow::Result<PoolSettings>,
) -> anyhow::Result<Vec<Policy>> {
    let mut policies = vec![Policy { name: base.strategy.clone(), pool: base.clone() }];
    for spelling in compare.iter().flat_map(|list| split(list)) {
        let (name, rest) = match spelling.split_once('=') {
            Some((name, rest)) => (name.trim(), Some(rest.trim())),
            None => (spelling, None),
        };
        let policy = match rest {
            Some(file) if !file.starts_with('{') => {
                let other = read(Path::new(file))?;
                // What is known of caches and how is the replay's own, the same for all.
                let pool = PoolSettings {
                    prefix: base.prefix.clone(),
                    scrape: base.scrape.clone(),
                    endpoints: base.endpoints.clone(),
                    ..other
                };
                Policy { name: name.to_owned(), pool }
            }
            parameters => {
                let parameters = parameters.map(serde_json::from_str).transpose();
                let parameters =
                    parameters.with_context(|| format!("--compare {name}: its parameters are not JSON"))?;
                let pool = PoolSettings {
                    strategy: name.to_owned(),
                    strategy_parameters: parameters.unwrap_or(Value::Null),
                    rules: Vec::new(),
                    by_request: None,
                    ..base.clone()
                };
                Policy { name: spelling.to_owned(), pool }
            }
        };
        // The same once more says nothing.
        if !policies.iter().any(|p| p.name == policy.name) {
            policies.push(policy);
        }
    }
    Ok(policies)
}

/// The engines that `8b-h100*6,small-l40s@0.5*2` stands for: profile, speed and number of each. With `count` the list is repeated
/// until there are so many.
///
/// # Errors
/// What is wrong with a part.
pub(super) fn engines(spelling: &str, count: Option<usize>) -> anyhow::Result<Vec<EngineConfig>> {
    let mut engines = Vec::new();
    for part in split(spelling) {
        let (kind, number) = match part.rsplit_once('*') {
            Some((kind, n)) => (
                kind,
                n.trim().parse::<usize>().ok().with_context(|| format!("`{part}`: `{n}` is no number of servers"))?,
            ),
            None => (part, 1),
        };
        let (name, speed) = match kind.split_once('@') {
            Some((name, s)) => {
                (name, s.trim().parse::<f64>().ok().with_context(|| format!("`{part}`: `{s}` is no speed"))?)
            }
            None => (kind, 1.0),
        };
        let engine = profiles::by_name(name.trim())?.scaled(speed)?;
        ensure!(number <= MAX_SERVERS, "`{part}`: {number} servers, at most {MAX_SERVERS} are simulated");
        engines.extend(std::iter::repeat_n(engine, number));
    }
    ensure!(!engines.is_empty(), "no servers are named; a profile is needed, as in `8b-h100`");
    if let Some(count) = count {
        ensure!((1..=MAX_SERVERS).contains(&count), "{count} servers; 1 to {MAX_SERVERS} can be simulated");
        engines = engines.iter().cycle().take(count).cloned().collect();
    }
    ensure!(engines.len() <= MAX_SERVERS, "{} servers, at most {MAX_SERVERS} are simulated", engines.len());
    Ok(engines)
}

/// The change that `10m lose 3`, `5m restart 0` or `1h join small-l40s` stands for; `join` alone is one more of the first kind.
///
/// # Errors
/// What is wrong with it.
pub(super) fn change(spelling: &str, engines: &[EngineConfig]) -> anyhow::Result<TimedChange> {
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
        Some("lose") => Change::Lose(server()?),
        Some("restart") => Change::Restart(server()?),
        Some("join") => Change::Join(Box::new(match which {
            Some(profile) => engines_of_one(profile)?,
            None => engines.first().context("there is no server to be like")?.clone(),
        })),
        _ => bail!("`{spelling}`: {form}"),
    };
    Ok(TimedChange { at: Timestamp(0).after(at), change })
}

fn engines_of_one(profile: &str) -> anyhow::Result<EngineConfig> {
    engines(profile, Some(1))?.into_iter().next().context("no server is named")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_split_where_they_are_not_inside() {
        assert_eq!(split("a, b ,,c"), ["a", "b", "c"]);
        assert_eq!(split(r#"a={"x":[1,2],"y":"},{"},b"#), [r#"a={"x":[1,2],"y":"},{"}"#, "b"]);
        assert_eq!(split(r#"a={"x":"\",{"},b"#), [r#"a={"x":"\",{"}"#, "b"]);
        assert_eq!(split(""), [""; 0]);
    }

    #[test]
    fn servers_by_profile_speed_and_number() {
        let fleet = engines("8b-h100*2,small-l40s@0.5", None).unwrap();
        let speeds: Vec<f64> = fleet.iter().map(|e| e.latency.speed).collect();
        assert_eq!(speeds, [1.0, 1.0, 0.5]);
        assert_eq!(engines("8b-h100,small-l40s@0.5", Some(5)).unwrap().len(), 5);
        for (bad, part) in [
            ("", "no servers"),
            ("8b-h10", "did you mean `8b-h100`"),
            ("8b-h100*x", "`x` is no number"),
            ("8b-h100@fast", "`fast` is no speed"),
            ("8b-h100@0", "greater than 0"),
            ("8b-h100*99999", "at most"),
        ] {
            let error = format!("{:#}", engines(bad, None).unwrap_err());
            assert!(error.contains(part), "{bad}: {error}");
        }
        assert!(engines("8b-h100", Some(0)).is_err());
    }

    #[test]
    fn changes_in_words() {
        let fleet = engines("8b-h100", None).unwrap();
        let one = |text| change(text, &fleet).unwrap();
        assert_eq!(one("10m lose 3").at, Timestamp(600_000_000_000));
        assert_eq!(one("10m lose 3").change, Change::Lose(3));
        assert_eq!(one("0 restart 0").change, Change::Restart(0));
        assert_eq!(one("1s join").change, Change::Join(Box::new(fleet[0].clone())));
        assert!(matches!(one("1s join small-l40s").change, Change::Join(engine) if *engine != fleet[0]));
        for bad in ["", "10m", "lose 3", "10m lose", "10m lose x", "10m explode 3", "10m lose 3 4", "1s join nobody"] {
            assert!(change(bad, &fleet).is_err(), "{bad}");
        }
    }
}
