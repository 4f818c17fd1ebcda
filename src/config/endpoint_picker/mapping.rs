//! How parameters of producers, data sources and extractors become settings of the pool.
//!
//! Each function reads one plugin's parameters, reports which of them have no effect and why, and leaves the rest. The
//! caller reports those, or passes them to the pipeline part of the plugin.

use crate::defaults::{MAX_BLOCK_SIZE, MIN_INTERVAL};
use crate::schema::{self, DeciderKind, DisaggregationMode, FromFlags, Opt, TokenizerKind};
use crate::settings::{ModelsAnswer, UsageCount};
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_config_schema::document::{Node, Value};
use attache_pool::Engine;
use attache_scheduling::facts::session::AGENT_HEADERS;
use std::net::SocketAddr;
use std::time::Duration;

/// Default address of llm-d's renderer: beside the picker.
const DEFAULT_RENDER_URL: &str = "http://localhost:8000";
/// llm-d's default: a server that has one token more cached is used.
const DEFAULT_MIN_CACHED_TOKEN_DELTA: u32 = 1;
/// Bytes of text that llm-d and GIE count as one token.
const BYTES_PER_TOKEN: u32 = 4;

/// The plugins of a file as sections of Attaché's configuration.
#[derive(Debug, Default)]
pub(super) struct Mapped {
    pub(super) block_size: Opt<u32>,
    pub(super) tokenizer: Opt<schema::Tokenizer>,
    pub(super) kv_events: Opt<schema::KvEvents>,
    pub(super) scrape: schema::Scrape,
    pub(super) endpoints: FromFlags,
    pub(super) exchange: schema::Exchange,
    pub(super) disaggregation: Opt<schema::Disaggregation>,
    /// Cached prompt tokens that another server must have more to be worth a transfer.
    pub(super) source_tokens: Opt<u32>,
    /// Whether requests are sent to a rank that the picker chooses, with its position.
    pub(super) choose_rank: Opt<bool>,
    pub(super) flow_control: Opt<schema::FlowControl>,
    /// Whether requests are queued: the feature gate of flow control is set.
    pub(super) queues: bool,
    /// Whether a plugin keeps the sessions of `agent-identity` together.
    pub(super) agent_affinity: bool,
    /// The endpoints file that a plugin names.
    pub(super) endpoints_file: Opt<schema::EndpointsFile>,
    /// Whether a section selects that plugin as the source of endpoints.
    pub(super) discovers: bool,
}

/// Settings for a profile handler with a prefill or encode profile: llm-d's sidecar runs beside the decode workers. The
/// handler itself decides which requests are split.
pub(super) fn sidecars(to: &mut Mapped, span: Span) {
    let mode = Some(At { value: DisaggregationMode::Header, span });
    to.disaggregation = Some(At { value: schema::Disaggregation { mode, ..Default::default() }, span });
}

/// `p2p-source-producer`
pub(super) fn p2p_source(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let path = f.path_of("minCachedTokenDelta");
    let least = f.get::<u32>("minCachedTokenDelta", sink);
    let least = least.unwrap_or(At { value: DEFAULT_MIN_CACHED_TOKEN_DELTA, span: f.span });
    if least.value == 0 {
        sink.out_of_range(least.span, &path, least.value, "1 or more");
    } else {
        set(&mut to.source_tokens, Some(least), &path, sink);
    }
}

/// `disaggregation` of a pool whose handler gives `given`, with the transfer of cached prefixes from other servers.
pub(super) fn fetching(given: Opt<schema::Disaggregation>, source_tokens: Opt<u32>) -> Opt<schema::Disaggregation> {
    let Some(least) = source_tokens else { return given };
    let At { value, span } = given.unwrap_or_else(|| {
        // No handler splits requests: the sidecar only fetches.
        let span = least.span;
        let kind = At { value: DeciderKind::Never, span };
        let never = schema::Decider::plain(kind);
        let value = schema::Disaggregation {
            mode: Some(At { value: DisaggregationMode::Header, span }),
            decider: Some(At { value: never, span }),
            ..Default::default()
        };
        At { value, span }
    });
    Some(At { value: schema::Disaggregation { cache_source_tokens: source_tokens, ..value }, span })
}

/// `dp-rank-header-handler`
pub(super) fn choose_rank(f: &mut Fields<'_>, to: &mut Mapped, _: &mut Sink) {
    to.choose_rank = Some(At { value: true, span: f.span });
}

/// Sets a value that no earlier plugin has set; the first one is used.
fn set<T>(to: &mut Opt<T>, value: Opt<T>, path: &str, sink: &mut Sink) {
    match (to.as_ref(), value) {
        (_, None) => {}
        (None, value) => *to = value,
        (Some(first), Some(second)) => {
            let name = path.rsplit('.').next().unwrap_or(path);
            let message = format!("`{name}` has no effect: a pool has one, and the first one counts");
            sink.push(
                Diagnostic::new(Code::NoEffect, path, message).at(second.span).related(first.span, "the first one"),
            );
        }
    }
}

/// Reads `key` into a setting that no earlier plugin has set.
macro_rules! take {
    ($fields:ident, $key:literal => $to:expr, $sink:ident) => {
        let value = schema::get(&mut *$fields, $key, $sink);
        set(&mut $to, value, &$fields.path_of($key), $sink);
    };
}

/// Warns of parameters without effect.
pub(super) fn ignored(fields: &mut Fields<'_>, keys: &[&'static str], why: &str, sink: &mut Sink) {
    for key in keys {
        if let Some(node) = fields.node(key) {
            no_effect(&fields.path_of(key), node.span, key, why, sink);
        }
    }
}

fn no_effect(path: &str, span: Span, name: &str, why: &str, sink: &mut Sink) {
    sink.push(Diagnostic::new(Code::NoEffect, path, format!("`{name}` has no effect: {why}")).at(span));
}

/// Reads a mapping below `key` with `read`, and reports unknown keys.
fn within(fields: &mut Fields<'_>, key: &'static str, sink: &mut Sink, read: impl FnOnce(&mut Fields<'_>, &mut Sink)) {
    let path = fields.path_of(key);
    if let Some(mut inner) = fields.node(key).and_then(|node| Fields::of(node, &path, sink)) {
        read(&mut inner, sink);
        inner.finish(sink);
    }
}

/// `approx-prefix-cache-producer`
pub(super) fn approx_prefix(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    block_size(f, BYTES_PER_TOKEN, to, sink);
}

/// Reads the block size in tokens, or under its older name in units of which `old_units` make a token.
fn block_size(f: &mut Fields<'_>, old_units: u32, to: &mut Mapped, sink: &mut Sink) {
    if f.node("blockSizeTokens").is_some() {
        block_size_in(f, "blockSizeTokens", 1, to, sink);
        ignored(f, &["blockSize"], "`blockSizeTokens` says it", sink);
    } else {
        block_size_in(f, "blockSize", old_units, to, sink);
    }
}

fn block_size_in(f: &mut Fields<'_>, key: &'static str, per_token: u32, to: &mut Mapped, sink: &mut Sink) {
    let path = f.path_of(key);
    let Some(at) = f.get::<u32>(key, sink) else { return };
    let tokens = at.value / per_token;
    if (1..=MAX_BLOCK_SIZE).contains(&tokens) {
        set(&mut to.block_size, Some(At { value: tokens, span: at.span }), &path, sink);
    } else {
        let most = MAX_BLOCK_SIZE * per_token;
        sink.out_of_range(at.span, &path, at.value, &format!("{per_token} to {most}"));
    }
}

/// `prefix-cache-scorer`: until GIE v1.4 it had the parameters of today's producer, and in llm-d v0.5 (`mode:
/// cache_tracking`) those of today's precise producer.
pub(super) fn prefix_scorer(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let mode = f.get::<String>("mode", sink);
    if let Some(at) = mode.as_ref().filter(|at| !["estimate", "cache_tracking"].contains(&at.value.as_str())) {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, &f.path_of("mode"), format!("`{shown}`"), "`estimate` or `cache_tracking`");
    }
    let tracks = mode.is_some_and(|at| at.value == "cache_tracking");
    if tracks || f.node("indexerConfig").is_some() || f.node("kvEventsConfig").is_some() {
        precise_prefix(f, to, sink);
    }
    block_size_in(f, "hashBlockSize", BYTES_PER_TOKEN, to, sink);
    block_size(f, BYTES_PER_TOKEN, to, sink);
}

/// `burst-prefix-cache-producer`: a prompt in flight counts as cached at its endpoint, so that equal prompts which
/// arrive together go to one endpoint without waiting for each other.
pub(super) fn burst_prefix(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    block_size_in(f, "blockSizeTokens", 1, to, sink);
}

/// `mm-embeddings-cache-producer`, whose size becomes a parameter of the scorer.
pub(super) fn embeddings_cache(f: &mut Fields<'_>, _: &mut Mapped, sink: &mut Sink) {
    for key in ["cacheSizeInMBPerServer", "cacheSizeInMB", "cacheSize"] {
        let path = f.path_of(key);
        if let Some(at) = f.get::<u32>(key, sink).filter(|at| at.value == 0) {
            sink.out_of_range(at.span, &path, 0, "1 or more");
        }
    }
}

/// `agent-identity`: requests of one session of a coding agent are one flow.
pub(super) fn agent_identity(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let path = f.path_of("additionalSessionHeaders");
    let span = f.node("additionalSessionHeaders").map_or(f.span, |node| node.span);
    let more = f.get::<Vec<At<String>>>("additionalSessionHeaders", sink).map(|at| at.value).unwrap_or_default();
    let usual = AGENT_HEADERS.map(|name| At { value: name.to_owned(), span: f.span });
    let headers = more.into_iter().chain(usual).collect();
    set(&mut to.exchange.session_headers, Some(At { value: headers, span }), &path, sink);
}

/// `token-producer`
pub(super) fn tokens(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let path = f.path.clone();
    let backend = f.get::<String>("backend", sink);
    let model = f.node("modelName").map(|n| n.span);
    let mut renderer = None;
    for key in ["vllm", "vllmHTTPRenderConfig"] {
        let span = f.node(key).map(|n| n.span);
        within(f, key, sink, |f, sink| renderer = Some(remote(f, span.unwrap_or_default(), sink)));
    }
    let estimate = f.node("estimate").map(|n| n.span);
    let estimating = estimate.is_some() || backend.as_ref().is_some_and(|b| b.value == "estimate");
    let tokenizer = match (renderer, model, &backend) {
        (Some(renderer), ..) => Some(renderer),
        // Without a backend, a model name means a renderer beside the picker.
        (None, span, backend) if !estimating && (span.is_some() || backend.is_some()) => {
            let span = span.or(backend.as_ref().map(|b| b.span)).unwrap_or_default();
            Some(At { value: tokenizer(TokenizerKind::Remote, Some(DEFAULT_RENDER_URL), span), span })
        }
        _ => None,
    };
    if let Some(span) = model {
        no_effect(
            &f.path_of("modelName"),
            span,
            "modelName",
            "tokens are asked for under the request's own model",
            sink,
        );
    }
    if let Some(span) = estimate {
        no_effect(&f.path_of("estimate"), span, "estimate", "a token is taken for four bytes of text", sink);
    }
    set(&mut to.tokenizer, tokenizer, &path, sink);
}

fn tokenizer(kind: TokenizerKind, url: Option<&str>, span: Span) -> schema::Tokenizer {
    let render = matches!(kind, TokenizerKind::Remote).then_some(At { value: true, span });
    let url = url.map(|url| At { value: url.to_owned(), span });
    schema::Tokenizer { kind: At { value: kind, span }, url, render, ..schema::Tokenizer::plain(kind) }
}

/// `vllm` of a `token-producer`.
fn remote(f: &mut Fields<'_>, span: Span, sink: &mut Sink) -> At<schema::Tokenizer> {
    let url = f.get::<String>("url", sink);
    if let Some(at) = &url
        && !at.value.parse::<http::Uri>().is_ok_and(|u| matches!(u.scheme_str(), Some("http" | "https")))
    {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, &f.path_of("url"), format!("`{shown}`"), "an http or https URL");
    }
    let timeout = interval(f, "timeout", sink);
    ignored(f, &["mmTimeout"], "`timeout` holds for every request", sink);
    let given = url.as_ref().map_or(DEFAULT_RENDER_URL, |at| at.value.as_str());
    At { value: schema::Tokenizer { timeout, ..tokenizer(TokenizerKind::Remote, Some(given), span) }, span }
}

fn interval(f: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> Opt<Duration> {
    let path = f.path_of(key);
    let at = f.get::<Duration>(key, sink)?;
    if at.value < MIN_INTERVAL {
        sink.out_of_range(at.span, &path, format!("{:?}", at.value), &format!("at least {MIN_INTERVAL:?}"));
        return None;
    }
    Some(at)
}

/// `precise-prefix-cache-producer`, and `precise-prefix-cache-scorer`, which combined producer and scorer.
pub(super) fn precise_prefix(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    const OWN_INDEX: &str = "Attaché's own index is used";
    within(f, "tokenProcessorConfig", sink, |f, sink| token_processor(f, to, sink));
    let path = f.path_of("indexerConfig");
    if let Some(mut inner) = f.node("indexerConfig").and_then(|node| Fields::of(node, &path, sink)) {
        within(&mut inner, "tokenProcessorConfig", sink, |f, sink| token_processor(f, to, sink));
        ignored(&mut inner, &["tokenizersPoolConfig"], "tokens come from a `token-producer`", sink);
        ignored(&mut inner, &["prefixStoreConfig"], "tokens of text that was seen are kept without it", sink);
        // Upstream accepts any key here, and none has a counterpart in Attaché.
        for (key, node) in inner.rest() {
            no_effect(&inner.path_of(&key.value), node.span, &key.value, OWN_INDEX, sink);
        }
    }
    let (span, path) = (f.node("kvEventsConfig").map_or(f.span, |n| n.span), f.path_of("kvEventsConfig"));
    let mut events = schema::KvEvents::default();
    within(f, "kvEventsConfig", sink, |f, sink| events = kv_events(f, sink));
    set(&mut to.kv_events, Some(At { value: events, span }), &path, sink);
    const CLAIMS: &str = "a prompt in flight always counts as cached, until its response";
    ignored(f, &["speculativeIndexing", "speculativeTTL"], CLAIMS, sink);
    ignored(f, &["sessionManager"], "blocks are found by their tokens", sink);
}

fn token_processor(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    block_size(f, 1, to, sink);
    ignored(f, &["hashSeed", "hashAlgorithm"], "blocks are known by their tokens, not by the servers' hashes", sink);
}

fn kv_events(f: &mut Fields<'_>, sink: &mut Sink) -> schema::KvEvents {
    let mut events = schema::KvEvents::default();
    let bind = f.get::<String>("zmqEndpoint", sink);
    let topic = f.get("topicFilter", sink);
    let discover = f.get::<bool>("discoverPods", sink);
    within(f, "podDiscoveryConfig", sink, |f, sink| {
        events.port = f.get("socketPort", sink);
        events.replay_port = f.get("replaySocketPort", sink);
        events.ranks = f.get("dataParallelSize", sink);
        for (key, port) in [("socketPort", &mut events.port), ("replaySocketPort", &mut events.replay_port)] {
            if let Some(at) = port.take_if(|at| at.value == 0) {
                sink.out_of_range(at.span, &f.path_of(key), 0, "1 to 65535");
            }
        }
        ignored(f, &["podLabelSelector", "podNamespace"], "all endpoints of the pool are listened to", sink);
    });
    // Upstream subscribes twice to the same events if both are set. The servers' own sockets identify the
    // server, so they are used.
    let from_servers = discover.as_ref().is_some_and(|at| at.value) || events.port.is_some();
    if let Some(at) = bind {
        if from_servers {
            no_effect(
                &f.path_of("zmqEndpoint"),
                at.span,
                "zmqEndpoint",
                "the servers' own sockets are connected to",
                sink,
            );
        } else {
            events.bind = socket(at, &f.path_of("zmqEndpoint"), sink);
        }
    } else if let Some(at) = discover.filter(|at| !at.value) {
        no_effect(
            &f.path_of("discoverPods"),
            at.span,
            "discoverPods",
            "without `zmqEndpoint` there is no other way",
            sink,
        );
    }
    // Events identify their engine themselves.
    f.expect(&["engineType"]);
    const ONE_READER: &str = "events are read as fast as they come, by one task for each socket";
    ignored(f, &["concurrency"], ONE_READER, sink);
    ignored(f, &["tracing"], "KV events are not traced", sink);
    schema::KvEvents { topic, ..events }
}

/// `tcp://*:5557` as an address to bind to.
fn socket(at: At<String>, path: &str, sink: &mut Sink) -> Opt<String> {
    let value = at.value.replacen("://*:", "://0.0.0.0:", 1);
    if value.strip_prefix("tcp://").is_some_and(|rest| rest.parse::<SocketAddr>().is_ok()) {
        return Some(At { value, span: at.span });
    }
    let shown: String = at.value.chars().take(60).collect();
    sink.out_of_range(at.span, path, format!("`{shown}`"), "`tcp://*:port` or `tcp://ip:port`");
    None
}

/// `metrics-data-source`
pub(super) fn metrics_source(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let metrics = &mut to.endpoints.metrics;
    take!(f, "scheme" => metrics.scheme, sink);
    let path = f.get::<String>("path", sink);
    if let Some(at) = path.as_ref().filter(|at| !at.value.starts_with('/')) {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, &f.path_of("path"), format!("`{shown}`"), "a path that begins with `/`");
    }
    set(&mut metrics.path, path, &f.path_of("path"), sink);
    // Port 0 means the port of the model server.
    let port = f.get::<u16>("port", sink).filter(|at| at.value != 0);
    set(&mut metrics.port, port, &f.path_of("port"), sink);
    let every = interval(f, "interval", sink);
    set(&mut to.scrape.interval, every, &f.path_of("interval"), sink);
    // Upstream does not verify certificates by default.
    let skip = f.get("insecureSkipVerify", sink).unwrap_or(At { value: true, span: f.span });
    set(&mut to.scrape.insecure_skip_verify, Some(skip), &f.path_of("insecureSkipVerify"), sink);
}

/// `file-discovery`
pub(super) fn file_discovery(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let (path, span) = (f.path.clone(), f.span);
    let file = f.required::<String>("path", sink);
    // llm-d reads the file again only if the configuration asks for it.
    let watch = f.get("watchFile", sink).or(Some(At { value: false, span }));
    let file = file.map(|file| schema::EndpointsFile { path: file, watch, engine: None, metrics: None });
    set(&mut to.endpoints_file, file.map(|value| At { value, span }), &path, sink);
}

/// `multicluster-file-discovery`: gateways of other clusters as endpoints, which have no metrics of a model server.
pub(super) fn cluster_discovery(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    to.endpoints.engine.get_or_insert(At { value: Engine::None, span: f.span });
    file_discovery(f, to, sink);
}

/// `core-metrics-extractor`
pub(super) fn core_metrics(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let engine = schema::get(f, "defaultEngine", sink);
    set(&mut to.endpoints.engine, engine, &f.path_of("defaultEngine"), sink);
}

/// `destination-endpoint-served-verifier`
pub(super) fn served_verifier(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    set(&mut to.exchange.conformance_headers, Some(At { value: true, span: f.span }), &f.path, sink);
}

/// `models-responder`
pub(super) fn models_responder(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    set(&mut to.exchange.models, Some(At { value: ModelsAnswer::Pool, span: f.span }), &f.path, sink);
}

/// `request-attribute-reporter`
pub(super) fn attribute_reporter(f: &mut Fields<'_>, to: &mut Mapped, sink: &mut Sink) {
    let path = f.path_of("attributes");
    let Some(node) = f.node("attributes") else { return };
    let Value::List(items) = &node.value else {
        sink.wrong_type(node, &path, "a list");
        return;
    };
    for (i, item) in items.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let report = attribute(item, &path, sink);
        set(&mut to.exchange.report_usage, report, &path, sink);
    }
}

fn attribute(node: &Node, path: &str, sink: &mut Sink) -> Opt<schema::ReportUsage> {
    let mut f = Fields::of(node, path, sink)?;
    let (mut namespace, mut key) = (None, None);
    within(&mut f, "key", sink, |f, sink| (namespace, key) = (f.get("namespace", sink), f.get("name", sink)));
    let expression = f.required::<String>("expression", sink);
    ignored(&mut f, &["condition"], "the count is reported for every response that has one", sink);
    f.finish(sink);
    let At { value: expression, span } = expression?;
    let count = match expression.split_whitespace().collect::<String>().as_str() {
        "usage.prompt_tokens" | "usage.input_tokens" => UsageCount::Prompt,
        "usage.completion_tokens" | "usage.output_tokens" => UsageCount::Completion,
        "usage.total_tokens" | "usage.prompt_tokens+usage.completion_tokens" => UsageCount::Total,
        _ => {
            const COUNTS: &str = "one of the counts `usage.prompt_tokens`, `usage.completion_tokens` and \
                                  `usage.total_tokens` can be reported";
            no_effect(&format!("{path}.expression"), span, "expression", COUNTS, sink);
            return None;
        }
    };
    Some(At { value: schema::ReportUsage { namespace, key, count: Some(At { value: count, span }) }, span: node.span })
}
