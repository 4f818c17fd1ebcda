//! The structure of the configuration file: every section and key. Rules about combinations are in `validate`.
//!
//! Keys are camelCase. A section needs only keys without which it means nothing; `validate` has the defaults.

use super::decode::{Bytes, Fields, Keyword, Read, Sink, keyword};
use super::diagnostic::{At, Code, Diagnostic, Span};
use super::document::{Node, Value};
use super::endpoint_picker;
use super::settings::{ModelsAnswer, OnUnparseable, TokenizerFallback, UsageCount};
use attache_pool::Engine;
use attache_scheduling::Registry;
use attache_scheduling::router::Destination;
use std::net::IpAddr;
use std::time::Duration;

/// Version of the file format that this build reads.
pub(crate) const API_VERSION: &str = "attache.dev/v1";
/// Kind of document that this build reads.
pub(crate) const KIND: &str = "Attache";

/// A value with its position, which may be absent.
pub type Opt<T> = Option<At<T>>;

/// The whole configuration file.
#[derive(Debug, Default)]
pub struct File {
    /// `server`
    pub server: Server,
    /// `telemetry`
    pub telemetry: Telemetry,
    /// `exchange`
    pub exchange: Exchange,
    /// `limits`
    pub limits: LimitsSection,
    /// `redis`
    pub redis: Opt<Redis>,
    /// `sync`
    pub sync: Opt<Sync>,
    /// `modelPolicies`
    pub model_policies: Opt<Vec<At<ModelPolicy>>>,
    /// `pools`
    pub pools: Opt<Vec<At<Pool>>>,
}

impl File {
    /// Reads the document. `None` if its kind or version is unknown: then nothing else in it can be checked.
    pub fn read(root: &Node, registry: &Registry, sink: &mut Sink) -> Option<Self> {
        if endpoint_picker::is(root) {
            return endpoint_picker::read(root, registry, sink);
        }
        let mut f = Fields::of(root, "", sink)?;
        let version = f.node("apiVersion");
        let kind = f.node("kind");
        if !check_kind(version, kind, &f, sink) {
            return None;
        }
        let file = Self {
            server: section(&mut f, "server", sink),
            telemetry: section(&mut f, "telemetry", sink),
            exchange: section(&mut f, "exchange", sink),
            limits: section(&mut f, "limits", sink),
            redis: f.get("redis", sink),
            sync: f.get("sync", sink),
            model_policies: f.get("modelPolicies", sink),
            pools: f.get("pools", sink),
        };
        f.finish(sink);
        Some(file)
    }
}

fn section<T: Read + Default>(fields: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> T {
    fields.get(key, sink).map(|at| at.value).unwrap_or_default()
}

fn check_kind(version: Option<&Node>, kind: Option<&Node>, fields: &Fields<'_>, sink: &mut Sink) -> bool {
    fn text(n: Option<&Node>) -> Option<&str> {
        match n.map(|n| &n.value) {
            Some(Value::Text(t)) => Some(t),
            _ => None,
        }
    }
    let other = endpoint_picker::KIND;
    let versions = format!("`{API_VERSION}` for `{KIND}`, or {} for `{other}`", endpoint_picker::versions());
    let mut good = true;
    for (key, node, want, allowed) in [
        ("apiVersion", version, API_VERSION, versions),
        ("kind", kind, KIND, format!("`{KIND}`, or `{other}` of llm-d and GIE")),
    ] {
        if text(node) == Some(want) {
            continue;
        }
        good = false;
        let got = node.map_or_else(|| "it is missing".to_owned(), |n| format!("got {}", n.value.describe()));
        sink.push(
            Diagnostic::new(Code::Version, key, format!("`{key}` must be {allowed}; {got}"))
                .at(node.map_or(fields.span, |n| n.span))
                .help(format!("write `{key}: {want}` in Attaché's own file")),
        );
    }
    good
}

/// Declares a section: a struct of optional values, and how it is read. The function after `=` reads
/// a type of another crate.
macro_rules! sections {
    ($($(#[$doc:meta])* $name:ident { $($key:literal => $field:ident: $t:ty $(= $read:ident)?),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub struct $name { $(#[doc = concat!("`", $key, "`")] pub $field: Opt<$t>),* }

        impl Read for $name {
            fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
                let mut f = Fields::of(node, path, sink)?;
                let section = Self { $($field: sections!(@read f, $key, sink $(, $read)?)),* };
                f.finish(sink);
                Some(section)
            }
        }
    )*};
    (@read $fields:ident, $key:literal, $sink:ident) => { $fields.get($key, $sink) };
    (@read $fields:ident, $key:literal, $sink:ident, $read:ident) => { $read(&mut $fields, $key, $sink) };
}

mod caches;
mod discovery;
mod flow;
mod objective;
mod selection;
mod strategy;
mod sync;
mod tenants;
mod word;
pub use caches::{Disaggregation, KvEvents, PrefixCache, Tokenizer, Volatile};
pub use discovery::{Dns, EndpointsFile, Kubernetes};
pub use flow::{Band, FlowControl};
pub use objective::{Objective, Slo};
pub use selection::{ModelPolicy, Profile, RequestStrategy, StrategyRule};
pub use strategy::{Parameters, Strategy};
pub use sync::{Nats, NatsTls, Sync};
pub use tenants::{Labels, LimitValue, Models, Names, Redis, Tenant, TenantLimits, Tenants, UserRecords};
pub(crate) use word::{Word, word};

sections! {
    /// Listeners, threads, TLS and shutdown.
    Server {
        "bind" => bind: IpAddr,
        "grpcPort" => grpc_port: u16,
        "grpcHealthPort" => grpc_health_port: u16,
        "metricsPort" => metrics_port: u16,
        "healthChecking" => health_checking: bool,
        "workers" => workers: usize,
        "seed" => seed: u64,
        "leaderElection" => leader_election: bool,
        "modelStatus" => model_status: bool,
        "metricsAuth" => metrics_auth: bool,
        "adminHosts" => admin_hosts: Vec<At<String>>,
        "tls" => tls: Tls,
        "drain" => drain: Drain,
    }
    /// Certificates of the ext-proc port and its clients.
    Tls {
        "mode" => mode: TlsMode,
        "directory" => directory: String,
        "reload" => reload: bool,
        "clientCaFile" => client_ca_file: String,
        "clientNames" => client_names: Vec<At<String>>,
    }
    /// How the process shuts down.
    Drain {
        "minDelay" => min_delay: Duration,
        "deadline" => deadline: Duration,
    }
    /// Settings of logs, traces and metric labels.
    Telemetry {
        "logLevel" => log_level: String,
        "logFormat" => log_format: LogFormat,
        "otlpEndpoint" => otlp_endpoint: String,
        "traceRatio" => trace_ratio: f64,
        "decisionsKept" => decisions_kept: usize,
        "labels" => labels: Labels,
    }
    /// How the ext-proc exchange behaves.
    Exchange {
        "onUnparseable" => on_unparseable: OnUnparseable = word,
        "conformanceHeaders" => conformance_headers: bool,
        "trustClientHeaders" => trust_client_headers: bool,
        "sessionHeaders" => session_headers: Vec<At<String>>,
        "prefillEndpointHeader" => prefill_endpoint_header: bool,
        "routeHeader" => route_header: bool,
        "keepAcceptEncoding" => keep_accept_encoding: bool,
        "tenant" => tenant: Tenant,
        "disableEndpointSubsetFilter" => disable_endpoint_subset_filter: bool,
        "models" => models: ModelsAnswer = word,
        "reportUsage" => report_usage: ReportUsage,
        "explain" => explain: Explain,
        "objectives" => objectives: Vec<(At<String>, At<i32>)>,
    }
    /// Explanations of decisions, for gateways and logs.
    Explain {
        "metadata" => metadata: bool,
        "logRatio" => log_ratio: f64,
        "kept" => kept: usize,
        "timeRatio" => time_ratio: f64,
    }
    /// Token usage of a response, reported to the gateway.
    ReportUsage {
        "namespace" => namespace: String,
        "key" => key: String,
        "count" => count: UsageCount = word,
    }
    /// Limits on requests, tenants and models.
    LimitsSection {
        "maxBodyBytes" => max_body_bytes: Bytes,
        "maxBufferedBytes" => max_buffered_bytes: Bytes,
        "maxUploadBytesPerClient" => max_upload_bytes_per_client: Bytes,
        "minUploadRate" => min_upload_rate: Bytes,
        "uploadGrace" => upload_grace: Duration,
        "maxJsonDepth" => max_json_depth: u32,
        "maxJsonValues" => max_json_values: u32,
        "maxMessages" => max_messages: u32,
        "maxPrompts" => max_prompts: u32,
        "maxModelBytes" => max_model_bytes: Bytes,
        "maxCacheSaltBytes" => max_cache_salt_bytes: Bytes,
        "maxHeaderBytes" => max_header_bytes: Bytes,
        "maxHeaders" => max_headers: u32,
        "maxMultipartSniffBytes" => max_multipart_sniff_bytes: Bytes,
        "requestTimeout" => request_timeout: Duration,
        "idleTimeout" => idle_timeout: Duration,
        "maxStreams" => max_streams: u32,
        "maxStreamsPerConnection" => max_streams_per_connection: u32,
        "tenants" => tenants: Tenants,
        "models" => models: Models,
    }
    /// Conditions of requests for a pool.
    Match {
        "models" => models: Vec<At<String>>,
        "header" => header: Header,
        "authority" => authority: String,
        "service" => service: String,
    }
    /// A header name and its value.
    Header {
        "name" => name: String,
        "value" => value: String,
    }
    /// One endpoint or a list with fallbacks.
    DestinationSection {
        "mode" => mode: Destination = word,
        "max" => max: usize,
        "headers" => headers: Vec<At<String>>,
        "metadata" => metadata: Vec<At<MetadataKey>>,
        "strategyHeader" => strategy_header: String,
    }
    /// A key of dynamic metadata, with its namespace.
    MetadataKey {
        "namespace" => namespace: String,
        "key" => key: String,
    }
    /// Scheme, port and path of an endpoint's metrics.
    MetricsSection {
        "scheme" => scheme: Scheme,
        "port" => port: u16,
        "path" => path: String,
    }
    /// How metrics of endpoints are scraped.
    Scrape {
        "interval" => interval: Duration,
        "idleInterval" => idle_interval: Duration,
        "timeout" => timeout: Duration,
        "maxBytes" => max_bytes: Bytes,
        "staleAfter" => stale_after: Duration,
        "insecureSkipVerify" => insecure_skip_verify: bool,
        "bearerTokenFile" => bearer_token_file: String,
    }
    /// When endpoints are ejected.
    Health {
        "consecutiveFailures" => consecutive_failures: u32,
        "consecutiveConnectFailures" => consecutive_connect_failures: u32,
        "ejection" => ejection: Duration,
        "maxEjection" => max_ejection: Duration,
        "slowStart" => slow_start: Duration,
        "errorPeriod" => error_period: Duration,
        "maxEjectionPercent" => max_ejection_percent: u32,
    }
    /// One target of a model rewrite, with its weight.
    Target {
        "model" => model: String,
        "weight" => weight: u32,
    }
}

/// One entry of `pools`.
#[derive(Debug)]
pub struct Pool {
    /// `name`
    pub name: At<String>,
    /// `match`
    pub matches: Opt<Match>,
    /// `rejectUnknownModels`
    pub reject_unknown_models: Opt<bool>,
    /// `defaultModel`
    pub default_model: Opt<String>,
    /// `strategy`
    pub strategy: Opt<Strategy>,
    /// `strategies`
    pub strategies: Vec<At<StrategyRule>>,
    /// `requestStrategy`
    pub request_strategy: Opt<RequestStrategy>,
    /// `destination`
    pub destination: DestinationSection,
    /// `endpoints`
    pub endpoints: Vec<At<Endpoint>>,
    /// `dns`
    pub dns: Vec<At<Dns>>,
    /// `endpointsFile`
    pub endpoints_file: Opt<EndpointsFile>,
    /// `kubernetes`
    pub kubernetes: Opt<Kubernetes>,
    /// `modelRewrites`
    pub rewrites: Vec<At<Rewrite>>,
    /// `scrape`
    pub scrape: Scrape,
    /// `health`
    pub health: Health,
    /// `prefixCache`
    pub prefix_cache: Opt<PrefixCache>,
    /// `disaggregation`
    pub disaggregation: Opt<Disaggregation>,
    /// `objective`
    pub objective: Opt<Objective>,
    /// `flowControl`
    pub flow_control: Opt<FlowControl>,
    /// `deadlineAdmission`
    pub deadline_admission: Opt<bool>,
    /// Set if the format of the file names no endpoints: all come from flags and share these properties.
    pub from_flags: Option<FromFlags>,
}

/// Properties of endpoints that flags name.
#[derive(Debug, Default)]
pub struct FromFlags {
    /// Inference engine of the endpoints.
    pub engine: Opt<Engine>,
    /// Scheme, port and path of their metrics.
    pub metrics: MetricsSection,
}

impl Read for Pool {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let mut f = Fields::of(node, path, sink)?;
        // A pool without a name is reported once. Its other parts are still checked, under its path.
        let name = f.required("name", sink).unwrap_or(At { value: path.to_owned(), span: f.span });
        let pool = Self {
            name,
            matches: f.get("match", sink),
            reject_unknown_models: f.get("rejectUnknownModels", sink),
            default_model: f.get("defaultModel", sink),
            strategy: f.get("strategy", sink),
            strategies: f.get("strategies", sink).map(|at| at.value).unwrap_or_default(),
            request_strategy: f.get("requestStrategy", sink),
            destination: section(&mut f, "destination", sink),
            endpoints: f.get("endpoints", sink).map(|at| at.value).unwrap_or_default(),
            dns: f.get("dns", sink).map(|at| at.value).unwrap_or_default(),
            endpoints_file: f.get("endpointsFile", sink),
            kubernetes: f.get("kubernetes", sink),
            rewrites: f.get("modelRewrites", sink).map(|at| at.value).unwrap_or_default(),
            scrape: section(&mut f, "scrape", sink),
            health: section(&mut f, "health", sink),
            prefix_cache: f.get("prefixCache", sink),
            disaggregation: f.get("disaggregation", sink),
            objective: f.get("objective", sink),
            flow_control: f.get("flowControl", sink),
            deadline_admission: f.get("deadlineAdmission", sink),
            from_flags: None,
        };
        f.finish(sink);
        Some(pool)
    }
}

/// What decides whether a request is split: a word, or a mapping with parameters.
#[derive(Debug)]
pub struct Decider {
    /// `type`
    pub kind: At<DeciderKind>,
    /// `nonCachedTokens`, of prefix-based.
    pub non_cached_tokens: Opt<u32>,
    /// `promptTokens`, of prefix-based.
    pub prompt_tokens: Opt<u32>,
}

impl Read for Decider {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        if let Value::Text(_) = node.value {
            let kind = At { value: DeciderKind::read(node, path, sink)?, span: node.span };
            return Some(Self { kind, non_cached_tokens: None, prompt_tokens: None });
        }
        let mut f = Fields::of(node, path, sink)?;
        let kind = f.required("type", sink);
        let (non_cached_tokens, prompt_tokens) = (f.get("nonCachedTokens", sink), f.get("promptTokens", sink));
        f.finish(sink);
        Some(Self { kind: kind?, non_cached_tokens, prompt_tokens })
    }
}

/// What decides whether a request is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeciderKind {
    /// Predicted times of both alternatives.
    Predicted,
    /// Every request is split.
    Always,
    /// No request is split.
    Never,
    /// The pool's strategy alone.
    Strategy,
    /// Prompt tokens that the decode worker has not cached.
    PrefixBased,
}

/// Which component sends the prefill request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisaggregationMode {
    /// Attaché sends it directly.
    Direct,
    /// A sidecar of the decode worker, which reads a header.
    Header,
}

/// Turns prompts into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// No tokens: blocks of text.
    Characters,
    /// An encoding of OpenAI's tiktoken.
    Tiktoken,
    /// A model's own tokenizer files.
    HuggingFace,
    /// The tokenize API of the pool's model servers.
    Remote,
}

/// An endpoint: its address alone, or with its properties.
#[derive(Debug)]
pub struct Endpoint {
    /// `address`
    pub address: At<String>,
    /// `name`
    pub name: Opt<String>,
    /// `role`
    pub role: Opt<String>,
    /// `labels`
    pub labels: Vec<(At<String>, At<String>)>,
    /// `engine`
    pub engine: Opt<Engine>,
    /// `metrics`
    pub metrics: Opt<MetricsSection>,
    /// `draining`
    pub draining: Opt<bool>,
}

impl Read for Endpoint {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        if let Value::Text(_) = node.value {
            let value = String::read(node, path, sink)?;
            let address = At { value, span: node.span };
            let (name, role, labels) = (None, None, Vec::new());
            return Some(Self { address, name, role, labels, engine: None, metrics: None, draining: None });
        }
        let mut f = Fields::of(node, path, sink)?;
        let address = f.required("address", sink);
        let name = f.get("name", sink);
        let role = f.get("role", sink);
        let labels = f.get("labels", sink).map(|at| at.value).unwrap_or_default();
        let (engine, metrics, draining) =
            (word(&mut f, "engine", sink), f.get("metrics", sink), f.get("draining", sink));
        f.finish(sink);
        Some(Self { address: address?, name, role, labels, engine, metrics, draining })
    }
}

/// A rewrite of a model name.
#[derive(Debug)]
pub struct Rewrite {
    /// `model`; if absent or `*`, every model without a rule of its own.
    pub model: Opt<String>,
    /// `targets`
    pub targets: At<Vec<At<Target>>>,
}

impl Read for Rewrite {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let mut f = Fields::of(node, path, sink)?;
        let (model, targets) = (f.get("model", sink), f.required("targets", sink));
        f.finish(sink);
        Some(Self { model, targets: targets? })
    }
}

/// How the ext-proc port is secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// Plain HTTP/2 without TLS.
    Off,
    /// A self-signed certificate made at start.
    SelfSigned,
    /// Certificate and key from a directory.
    Files,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Scheme by which metrics are scraped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP without TLS.
    Http,
    /// HTTP with TLS.
    Https,
}

macro_rules! keywords {
    ($($t:ty: $($word:literal => $value:expr),*;)*) => {$(
        impl Keyword for $t {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $value)),*];
        }
        impl Read for $t {
            fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
                keyword(node, path, sink)
            }
        }
    )*};
}

keywords! {
    TlsMode: "off" => TlsMode::Off, "self-signed" => TlsMode::SelfSigned, "files" => TlsMode::Files;
    LogFormat: "text" => LogFormat::Text, "json" => LogFormat::Json;
    DisaggregationMode: "direct" => DisaggregationMode::Direct, "header" => DisaggregationMode::Header;
    DeciderKind: "predicted" => DeciderKind::Predicted, "always" => DeciderKind::Always,
        "never" => DeciderKind::Never, "strategy" => DeciderKind::Strategy, "prefix-based" => DeciderKind::PrefixBased;
    TokenizerKind: "characters" => TokenizerKind::Characters, "tiktoken" => TokenizerKind::Tiktoken,
        "huggingface" => TokenizerKind::HuggingFace, "remote" => TokenizerKind::Remote;
    TokenizerFallback: "none" => TokenizerFallback::None, "characters" => TokenizerFallback::Characters,
        "tiktoken" => TokenizerFallback::Tiktoken;
    Scheme: "http" => Scheme::Http, "https" => Scheme::Https;
}
