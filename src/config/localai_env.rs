//! LocalAI's environment variables and flags for its distributed mode. They apply where neither a flag of Attaché nor
//! the file sets a value.
//!
//! An invalid value is an error that names the variable. A variable without a counterpart in Attaché is a warning. Read
//! with the flags (`cli`), used by `validate`.

use super::aibrix_env::AibrixDefaults;
use super::decode::Sink;
use super::defaults::BY_SYNC;
use super::diagnostic::{Code, Diagnostic};
use super::units::parse_duration;
use super::variables::{is_of_service, unread};
use attache_scheduling::policy::{Document, ModelPolicy, PolicyMap};
use serde_json::Value;
use std::collections::BTreeMap;

/// LocalAI's strategy in Attaché.
pub(super) const STRATEGY: &str = "prefix-affinity";
/// Whether requests with equal prefixes go to one server.
const PREFIX_CACHE: &str = "LOCALAI_DISTRIBUTED_PREFIX_CACHE";
/// How long prompts are remembered.
const TTL: &str = "LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL";
/// LocalAI's flag for [`PREFIX_CACHE`], which outranks the variable.
const PREFIX_CACHE_FLAG: &str = "--distributed-prefix-cache";
/// LocalAI's flag for [`TTL`], which outranks the variable.
const TTL_FLAG: &str = "--distributed-prefix-cache-ttl";
/// Policies of models, as a JSON list.
const SCHEDULING: &str = "LOCALAI_MODEL_SCHEDULING";
/// Prefix of all variables of LocalAI.
const PREFIX: &str = "LOCALAI_";

/// Alternatives to variables without effect.
const INSTEAD: [(&str, &str); 8] = [
    ("LOCALAI_ADDRESS", "`--bind` and `--grpc-port` say where Attaché listens for Envoy"),
    ("LOCALAI_API_KEY", "the gateway authenticates clients"),
    (
        "LOCALAI_DISTRIBUTED",
        "each picker routes to all endpoints of its pools; name them by `--endpoint` or `--config-file`",
    ),
    ("LOCALAI_MAX_CONCURRENT_REQUESTS", "`limits.models` and `flowControl` bound requests"),
    ("LOCALAI_MODEL_LOAD_WAIT", "Attaché starts no models; `flowControl` lets requests wait"),
    ("LOCALAI_MODEL_SCHEDULING_CONFIG", "write its list under `modelPolicies` of the configuration file"),
    ("LOCALAI_NATS_URL", BY_SYNC),
    ("LOCALAI_POSTGRES_URL", "Attaché keeps its state in memory, and needs no database"),
];

/// The variables that are set, by name; blank ones count as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalaiEnv(BTreeMap<String, String>);

impl LocalaiEnv {
    /// Selects LocalAI's among `variables`.
    #[must_use]
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let ours = |name: &str, value: &str| name.starts_with(PREFIX) && !is_of_service(name, value);
        let set = variables.into_iter().filter(|(name, value)| ours(name, value) && !value.trim().is_empty());
        Self(set.map(|(name, value)| (name, value.trim().to_owned())).collect())
    }

    /// Adds LocalAI's flags, which outrank its variables.
    #[must_use]
    pub fn with_flags(mut self, prefix_cache: Option<&str>, ttl: Option<&str>) -> Self {
        for (name, flag) in [(PREFIX_CACHE, prefix_cache), (TTL, ttl)] {
            self.0.extend(flag.map(|value| (name.to_owned(), value.to_owned())));
        }
        self
    }

    fn set(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Adds the values to the defaults of all pools, and reports invalid ones to `sink`.
    pub(super) fn read(&self, defaults: &mut AibrixDefaults, sink: &mut Sink) {
        for name in self.0.keys().filter(|name| ![PREFIX_CACHE, TTL, SCHEDULING].contains(&name.as_str())) {
            let why = INSTEAD.iter().find(|(known, _)| known == name);
            let known = INSTEAD.iter().map(|(known, _)| *known).chain([PREFIX_CACHE, TTL, SCHEDULING]);
            sink.push(match why {
                Some((_, instead)) => {
                    Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {instead}"))
                }
                None => unread(name, "Attaché routes to model servers and runs no models", known),
            });
        }
        match self.set(PREFIX_CACHE).map(switch) {
            Some(Some(on)) => {
                // AIBrix's variable names a strategy; this one switches a part of a strategy on or off.
                defaults.name_strategy(PREFIX_CACHE, STRATEGY);
                let policy = if on { "prefix_cache" } else { "round_robin" };
                defaults.parameter(STRATEGY, "routePolicy", policy.into());
            }
            Some(None) => self.wrong(PREFIX_CACHE, "true, false", sink),
            None => {}
        }
        let seconds = |text: &str| parse_duration(text).ok().map(|ttl| ttl.as_secs_f64().ceil()).filter(|s| *s >= 1.0);
        match self.set(TTL).map(seconds) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds of 1 or more")]
            Some(Some(ttl)) => defaults.parameter(STRATEGY, "ttlSeconds", (ttl as u64).into()),
            Some(None) => self.wrong(TTL, "a time above 0, as in `5m` or `90s`", sink),
            None => {}
        }
    }

    /// Adds policies of models that the file does not mention.
    pub(super) fn policies(&self, policies: &mut PolicyMap, sink: &mut Sink) {
        let Some(text) = self.set(SCHEDULING) else { return };
        let Ok(Value::Array(list)) = serde_json::from_str(text) else {
            return self.wrong(SCHEDULING, "a JSON list of objects with `model_name`", sink);
        };
        for document in list {
            match Document::read(&document) {
                Ok(document) => {
                    for field in &document.without_effect {
                        let message =
                            format!("`{field}` in `{SCHEDULING}` has no effect: Attaché starts no model servers");
                        sink.push(Diagnostic::new(Code::NoEffect, SCHEDULING, message));
                    }
                    let model = document.model.as_str().into();
                    policies.entry(model).or_insert_with(|| document.change(ModelPolicy::default()));
                }
                Err(error) => {
                    let message = format!("`{SCHEDULING}`: {error}");
                    sink.push(Diagnostic::new(Code::OutOfRange, SCHEDULING, message));
                }
            }
        }
    }

    /// Warns if `parameters` of the strategy contradict a variable or flag: the file outranks both.
    pub(super) fn tell_overridden(&self, pool: &str, parameters: &Value, sink: &mut Sink) {
        let (mut asked, mut unheard) = (AibrixDefaults::default(), Sink::default());
        self.read(&mut asked, &mut unheard);
        let asked = asked.parameters(STRATEGY, Value::Null);
        for (name, key) in [(PREFIX_CACHE, "routePolicy"), (TTL, "ttlSeconds")] {
            let Some(value) = asked.get(key) else { continue };
            let held = parameters.get(key).filter(|held| *held != value);
            let Some(held) = held else { continue };
            let flag = if name == TTL { TTL_FLAG } else { PREFIX_CACHE_FLAG };
            let message = format!(
                "`{name}` (`{flag}`) has no effect on the pool `{pool}`: the file says `{key}: {held}`, not `{value}`"
            );
            sink.push(Diagnostic::new(Code::Overridden, name, message));
        }
    }

    /// Warns of variables for a strategy that no pool uses.
    pub(super) fn tell_unused(&self, sink: &mut Sink) {
        for name in [PREFIX_CACHE, TTL, SCHEDULING].into_iter().filter(|name| self.set(name).is_some()) {
            let message = format!("`{name}` has no effect: no pool has the strategy `{STRATEGY}`");
            sink.push(Diagnostic::new(Code::NoEffect, name, message).help(format!("`strategy: {STRATEGY}`")));
        }
    }

    fn wrong(&self, name: &str, allowed: &str, sink: &mut Sink) {
        let shown: String = self.set(name).unwrap_or_default().chars().take(60).collect();
        let message = format!("`{name}` is `{shown}`, allowed: {allowed}");
        sink.push(Diagnostic::new(Code::OutOfRange, name, message));
    }
}

/// Parses a boolean in any spelling that Go's flags accept.
fn switch(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(variables: &[(&str, &str)]) -> (AibrixDefaults, Vec<String>) {
        let (mut sink, mut defaults) = (Sink::default(), AibrixDefaults::default());
        let set = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        LocalaiEnv::of(set).read(&mut defaults, &mut sink);
        (defaults, sink.diagnostics.into_iter().map(|d| format!("{} {}", d.code.as_str(), d.path)).collect())
    }

    #[test]
    fn variables_set_the_strategy_and_its_parameters() {
        let (defaults, said) = read(&[(PREFIX_CACHE, "F"), (TTL, "90500ms")]);
        assert_eq!((defaults.strategy.as_deref(), said), (Some(STRATEGY), vec![]));
        let parameters = defaults.parameters(STRATEGY, Value::Null);
        assert_eq!(parameters, json!({"routePolicy": "round_robin", "ttlSeconds": 91}));
        let (defaults, said) = read(&[(TTL, "1h"), (PREFIX_CACHE, " "), ("PATH", "/")]);
        assert_eq!((defaults.strategy, said), (None, vec![]), "a TTL alone names no strategy");
    }

    #[test]
    fn variables_without_effect_are_named() {
        for (name, _) in INSTEAD {
            assert_eq!(read(&[(name, "1")]).1, [format!("{} {name}", Code::NoEffect.as_str())]);
        }
        assert_eq!(read(&[("LOCALAI_THREADS", "4")]).1.len(), 1);
    }

    #[test]
    fn parameters_in_file_outrank_variables_with_warning() {
        let env = LocalaiEnv::of([(TTL.to_owned(), "2m".to_owned())]).with_flags(Some("true"), None);
        let told = |parameters| {
            let mut sink = Sink::default();
            env.tell_overridden("a", &parameters, &mut sink);
            sink.diagnostics.into_iter().map(|d| d.message).collect::<Vec<_>>()
        };
        let held = json!({"routePolicy": "prefix_cache", "ttlSeconds": 120});
        assert_eq!((told(held), told(Value::Null)), (vec![], vec![]));
        let said = told(json!({"routePolicy": "round_robin", "ttlSeconds": 60}));
        assert_eq!(said.len(), 2);
        assert!(said[1].contains(TTL_FLAG) && said[1].contains("`ttlSeconds: 60`, not `120`"), "{said:?}");
    }

    #[test]
    fn flags_outrank_variables() {
        let env = LocalaiEnv::of([(PREFIX_CACHE.to_owned(), "true".to_owned())]).with_flags(Some("false"), None);
        assert_eq!(env.set(PREFIX_CACHE), Some("false"));
    }
}
