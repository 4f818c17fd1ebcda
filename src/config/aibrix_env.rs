//! AIBrix's environment variables: what they say holds where neither a flag nor the file says otherwise.
//!
//! A value that can't be used is an error that names the variable; AIBrix itself falls back to its default in silence. What has no counterpart
//! here is a warning. Read with the flags (`cli`), used by `validate`.

use super::decode::Sink;
use super::defaults::MAX_BLOCK_SIZE;
use super::diagnostic::{Code, Diagnostic};
use super::schema::TokenizerKind;
use crate::prefix::cache::CHARACTERS_PER_TOKEN;
use crate::scheduling::registry;
use crate::scheduling::strategy::weighted;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The variables that are set, by name; blank ones count as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AibrixEnv(BTreeMap<String, String>);

/// What a variable sets.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// The strategy of pools that name none.
    Strategy,
    /// Whether all strategies decide as in AIBrix.
    Exact,
    /// What turns prompts into tokens.
    Tokenizer,
    /// The size of a block, in bytes.
    BlockBytes,
    /// A parameter of a strategy.
    Parameter(&'static str, &'static str, Kind),
    /// Nothing here, and why.
    Nothing(&'static str),
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Whole,
    Number,
    Word,
    Flag,
}

/// The default strategy, as AIBrix's code names it.
const ROUTING_ALGORITHM: &str = "ROUTING_ALGORITHM";
/// The default strategy, as AIBrix's documentation names it.
const DOCUMENTED_ALGORITHM: &str = "AIBRIX_ROUTING_ALGORITHM";
/// Attaché's own: AIBrix's strategies decide exactly as there.
const COMPAT: &str = "ATTACHE_AIBRIX_COMPAT";
/// What [`COMPAT`] sets, by strategy.
const EXACT: &[(&str, &str, &str)] = &[
    ("fallback", "fallback", "random"),
    ("least-busy-time", "fallback", "random"),
    ("least-gpu-cache", "fallback", "random"),
    ("least-kv-cache", "fallback", "random"),
    ("least-latency", "compat", "true"),
    ("least-latency", "fallback", "random"),
    ("least-request", "compat", "true"),
    ("least-utilization", "fallback", "random"),
    ("power-of-two", "compat", "true"),
    ("prefix-cache", "compat", "true"),
    ("prefix-cache-preble", "compat", "true"),
    ("throughput", "fallback", "random"),
    ("vtc-basic", "compat", "true"),
];
/// Every other variable that is looked at begins so.
const PREFIXES: [&str; 7] = [
    "AIBRIX_DECODE_",
    "AIBRIX_KV_CONNECTOR_TYPE",
    "AIBRIX_POD_DEPLOYMENT_LABEL",
    "AIBRIX_PREFILL_",
    "AIBRIX_PREFIX_CACHE_",
    "AIBRIX_PROMPT_LENGTH_BUCKETING",
    "AIBRIX_ROUTER_",
];

/// All of them; one that is a parameter of several strategies has a row for each.
const VARIABLES: &[(&str, Meaning)] = {
    use Kind::{Flag, Number, Whole, Word};
    use Meaning::{BlockBytes, Exact, Nothing, Parameter, Strategy, Tokenizer};
    const VTC: &str = "vtc-basic";
    const PREBLE: &str = "prefix-cache-preble";
    const PD: &str = "pd";
    const BY_ROOM: &str = "blocks are forgotten when room runs out; `prefixCache.maxBytes` bounds it";
    const BY_FILE: &str = "KV events are configured in the file, under `prefixCache`";
    &[
        (DOCUMENTED_ALGORITHM, Strategy),
        (ROUTING_ALGORITHM, Strategy),
        (COMPAT, Exact),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", Tokenizer),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", BlockBytes),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", Parameter("prefix-cache", "imbalance", Whole)),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", Parameter("prefix-cache", "deviations", Number)),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", Parameter(PD, "standardDeviationFactor", Number)),
        ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", Nothing(BY_ROOM)),
        ("AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS", Nothing(BY_ROOM)),
        ("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", Nothing(BY_ROOM)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_PUBLISH_ADDR", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_SUBSCRIBE_ADDRS", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT", Nothing(BY_FILE)),
        ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", Parameter(PREBLE, "targetGPU", Word)),
        ("AIBRIX_ROUTER_PREBLE_DECODING_LENGTH", Parameter(PREBLE, "decodingLength", Whole)),
        ("AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD", Parameter(PREBLE, "slidingWindowPeriod", Whole)),
        ("AIBRIX_ROUTER_PREBLE_EVICTION_LOOP_INTERVAL", Nothing("nothing is swept in the background")),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", Parameter(VTC, "timeUnit", Word)),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", Parameter(VTC, "windowSize", Whole)),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS", Parameter(VTC, "minTokens", Number)),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS", Parameter(VTC, "maxTokens", Number)),
        ("AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT", Parameter(VTC, "inputTokenWeight", Number)),
        ("AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT", Parameter(VTC, "outputTokenWeight", Number)),
        ("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", Parameter(VTC, "maxPodLoad", Number)),
        ("AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT", Parameter(VTC, "fairnessWeight", Number)),
        ("AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT", Parameter(VTC, "utilizationWeight", Number)),
        ("AIBRIX_POD_DEPLOYMENT_LABEL", Parameter("slo", "deploymentLabel", Word)),
        ("AIBRIX_POD_DEPLOYMENT_LABEL", Parameter("slo-least-load", "deploymentLabel", Word)),
        ("AIBRIX_POD_DEPLOYMENT_LABEL", Parameter("slo-least-load-pulling", "deploymentLabel", Word)),
        ("AIBRIX_POD_DEPLOYMENT_LABEL", Parameter("slo-pack-load", "deploymentLabel", Word)),
        ("AIBRIX_PREFILL_SCORE_POLICY", Parameter(PD, "prefillScorePolicy", Word)),
        ("AIBRIX_DECODE_SCORE_POLICY", Parameter(PD, "decodeScorePolicy", Word)),
        ("AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD", Parameter(PD, "prefillLoadImbalanceMinSpread", Whole)),
        ("AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD", Parameter(PD, "decodeLoadImbalanceMinSpread", Number)),
        ("AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD", Parameter(PD, "decodeThroughputImbalanceMinSpread", Number)),
        ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", Parameter(PD, "decodeScoreRatioThreshold", Number)),
        ("AIBRIX_DECODE_LB_WEIGHT_RUNNING", Parameter(PD, "decodeLBWeightRunning", Number)),
        ("AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", Parameter(PD, "decodeLBWeightThroughput", Number)),
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", Parameter(PD, "promptLengthBucketing", Flag)),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", Nothing("`disaggregation.prefillTimeout` in the file says it")),
        ("AIBRIX_KV_CONNECTOR_TYPE", Nothing("`disaggregation.connector` in the file says it")),
    ]
};

impl AibrixEnv {
    /// Those of `variables` that are AIBrix's and concern routing.
    #[must_use]
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let names = [ROUTING_ALGORITHM, DOCUMENTED_ALGORITHM, COMPAT];
        let concerns = |name: &str| names.contains(&name) || PREFIXES.iter().any(|p| name.starts_with(p));
        let set = variables.into_iter().filter(|(name, value)| concerns(name) && !value.trim().is_empty());
        Self(set.map(|(name, value)| (name, value.trim().to_owned())).collect())
    }

    /// What they say; what is wrong with them goes to `sink`.
    pub(super) fn read(&self, sink: &mut Sink) -> AibrixDefaults {
        let mut defaults = AibrixDefaults::default();
        for (name, value) in &self.0 {
            let mut meanings = VARIABLES.iter().filter(|(n, _)| n == name).map(|(_, meaning)| *meaning).peekable();
            let set = match meanings.peek() {
                None | Some(Meaning::Nothing(_)) => {
                    let why = if let Some(Meaning::Nothing(why)) = meanings.next() { why } else { "it is not read" };
                    sink.push(Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {why}")));
                    Ok(())
                }
                Some(_) => meanings.try_for_each(|meaning| defaults.set(meaning, name, value)),
            };
            if let Err(allowed) = set {
                let shown: String = value.chars().take(60).collect();
                let message = format!("`{name}` is `{shown}`, allowed: {allowed}");
                sink.push(Diagnostic::new(Code::OutOfRange, name, message));
            }
        }
        let [coded, documented] = [ROUTING_ALGORITHM, DOCUMENTED_ALGORITHM].map(|name| self.0.get(name));
        if documented.is_some_and(|documented| coded.is_some_and(|coded| coded != documented)) {
            let message =
                format!("`{DOCUMENTED_ALGORITHM}` has no effect: `{ROUTING_ALGORITHM}` names another strategy");
            sink.push(Diagnostic::new(Code::NoEffect, DOCUMENTED_ALGORITHM, message));
        }
        defaults
    }
}

fn tokenizer(value: &str) -> Result<TokenizerKind, String> {
    match value {
        "character" => Ok(TokenizerKind::Characters),
        "tiktoken" => Ok(TokenizerKind::Tiktoken),
        "remote" => Ok(TokenizerKind::Remote),
        _ => Err("character, tiktoken, remote".to_owned()),
    }
}

/// Tokens in a block, from AIBrix's bytes: of text as they are, of token ids four each.
fn block_size(value: &str) -> Result<u32, String> {
    let most = MAX_BLOCK_SIZE * CHARACTERS_PER_TOKEN;
    let bytes = value.parse::<u32>().ok().filter(|bytes| (1..=most).contains(bytes));
    bytes.map(|bytes| bytes.div_ceil(CHARACTERS_PER_TOKEN)).ok_or_else(|| format!("1 to {most} bytes, whole"))
}

/// The value of a switch, as Go reads it.
fn flag(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "1" => Ok(true),
        "false" | "f" | "0" => Ok(false),
        _ => Err("true, false".to_owned()),
    }
}

/// The value as the strategy takes it.
fn checked(strategy: &str, parameter: &str, kind: Kind, text: &str) -> Result<Value, String> {
    let value = match kind {
        Kind::Whole => Value::from(text.parse::<u32>().map_err(|_| "a whole number, 0 or more".to_owned())?),
        Kind::Number => {
            let number = text.parse::<f64>().ok().filter(|n| n.is_finite());
            Value::from(number.ok_or_else(|| "a number".to_owned())?)
        }
        Kind::Word => Value::from(text),
        Kind::Flag => Value::from(flag(text)?),
    };
    let alone = Value::Object(Map::from_iter([(parameter.to_owned(), value.clone())]));
    match registry::build(strategy, &alone) {
        Ok(_) => Ok(value),
        Err(error) => Err(format!("what `{strategy}` takes ({error})")),
    }
}

/// What holds where nobody says otherwise, after AIBrix's environment was read.
#[derive(Debug, Default)]
pub(super) struct AibrixDefaults {
    /// The strategy of pools that name none.
    pub(super) strategy: Option<String>,
    /// The variable that names it.
    pub(super) strategy_variable: &'static str,
    /// It is a variable of another product, which does not let requests name strategies.
    pub(super) is_others: bool,
    /// What turns prompts into tokens.
    pub(super) tokenizer: Option<TokenizerKind>,
    /// Tokens in a block.
    pub(super) block_size: Option<u32>,
    parameters: BTreeMap<&'static str, Map<String, Value>>,
}

impl AibrixDefaults {
    /// `variable` of another product names the strategy of pools that name none, unless AIBrix's own does.
    pub(super) fn name_strategy(&mut self, variable: &'static str, strategy: &str) {
        if self.strategy.is_none() {
            (self.strategy, self.strategy_variable, self.is_others) = (Some(strategy.to_owned()), variable, true);
        }
    }

    /// A parameter of `strategy` where the file says nothing of it.
    pub(super) fn parameter(&mut self, strategy: &'static str, parameter: &str, value: Value) {
        self.parameters.entry(strategy).or_default().insert(parameter.to_owned(), value);
    }

    /// Takes in what a variable says. `Err`: what is allowed.
    fn set(&mut self, meaning: Meaning, variable: &str, value: &str) -> Result<(), String> {
        match meaning {
            Meaning::Strategy => {
                self.strategy = Some(value.to_owned());
                self.strategy_variable =
                    if variable == ROUTING_ALGORITHM { ROUTING_ALGORITHM } else { DOCUMENTED_ALGORITHM };
            }
            Meaning::Exact if flag(value)? => {
                for (strategy, parameter, value) in EXACT {
                    let value = if *value == "true" { Value::from(true) } else { Value::from(*value) };
                    self.parameters.entry(strategy).or_default().entry(*parameter).or_insert(value);
                }
            }
            Meaning::Exact => {}
            Meaning::Tokenizer => self.tokenizer = Some(tokenizer(value)?),
            Meaning::BlockBytes => self.block_size = Some(block_size(value)?),
            Meaning::Parameter(strategy, parameter, kind) => {
                let value = checked(strategy, parameter, kind, value)?;
                self.parameters.entry(strategy).or_default().insert(parameter.to_owned(), value);
            }
            Meaning::Nothing(_) => {}
        }
        Ok(())
    }

    /// The parameters of `strategy`, which the file `given` says, with what the environment adds. Parts of a weighted name have their own.
    pub(super) fn parameters(&self, strategy: &str, given: Value) -> Value {
        if self.parameters.is_empty() {
            return given;
        }
        let all = |given: Value| match given {
            Value::Null => Some(Map::new()),
            Value::Object(map) => Some(map),
            _ => None,
        };
        let add = |defaults: &Map<String, Value>, given: Value| match all(given.clone()) {
            Some(map) => Value::Object(defaults.clone().into_iter().chain(map).collect()),
            None => given,
        };
        if let Some(defaults) = self.parameters.get(registry::canonical(strategy)) {
            return add(defaults, given);
        }
        let parts = weighted::parse(strategy).ok().filter(|_| weighted::is_weighted(strategy)).unwrap_or_default();
        let (Some(mut map), false) = (all(given.clone()), parts.is_empty()) else { return given };
        for (name, _) in parts {
            if let Some(defaults) = self.parameters.get(name) {
                let own = map.remove(name).unwrap_or(Value::Null);
                map.insert(name.to_owned(), add(defaults, own));
            }
        }
        if map.is_empty() { given } else { Value::Object(map) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(variables: &[(&str, &str)]) -> (AibrixDefaults, Vec<Diagnostic>) {
        let mut sink = Sink::default();
        let set = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let defaults = AibrixEnv::of(set).read(&mut sink);
        (defaults, sink.diagnostics)
    }

    #[test]
    fn every_variable_of_the_table_is_taken() {
        for (name, meaning) in VARIABLES {
            let value = match meaning {
                Meaning::Strategy => "prefix-cache",
                Meaning::Exact => "true",
                Meaning::Tokenizer => "tiktoken",
                Meaning::BlockBytes => "128",
                Meaning::Parameter(_, "targetGPU", _) => "A6000",
                Meaning::Parameter(_, "timeUnit", _) => "seconds",
                Meaning::Parameter(_, "prefillScorePolicy" | "decodeScorePolicy", _) => "conductor",
                Meaning::Parameter(_, _, Kind::Flag) => "True",
                Meaning::Parameter(..) => "7",
                Meaning::Nothing(_) => "true",
            };
            let (_, diagnostics) = read(&[(name, value)]);
            let codes: Vec<Code> = diagnostics.iter().map(|d| d.code).collect();
            let expected = if matches!(meaning, Meaning::Nothing(_)) { vec![Code::NoEffect] } else { vec![] };
            assert_eq!(codes, expected, "{name}: {diagnostics:?}");
        }
        let (defaults, _) = read(&[
            ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
            ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
            ("ROUTING_ALGORITHM", " prefix-cache "),
        ]);
        assert_eq!(defaults.block_size, Some(32), "128 bytes");
        assert_eq!(defaults.tokenizer, Some(TokenizerKind::Characters));
        assert_eq!(defaults.strategy.as_deref(), Some("prefix-cache"));
    }

    #[test]
    fn what_can_not_be_used_is_an_error_that_names_the_variable() {
        for (name, value, allowed) in [
            ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "many", "a whole number"),
            ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "-1", "a whole number"),
            ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "NaN", "a number"),
            ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "bert", "character, tiktoken, remote"),
            ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "0", "1 to 16384"),
            ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", "hours", "`vtc-basic`"),
            ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", "0", "`vtc-basic`"),
            ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", "H100", "`prefix-cache-preble`"),
            ("AIBRIX_PREFILL_SCORE_POLICY", "token_load", "`pd`"),
            ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", "-1", "`pd`"),
            ("AIBRIX_PROMPT_LENGTH_BUCKETING", "maybe", "true, false"),
        ] {
            let (_, diagnostics) = read(&[(name, value)]);
            let [error] = diagnostics.as_slice() else { panic!("{name}: {diagnostics:?}") };
            assert!(error.is_error() && error.message.contains(name) && error.message.contains(allowed), "{error:?}");
        }
        let (_, unknown) = read(&[("AIBRIX_ROUTER_VTC_BASIC_MAX_LOAD", "1"), ("AIBRIX_OTHER", "1"), ("PATH", "/")]);
        assert_eq!(unknown.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NoEffect], "{unknown:?}");
        assert!(read(&[("AIBRIX_ROUTER_PREBLE_TARGET_GPU", " ")]).1.is_empty(), "blank is not set");
    }

    #[test]
    fn compat_variable_reaches_every_strategy_that_has_an_exact_form() {
        let (defaults, diagnostics) = read(&[("ATTACHE_AIBRIX_COMPAT", "true")]);
        assert!(diagnostics.is_empty());
        for (strategy, parameter, _) in EXACT {
            let parameters = defaults.parameters(strategy, Value::Null);
            assert!(parameters.get(parameter).is_some(), "{strategy}: {parameters}");
            assert!(registry::build(strategy, &parameters).is_ok(), "{strategy}: {parameters}");
        }
        let (off, diagnostics) = read(&[("ATTACHE_AIBRIX_COMPAT", "false")]);
        assert!(diagnostics.is_empty());
        assert_eq!(off.parameters("vtc-basic", Value::Null), Value::Null);
        assert!(read(&[("ATTACHE_AIBRIX_COMPAT", "yes")]).1.iter().any(Diagnostic::is_error));
    }

    #[test]
    fn both_names_of_the_strategy_are_read() {
        for name in ["ROUTING_ALGORITHM", "AIBRIX_ROUTING_ALGORITHM"] {
            let (defaults, diagnostics) = read(&[(name, "vtc-basic")]);
            assert_eq!((defaults.strategy.as_deref(), defaults.strategy_variable), (Some("vtc-basic"), name));
            assert!(diagnostics.is_empty());
        }
        let both = |documented| read(&[("ROUTING_ALGORITHM", "random"), ("AIBRIX_ROUTING_ALGORITHM", documented)]);
        assert_eq!(both("pd").0.strategy.as_deref(), Some("random"), "the one that AIBrix reads");
        assert_eq!(both("pd").1.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NoEffect]);
        assert!(both("random").1.is_empty());
    }

    #[test]
    fn zero_can_be_said() {
        let (defaults, diagnostics) = read(&[("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "0")]);
        assert!(diagnostics.is_empty());
        assert_eq!(defaults.parameters("prefix-cache", Value::Null), json!({"imbalance": 0}));
    }

    #[test]
    fn one_variable_may_be_a_parameter_of_two_strategies() {
        let (defaults, diagnostics) = read(&[("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "1")]);
        assert!(diagnostics.is_empty());
        assert_eq!(defaults.parameters("prefix-cache", Value::Null), json!({"deviations": 1.0}));
        assert_eq!(defaults.parameters("pd", Value::Null), json!({"standardDeviationFactor": 1.0}));
    }

    #[test]
    fn the_file_outranks_the_environment_parameter_by_parameter() {
        let (defaults, _) = read(&[
            ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "3"),
            ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "4"),
        ]);
        for (name, given, expected) in [
            ("prefix-cache", Value::Null, json!({"deviations": 3.0, "imbalance": 4})),
            ("prefix-cache", json!({"imbalance": 9}), json!({"deviations": 3.0, "imbalance": 9})),
            ("random", Value::Null, Value::Null),
            ("random,least-request", Value::Null, Value::Null),
            ("prefix-cache", json!([1]), json!([1])),
            (
                "prefix-cache:2,least-request",
                json!({"prefix-cache": {"imbalance": 9}}),
                json!({"prefix-cache": {"deviations": 3.0, "imbalance": 9}}),
            ),
        ] {
            assert_eq!(defaults.parameters(name, given.clone()), expected, "{name} {given}");
        }
    }
}
