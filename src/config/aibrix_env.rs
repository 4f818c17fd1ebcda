//! AIBrix's environment variables. They apply where neither a flag nor the file sets a value.
//!
//! An invalid value is an error that names the variable; AIBrix itself silently uses its default. A variable without a
//! counterpart in Attaché is a warning. Read with the flags (`cli`), used by `validate`.

use super::decode::Sink;
use super::defaults::{BY_SYNC, MAX_BLOCK_SIZE};
use super::diagnostic::{Code, Diagnostic};
use super::schema::{PrefixCache, TokenizerKind};
use super::settings::TokenizerFallback;
use super::variables::{is_of_service, unread};
use attache_prefix::cache::CHARACTERS_PER_TOKEN;
use attache_scheduling::registry::{Registry, canonical};
use attache_scheduling::weighted;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;
use tokenizer_pool::{PoolVariable, RemoteDefaults};

pub(super) mod tokenizer_pool;

/// 128 characters, as AIBrix recommends for its tokenizer `character`.
const RECOMMENDED_CHARACTERS: u32 = 128;
/// 16 tokens, as AIBrix recommends for its tokenizer `tiktoken`.
const RECOMMENDED_TOKENS: u32 = 16;
/// Block size in the unit of the tokenizer.
const BLOCK_SIZE: &str = "AIBRIX_PREFIX_CACHE_BLOCK_SIZE";
/// Most blocks in the prefix index.
const BLOCK_NUMBER: &str = "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER";
/// The tokenizer.
const TOKENIZER_TYPE: &str = "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE";
/// Whether model servers are asked for tokens.
const USE_REMOTE: &str = "AIBRIX_USE_REMOTE_TOKENIZER";

/// The variables that are set, by name; blank ones count as not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AibrixEnv(BTreeMap<String, String>);

/// The setting that a variable changes.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// The strategy of pools that name none.
    Strategy,
    /// Whether all strategies decide exactly as in AIBrix.
    Exact,
    /// Turns prompts into tokens.
    Tokenizer,
    /// Block size in the unit of the tokenizer.
    BlockSize,
    /// Most blocks in the prefix index.
    BlockNumber,
    /// A setting of the tokenizer pool.
    TokenizerPool(PoolVariable),
    /// Longest time for a prefill.
    PrefillTimeout,
    /// How vLLM workers transfer KV caches.
    KvConnector,
    /// Host, port or password of Redis.
    Redis,
    /// A parameter of a strategy.
    Parameter(&'static str, &'static str, ParameterKind),
    /// Nothing, with the reason.
    Nothing(&'static str),
}

#[derive(Clone, Copy, Debug)]
enum ParameterKind {
    Whole,
    Number,
    Word,
    Flag,
}

/// The default strategy, as AIBrix's code names the variable.
const ROUTING_ALGORITHM: &str = "ROUTING_ALGORITHM";
/// The default strategy, as AIBrix's documentation names the variable.
const DOCUMENTED_ALGORITHM: &str = "AIBRIX_ROUTING_ALGORITHM";
/// Attaché's own variable: AIBrix's strategies decide exactly as in AIBrix.
pub(super) const COMPAT: &str = "ATTACHE_AIBRIX_COMPAT";
/// The parameters that [`COMPAT`] sets, by strategy.
const EXACT: &[(&str, &str, &str)] = &[
    ("fallback", "fallback", "random"),
    ("least-busy-time", "fallback", "random"),
    ("least-gpu-cache", "fallback", "random"),
    ("least-kv-cache", "fallback", "random"),
    ("least-latency", "compat", "true"),
    ("least-latency", "fallback", "random"),
    ("least-request", "compat", "true"),
    ("least-utilization", "fallback", "random"),
    ("pd", "compat", "true"),
    ("power-of-two", "compat", "true"),
    ("prefix-cache", "compat", "true"),
    ("prefix-cache-preble", "compat", "true"),
    ("throughput", "fallback", "random"),
    ("vtc-basic", "compat", "true"),
];
/// Host of AIBrix's Redis.
const REDIS_HOST: &str = "REDIS_HOST";
/// Port of AIBrix's Redis. Kubernetes sets a variable of this name to a URL for a Service called `redis`.
const REDIS_PORT: &str = "REDIS_PORT";
/// Password of AIBrix's Redis.
const REDIS_PASSWORD: &str = "REDIS_PASSWORD";
/// Default port of Redis.
const DEFAULT_REDIS_PORT: u16 = 6379;
/// Parameter of the SLO strategies with files of profiles.
pub(super) const PROFILES: &str = "profiles";
/// Parameter of the SLO strategies that reads profiles from Redis.
pub(super) const FROM_REDIS: &str = "profilesFromRedis";
/// Prefix of AIBrix's other variables.
const PREFIX: &str = "AIBRIX_";
/// The strategy of requests that name none, where AIBrix's environment names none either: its documented default.
const IMPLIED_STRATEGY: &str = "random";

/// All variables. One that is a parameter of several strategies has a row for each.
const VARIABLES: &[(&str, Meaning)] = {
    use Meaning::{
        BlockNumber, BlockSize, Exact, KvConnector, Nothing, Parameter, PrefillTimeout, Redis, Strategy, Tokenizer,
        TokenizerPool,
    };
    use ParameterKind::{Flag, Number, Whole, Word};
    const VTC: &str = "vtc-basic";
    const PREBLE: &str = "prefix-cache-preble";
    const PD: &str = "pd";
    const BY_ROOM: &str = "blocks are forgotten when room runs out; `prefixCache.maxBytes` bounds it";
    const BY_PAGES: &str = "servers' own metrics are read, Prometheus is not asked";
    const BY_FILE: &str = "KV events are configured in the file, under `prefixCache`";
    &[
        (DOCUMENTED_ALGORITHM, Strategy),
        (ROUTING_ALGORITHM, Strategy),
        (COMPAT, Exact),
        (TOKENIZER_TYPE, Tokenizer),
        (BLOCK_SIZE, BlockSize),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", Parameter("prefix-cache", "imbalance", Whole)),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", Parameter("prefix-cache", "deviations", Number)),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", Parameter(PD, "standardDeviationFactor", Number)),
        (BLOCK_NUMBER, BlockNumber),
        ("AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS", Nothing(BY_ROOM)),
        ("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", Nothing(BY_ROOM)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_PUBLISH_ADDR", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_SUBSCRIBE_ADDRS", Nothing(BY_FILE)),
        ("AIBRIX_KV_EVENT_SYNC_ENABLED", Nothing(BY_FILE)),
        ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER", TokenizerPool(PoolVariable::Use)),
        (USE_REMOTE, TokenizerPool(PoolVariable::Use)),
        ("AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT", TokenizerPool(PoolVariable::Template)),
        ("AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE", TokenizerPool(PoolVariable::Template)),
        ("AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD", TokenizerPool(PoolVariable::HealthCheckPeriod)),
        ("AIBRIX_TOKENIZER_TTL", TokenizerPool(PoolVariable::Ttl)),
        ("AIBRIX_MAX_TOKENIZERS_PER_POOL", TokenizerPool(PoolVariable::MaxModels)),
        ("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", TokenizerPool(PoolVariable::RequestTimeout)),
        ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", Parameter(PREBLE, "targetGPU", Word)),
        ("AIBRIX_ROUTER_PREBLE_DECODING_LENGTH", Parameter(PREBLE, "decodingLength", Whole)),
        ("AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD", Parameter(PREBLE, "slidingWindowPeriod", Whole)),
        ("AIBRIX_ROUTER_PREBLE_EVICTION_LOOP_INTERVAL", Parameter(PREBLE, "evictionLoopInterval", Whole)),
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
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", PrefillTimeout),
        ("AIBRIX_KV_CONNECTOR_TYPE", KvConnector),
        (REDIS_HOST, Redis),
        (REDIS_PORT, Redis),
        (REDIS_PASSWORD, Redis),
        ("AIBRIX_AUTH_BEARER_TOKEN", Nothing("the gateway checks who its clients are, before Attaché sees a request")),
        ("AIBRIX_GPU_OPTIMIZER_TRACING_FLAG", Nothing("requests are recorded with `--record`")),
        ("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", Nothing("`limits.maxBodyBytes` bounds a request's body")),
        ("AIBRIX_HTTPROUTE_CACHE_TTL", Nothing("routes are the gateway's and are not read")),
        ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", Nothing("`--refresh-metrics-interval` or `scrape.interval` says it")),
        ("AIBRIX_PREFIX_CACHE_HASH_SEED", Nothing("blocks are not shared by their hashes; `--seed` sets all seeds")),
        ("AIBRIX_PREFIX_CACHE_METRICS_ENABLED", Nothing("the metrics are always there")),
        ("AIBRIX_PROMETHEUS_QUERY_INTERVAL_MS", Nothing(BY_PAGES)),
        ("AIBRIX_PROMETHEUS_QUERY_TIMEOUT_MS", Nothing(BY_PAGES)),
        ("AIBRIX_REDISSYNC_ENABLED", Nothing(BY_SYNC)),
        ("AIBRIX_STATESYNC_ENABLED", Nothing(BY_SYNC)),
        ("AIBRIX_STATESYNC_SYNC_PERIOD", Nothing(BY_SYNC)),
        ("AIBRIX_SYNC_EVICTION_DURATION_MINUTES", Nothing(BY_ROOM)),
        ("AIBRIX_SYNC_EVICTION_INTERVAL_SECONDS", Nothing(BY_ROOM)),
        ("AIBRIX_SYNC_MAX_CONTEXTS", Nothing(BY_ROOM)),
        ("AIBRIX_SYNC_MAX_PREFIXES_PER_CONTEXT", Nothing(BY_ROOM)),
        ("AIBRIX_TRT_MACHINE_ID", Nothing("ids of TensorRT-LLM requests are random")),
        ("AIBRIX_TTFT_THRESHOLD_S", Nothing("`attache_time_to_first_byte_seconds` has all times in buckets")),
    ]
};

impl AibrixEnv {
    /// Selects AIBrix's routing variables among `variables`.
    #[must_use]
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let names = [ROUTING_ALGORITHM, DOCUMENTED_ALGORITHM, COMPAT, REDIS_HOST, REDIS_PORT, REDIS_PASSWORD];
        let concerns = |name: &str, value: &str| {
            (names.contains(&name) || name.starts_with(PREFIX)) && !is_of_service(name, value)
        };
        let set = variables.into_iter().filter(|(name, value)| concerns(name, value) && !value.trim().is_empty());
        Self(set.map(|(name, value)| (name, value.trim().to_owned())).collect())
    }

    /// The values of the variables; invalid ones are reported to `sink`.
    pub(super) fn read(&self, registry: &Registry, sink: &mut Sink) -> AibrixDefaults {
        let mut defaults = AibrixDefaults::default();
        for (name, value) in &self.0 {
            let mut meanings = VARIABLES.iter().filter(|(n, _)| n == name).map(|(_, meaning)| *meaning).peekable();
            let set = match meanings.peek() {
                None => {
                    sink.push(unread(name, "it is not read", VARIABLES.iter().map(|(known, _)| *known)));
                    Ok(())
                }
                // What is switched off is off here as well.
                Some(Meaning::Nothing(_)) if value.eq_ignore_ascii_case("false") => Ok(()),
                Some(Meaning::Nothing(why)) => {
                    sink.push(Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {why}")));
                    Ok(())
                }
                Some(_) => meanings.try_for_each(|meaning| defaults.set(meaning, name, value, registry)),
            };
            if let Err(allowed) = set {
                let shown: String = value.chars().take(60).collect();
                let message = format!("`{name}` is `{shown}`, allowed: {allowed}");
                sink.push(Diagnostic::new(Code::OutOfRange, name, message));
            }
        }
        defaults.choose_fallback();
        defaults.tell_hostless(sink);
        let theirs = VARIABLES.iter().filter(|(name, _)| name.starts_with(PREFIX) || *name == ROUTING_ALGORITHM);
        let mut set = theirs.filter(|(name, _)| self.0.contains_key(*name));
        // Messages name one that has an effect, if there is one.
        let acts = set.clone().find(|(_, meaning)| !matches!(meaning, Meaning::Nothing(_)));
        defaults.aibrix_variable = acts.or_else(|| set.next()).map(|(name, _)| *name);
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

/// Parses a whole number from 1 to `most`.
fn whole<T: FromStr + PartialOrd + Display + From<u8>>(value: &str, most: T) -> Result<T, String> {
    let number = value.parse::<T>().ok().filter(|number| *number >= T::from(1) && *number <= most);
    number.ok_or_else(|| format!("1 to {most}, whole"))
}

/// Percent-encodes `text` for the password in a URL.
fn percent_encoded(text: &str) -> String {
    let byte = |b: u8| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(byte).collect()
}

/// vLLM's connector for AIBrix's name of it.
fn kv_connector(value: &str) -> Result<&'static str, String> {
    match value {
        "shfs" => Ok("shfs"),
        // AIBrix's name for the connector of Neuron.
        "nixl" => Ok("neuron-nixl"),
        _ => Err("shfs, nixl; with Mooncake's servers, `disaggregation.connector: shared-storage`".to_owned()),
    }
}

/// Parses a boolean as Go does.
fn flag(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "1" => Ok(true),
        "false" | "f" | "0" => Ok(false),
        _ => Err("true, false".to_owned()),
    }
}

/// Parses and checks a parameter of a strategy.
fn checked(
    strategy: &str,
    parameter: &str,
    kind: ParameterKind,
    text: &str,
    registry: &Registry,
) -> Result<Value, String> {
    let value = match kind {
        ParameterKind::Whole => Value::from(text.parse::<u32>().map_err(|_| "a whole number, 0 or more".to_owned())?),
        ParameterKind::Number => {
            let number = text.parse::<f64>().ok().filter(|n| n.is_finite());
            Value::from(number.ok_or_else(|| "a number".to_owned())?)
        }
        ParameterKind::Word => Value::from(text),
        ParameterKind::Flag => Value::from(flag(text)?),
    };
    let alone = Value::Object(Map::from_iter([(parameter.to_owned(), value.clone())]));
    match registry.build(strategy, &alone) {
        Ok(_) => Ok(value),
        Err(error) => Err(format!("what `{strategy}` takes ({error})")),
    }
}

/// Defaults after AIBrix's environment was read.
#[derive(Debug, Default)]
pub(super) struct AibrixDefaults {
    /// The strategy of pools that name none.
    pub(super) strategy: Option<String>,
    /// The variable that names the strategy.
    pub(super) strategy_variable: &'static str,
    /// Whether it is a variable of another product, which does not let requests select strategies.
    pub(super) is_others: bool,
    /// Whether no variable names the strategy, and it is that of AIBrix's requests without one.
    pub(super) is_implied: bool,
    /// A variable of AIBrix that is set and read; `None` if the environment is not AIBrix's.
    aibrix_variable: Option<&'static str>,
    /// The tokenizer, if it is not the pool of model servers.
    tokenizer: Option<TokenizerKind>,
    /// How model servers are asked for tokens.
    pub(super) remote: RemoteDefaults,
    /// Block size in the unit of the tokenizer.
    block_size: Option<u32>,
    /// Most blocks in the prefix index.
    pub(super) max_blocks: Option<u64>,
    /// Longest time for a prefill.
    pub(super) prefill_timeout: Option<Duration>,
    /// The connector of vLLM workers.
    pub(super) kv_connector: Option<&'static str>,
    /// Whether all strategies decide exactly as in AIBrix.
    pub(super) is_exact: bool,
    /// Whether profiles are read from Redis by default: AIBrix's variables name a Redis, or a Redis exists
    /// and they name the strategy.
    pub(super) reads_profiles: bool,
    redis: BTreeMap<&'static str, String>,
    parameters: BTreeMap<&'static str, Map<String, Value>>,
    /// The parameters by the variables that set them.
    pub(super) of_variables: Vec<OfVariable>,
    /// The variables of the prefix index that are set.
    pub(super) of_prefix: Vec<String>,
}

/// A parameter of a strategy that a variable sets.
#[derive(Clone, Debug)]
pub(super) struct OfVariable {
    /// The variable.
    pub(super) variable: &'static str,
    /// The strategy.
    pub(super) strategy: &'static str,
    /// The parameter.
    pub(super) parameter: &'static str,
    /// Its value.
    pub(super) value: Value,
}

impl AibrixDefaults {
    /// `variable` of another product names the strategy of pools that name none, unless AIBrix's own does.
    pub(super) fn name_strategy(&mut self, variable: &'static str, strategy: &str) {
        if self.strategy.is_none() {
            (self.strategy, self.strategy_variable, self.is_others) = (Some(strategy.to_owned()), variable, true);
        }
    }

    /// Whether the environment is that of AIBrix's gateway plugin.
    pub(super) fn is_aibrix(&self) -> bool {
        self.aibrix_variable.is_some()
    }

    /// Where AIBrix's environment names no strategy: requests name theirs by header, as its published manifest has it,
    /// and those that name none get AIBrix's documented default.
    pub(super) fn imply_strategy(&mut self) {
        if let (None, Some(variable)) = (&self.strategy, self.aibrix_variable) {
            (self.strategy, self.strategy_variable) = (Some(IMPLIED_STRATEGY.to_owned()), variable);
            self.is_implied = true;
        }
    }

    /// Sets a parameter of `strategy` that the file does not set.
    pub(super) fn parameter(&mut self, strategy: &'static str, parameter: &str, value: Value) {
        self.parameters.entry(strategy).or_default().insert(parameter.to_owned(), value);
    }

    /// Applies the value of a variable. The error describes valid values.
    fn set(&mut self, meaning: Meaning, variable: &str, value: &str, registry: &Registry) -> Result<(), String> {
        use Meaning::{BlockNumber, BlockSize, Tokenizer, TokenizerPool};
        if matches!(meaning, Tokenizer | BlockSize | BlockNumber | TokenizerPool(_)) {
            self.of_prefix.push(variable.to_owned());
        }
        match meaning {
            Meaning::Strategy => {
                self.strategy = Some(value.to_owned());
                self.strategy_variable =
                    if variable == ROUTING_ALGORITHM { ROUTING_ALGORITHM } else { DOCUMENTED_ALGORITHM };
            }
            Meaning::Exact if flag(value)? => {
                self.is_exact = true;
                for (strategy, parameter, value) in EXACT {
                    let value = if *value == "true" { Value::from(true) } else { Value::from(*value) };
                    self.give(COMPAT, strategy, parameter, value);
                }
            }
            Meaning::Exact => {}
            Meaning::Tokenizer => self.tokenizer = Some(tokenizer(value)?),
            Meaning::BlockSize => self.block_size = Some(whole(value, MAX_BLOCK_SIZE * CHARACTERS_PER_TOKEN)?),
            Meaning::BlockNumber => self.max_blocks = Some(whole(value, u64::MAX)?),
            Meaning::TokenizerPool(part) => self.remote.set(part, variable, value)?,
            Meaning::PrefillTimeout => self.prefill_timeout = Some(tokenizer_pool::seconds(value)?),
            Meaning::Redis => {
                if variable == REDIS_PORT {
                    whole(value, u16::MAX)?;
                }
                let known = [REDIS_HOST, REDIS_PORT, REDIS_PASSWORD].into_iter().find(|known| *known == variable);
                self.redis.extend(known.map(|known| (known, value.to_owned())));
            }
            Meaning::KvConnector => self.kv_connector = Some(kv_connector(value)?),
            Meaning::Parameter(strategy, parameter, kind) => {
                let value = checked(strategy, parameter, kind, value, registry)?;
                let known = VARIABLES.iter().map(|(known, _)| *known).find(|known| *known == variable);
                self.give(known.unwrap_or_default(), strategy, parameter, value);
            }
            Meaning::Nothing(_) => {}
        }
        Ok(())
    }

    fn give(&mut self, variable: &'static str, strategy: &'static str, parameter: &'static str, value: Value) {
        self.parameters.entry(strategy).or_default().insert(parameter.to_owned(), value.clone());
        self.of_variables.push(OfVariable { variable, strategy, parameter, value });
    }

    /// Warns of a port and a password of Redis without a host.
    fn tell_hostless(&mut self, sink: &mut Sink) {
        if self.redis.contains_key(REDIS_HOST) {
            return;
        }
        for variable in std::mem::take(&mut self.redis).into_keys() {
            let message = format!("`{variable}` has no effect: `{REDIS_HOST}` is not set");
            sink.push(Diagnostic::new(Code::NoEffect, variable, message));
        }
    }

    /// Warns that nothing connects to the Redis of AIBrix's variables, and `why`.
    pub(super) fn tell_unread_redis(&self, why: &str, sink: &mut Sink) {
        for variable in self.redis.keys() {
            let message = format!("`{variable}` has no effect: {why}");
            sink.push(Diagnostic::new(Code::NoEffect, *variable, message));
        }
    }

    /// The URL of AIBrix's Redis; `None` if its variables name no host.
    pub(super) fn redis_url(&self) -> Option<String> {
        let host = self.redis.get(REDIS_HOST)?;
        let port = self.redis.get(REDIS_PORT).and_then(|port| port.parse().ok()).unwrap_or(DEFAULT_REDIS_PORT);
        let password = self.redis.get(REDIS_PASSWORD).map(|password| format!(":{}@", percent_encoded(password)));
        Some(format!("redis://{}{host}:{port}/0", password.unwrap_or_default()))
    }

    /// The tokenizer. With the pool of model servers, AIBrix's `DefaultTokenizer` is the fallback.
    pub(super) fn tokenizer(&self) -> Option<TokenizerKind> {
        match self.remote.is_used {
            Some(true) => Some(TokenizerKind::Remote),
            _ => self.tokenizer,
        }
    }

    /// Warns of variables for the prefix index of the pool at `path` that the file outranks.
    pub(super) fn tell_outranked(&self, file: &PrefixCache, path: &str, sink: &mut Sink) {
        let is_other = |kind: TokenizerKind| file.tokenizer.as_ref().is_some_and(|at| at.value.kind.value != kind);
        let remote = self.remote.is_used == Some(true);
        let size = file.block_size.map(|at| at.value.to_string());
        let kv_events = file.kv_events.as_ref().map(|_| "those of KV events".to_owned());
        for (variable, other) in [
            (
                TOKENIZER_TYPE,
                self.tokenizer.filter(|kind| !remote && is_other(*kind)).map(|_| "another tokenizer".to_owned()),
            ),
            (
                USE_REMOTE,
                Some(())
                    .filter(|()| remote && is_other(TokenizerKind::Remote))
                    .map(|()| "another tokenizer".to_owned()),
            ),
            (BLOCK_SIZE, self.block_size.and(size.or(kv_events))),
            (
                BLOCK_NUMBER,
                self.max_blocks
                    .and_then(|own| file.max_blocks.filter(|at| at.value != own))
                    .map(|at| at.value.to_string()),
            ),
        ] {
            if let Some(other) = other {
                let message = format!("`{variable}` has no effect on `{path}`: the file says {other}");
                sink.push(Diagnostic::new(Code::Overridden, variable, message));
            }
        }
    }

    /// Records the fallback for prompts without remote tokens, if AIBrix's variables select the remote tokenizer.
    fn choose_fallback(&mut self) {
        self.remote.fallback = match (self.tokenizer(), self.tokenizer) {
            (Some(TokenizerKind::Remote), Some(TokenizerKind::Tiktoken)) => Some(TokenizerFallback::Tiktoken),
            (Some(TokenizerKind::Remote), _) => Some(TokenizerFallback::Characters),
            _ => None,
        };
    }

    /// Block size in tokens, from the variable's characters if blocks hold text (`is_text`) and from its tokens
    /// otherwise. Without a size, the one that AIBrix recommends if the pool routes as in AIBrix (`is_aibrix`).
    pub(super) fn block_size(&self, is_text: bool, is_aibrix: bool, sink: &mut Sink) -> Option<u32> {
        let recommended = if is_text { RECOMMENDED_CHARACTERS } else { RECOMMENDED_TOKENS };
        let size = self.block_size.or(Some(recommended).filter(|_| is_aibrix || self.is_exact))?;
        let tokens = if is_text { size.div_ceil(CHARACTERS_PER_TOKEN) } else { size };
        if is_text && tokens * CHARACTERS_PER_TOKEN != size {
            let rounded = tokens * CHARACTERS_PER_TOKEN;
            let message = format!(
                "`{BLOCK_SIZE}` of {size} counts as {rounded}: blocks of text have a multiple of \
                 {CHARACTERS_PER_TOKEN} bytes"
            );
            sink.push(Diagnostic::new(Code::Overridden, BLOCK_SIZE, message));
        }
        if tokens > MAX_BLOCK_SIZE {
            let message = format!("`{BLOCK_SIZE}` is `{size}`, allowed: 1 to {MAX_BLOCK_SIZE} tokens");
            sink.push(Diagnostic::new(Code::OutOfRange, BLOCK_SIZE, message));
        }
        Some(tokens)
    }

    /// The parameters of `strategy`: those in the file (`given`), completed from the environment. Parts of a
    /// weighted name have their own.
    pub(super) fn parameters(&self, strategy: &str, given: Value) -> Value {
        let parameters = self.with_defaults(strategy, given);
        let is_slo = strategy == "slo" || strategy.starts_with("slo-");
        let mut map = match parameters {
            Value::Null => Map::new(),
            Value::Object(map) => map,
            other => return other,
        };
        // AIBrix's profiles are stored in Redis and nowhere else.
        if is_slo && self.reads_profiles && !map.contains_key(PROFILES) && !map.contains_key(FROM_REDIS) {
            map.insert(FROM_REDIS.to_owned(), Value::from(true));
        }
        if map.is_empty() { Value::Null } else { Value::Object(map) }
    }

    fn with_defaults(&self, strategy: &str, given: Value) -> Value {
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
        if let Some(defaults) = self.parameters.get(canonical(strategy)) {
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
mod tests;
