//! The checks of `prefixCache`: tokenizers, budgets, KV events.

use crate::aibrix_env::AibrixDefaults;
use crate::aibrix_env::tokenizer_pool::RemoteDefaults;
use crate::defaults::MAX_RANKS;
use crate::schema::{self, Opt, TokenizerKind};
use crate::settings::{KvEventSettings, PrefixSettings, RemoteTokenizer, TokenizerSettings, VolatileRule};
use crate::tokenizer_url;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_pool::ports::{KvEventPorts, PORT_LABEL, PortError, REPLAY_PORT_LABEL, RankPorts};
use attache_prompt::tiktoken::Encoding;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// How far a pool routes as in AIBrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct AibrixForm {
    /// AIBrix's variables name the pool's strategy, or it decides as in AIBrix.
    pub(super) is_aibrix: bool,
    /// The pool decides exactly as in AIBrix.
    pub(super) is_exact: bool,
}

/// Checks the section of a pool, and the event ports of its `endpoints`.
pub(super) fn of_pool(
    file: Opt<schema::PrefixCache>,
    endpoints: &[At<schema::Endpoint>],
    path: &str,
    form: AibrixForm,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> PrefixSettings {
    let section = file.map(|at| at.value).unwrap_or_default();
    let settings = prefix(section, &format!("{path}.prefixCache"), form, env, sink);
    if let Some(events) = &settings.kv_events {
        check_ports(endpoints, events, path, sink);
    }
    settings
}

/// Checks the section.
pub(super) fn prefix(
    mut file: schema::PrefixCache,
    path: &str,
    AibrixForm { is_aibrix, is_exact }: AibrixForm,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> PrefixSettings {
    env.tell_outranked(&file, path, sink);
    let of_env = env.tokenizer().map(|kind| of_aibrix(kind, is_exact));
    let is_aibrix = is_aibrix || file.tokenizer.is_none() && of_env.is_some();
    let tokenizer = file.tokenizer.take().map(|at| at.value).or(of_env);
    let tokenizer = tokenizer.map_or(TokenizerSettings::Characters, |file| self::tokenizer(file, path, env, sink));
    if !matches!(tokenizer, TokenizerSettings::Remote(_)) {
        env.remote.tell_void(path, sink);
    }
    let kv_events = file.kv_events.take().map(|at| (at.span, kv_events(at.value, &format!("{path}.kvEvents"), sink)));
    let blind = matches!(tokenizer, TokenizerSettings::Characters | TokenizerSettings::Tiktoken { .. });
    if let Some((span, _)) = kv_events.as_ref().filter(|_| blind) {
        let message = "KV events name blocks by the model's tokens, which this tokenizer does not know for \
                       conversations: they are learned from what is routed";
        sink.push(
            Diagnostic::new(Code::NoEffect, format!("{path}.kvEvents"), message)
                .at(*span)
                .help("add `tokenizer: {type: huggingface, directory: …}` or `tokenizer: remote`"),
        );
    }
    let tenant_header = file.tenant_header.as_ref().map(|at| {
        if at.value.parse::<http::HeaderName>().is_err() {
            let shown: String = at.value.chars().take(60).collect();
            sink.out_of_range(at.span, &format!("{path}.tenantHeader"), format!("`{shown}`"), "the name of a header");
        }
        at.value.to_ascii_lowercase()
    });
    if let (Some(at), Some((events, _))) = (file.isolate_tenants.filter(|at| at.value), &kv_events) {
        let message =
            "`isolateTenants` has no effect: engines tell what they hold, and know no tenants but by `cache_salt`";
        sink.push(
            Diagnostic::new(Code::NoEffect, format!("{path}.isolateTenants"), message)
                .at(at.span)
                .related(*events, "their word"),
        );
    }
    // With KV events, blocks have the size that the engines use.
    let of_engines = file.block_size.is_none() && kv_events.is_some();
    let is_text = tokenizer == TokenizerSettings::Characters;
    let of_env = if file.block_size.is_none() { env.block_size(is_text, is_aibrix, sink) } else { None };
    let block_size = of_env.unwrap_or_else(|| file.block_size());
    PrefixSettings {
        tokenizer,
        block_size: (!of_engines).then_some(block_size),
        max_bytes: file.max_bytes().0,
        max_blocks: file.max_blocks.map(|at| at.value).or(env.max_blocks),
        tenant_share: file.tenant_share() as f32,
        tenant_header,
        isolate_tenants: file.isolate_tenants() && kv_events.is_none(),
        choose_rank: file.choose_rank(),
        claim_every_block: is_exact,
        claim_life: file.claim_life(),
        volatile: volatile(file.volatile.map(|at| at.value).unwrap_or_default(), path, sink),
        kv_events: kv_events.map(|(_, settings)| settings),
    }
}

/// The tokenizer of AIBrix's variables. AIBrix's `tiktoken` has one encoding for all models.
fn of_aibrix(kind: TokenizerKind, is_exact: bool) -> schema::Tokenizer {
    let encoding = (is_exact && kind == TokenizerKind::Tiktoken).then(|| Encoding::Cl100kBase.name().to_owned());
    let encoding = encoding.map(|value| At { value, span: Span::default() });
    schema::Tokenizer { encoding, ..schema::Tokenizer::plain(kind) }
}

fn volatile(file: Vec<At<schema::Volatile>>, path: &str, sink: &mut Sink) -> Vec<VolatileRule> {
    let mut rules = Vec::with_capacity(file.len());
    for (i, At { value, span }) in file.into_iter().enumerate() {
        let prefix = value.prefix.map(|at| at.value).unwrap_or_default();
        if prefix.is_empty() {
            let message = "`prefix` is missing: every text would be left out of the keys";
            sink.push(Diagnostic::new(Code::MissingKey, format!("{path}.volatile[{i}].prefix"), message).at(span));
        }
        rules.push(VolatileRule { prefix, suffix: value.suffix.map(|at| at.value).unwrap_or_default() });
    }
    rules
}

fn tokenizer(file: schema::Tokenizer, path: &str, env: &AibrixDefaults, sink: &mut Sink) -> TokenizerSettings {
    let path = format!("{path}.tokenizer");
    let kind = file.kind.value;
    let spans: [(&str, Option<Span>, TokenizerKind); 11] = [
        ("encoding", file.encoding.as_ref().map(|at| at.span), TokenizerKind::Tiktoken),
        ("directory", file.directory.as_ref().map(|at| at.span), TokenizerKind::HuggingFace),
        ("url", file.url.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("render", file.render.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("timeout", file.timeout.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("requestTimeout", file.request_timeout.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("healthCheckPeriod", file.health_check_period.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("ttl", file.ttl.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("maxModels", file.max_models.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("modelUrls", file.model_urls.as_ref().map(|at| at.span), TokenizerKind::Remote),
        ("fallback", file.fallback.as_ref().map(|at| at.span), TokenizerKind::Remote),
    ];
    for (key, span, of) in spans {
        if let Some(span) = span.filter(|_| of != kind) {
            let message = format!("`{key}` has no effect: the tokenizer has none");
            sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.{key}"), message).at(span));
        }
    }
    match kind {
        TokenizerKind::Characters => TokenizerSettings::Characters,
        TokenizerKind::Tiktoken => TokenizerSettings::Tiktoken { encoding: encoding(file.encoding, &path, sink) },
        TokenizerKind::HuggingFace => {
            if file.directory.is_none() {
                let message = "`directory` is missing: the folder with the model's `tokenizer.json`";
                sink.push(Diagnostic::new(Code::MissingKey, format!("{path}.directory"), message).at(file.kind.span));
            }
            TokenizerSettings::HuggingFace { directory: file.directory.map(|at| at.value).unwrap_or_default().into() }
        }
        TokenizerKind::Remote => TokenizerSettings::Remote(remote(file, &path, &env.remote, sink)),
    }
}

/// The remote tokenizer from the file, else from AIBrix's environment, else the defaults.
fn remote(mut file: schema::Tokenizer, path: &str, env: &RemoteDefaults, sink: &mut Sink) -> RemoteTokenizer {
    let template = |at: At<String>, path: &str, sink: &mut Sink| {
        tokenizer_url::template(&at.value).unwrap_or_else(|allowed| {
            let shown: String = at.value.chars().take(60).collect();
            sink.out_of_range(at.span, path, format!("`{shown}`"), allowed);
            at.value
        })
    };
    let request_timeout = file.request_timeout.map(|at| at.value).or(env.request_timeout);
    let health_check_period = file.health_check_period.map(|at| at.value).or(env.health_check_period);
    let ttl = file.ttl.map(|at| at.value).or(env.ttl);
    let max_models = file.max_models.map(|at| at.value).or(env.max_models);
    let fallback = file.fallback.map(|at| at.value).or(env.fallback);
    let url = file.url.take().map(|at| template(at, &format!("{path}.url"), sink));
    let urls = file.model_urls.take().map(|at| at.value).unwrap_or_default().into_iter();
    let model_urls = urls.map(|(model, url)| {
        let path = format!("{path}.modelUrls.{}", model.value);
        if ["{address}", "{ip}", "%s"].iter().any(|placeholder| url.value.contains(placeholder)) {
            sink.out_of_range(url.span, &path, format!("`{}`", url.value), "a URL without placeholders");
        }
        let url = template(url, &path, sink);
        (model.value, url)
    });
    let model_urls = model_urls.collect();
    RemoteTokenizer {
        url: url.or_else(|| env.url.clone()),
        model_urls,
        render: file.render(),
        timeout: file.timeout(),
        request_timeout: request_timeout.unwrap_or_else(|| file.request_timeout()),
        health_check_period: health_check_period.unwrap_or_else(|| file.health_check_period()),
        ttl: ttl.unwrap_or_else(|| file.ttl()),
        max_models: max_models.unwrap_or_else(|| file.max_models()),
        fallback: fallback.unwrap_or_else(|| file.fallback()),
    }
}

fn encoding(file: schema::Opt<String>, path: &str, sink: &mut Sink) -> Option<String> {
    let at = file?;
    if Encoding::by_name(&at.value).is_none() {
        let shown: String = at.value.chars().take(60).collect();
        let known = Encoding::ALL.map(Encoding::name).join(", ");
        sink.out_of_range(at.span, &format!("{path}.encoding"), format!("`{shown}`"), &known);
    }
    Some(at.value)
}

/// Checks the ports of all ranks: rank r has the first port plus r.
fn rank_ports(file: &schema::KvEvents, path: &str, sink: &mut Sink) {
    let ranks = file.ranks().clamp(1, MAX_RANKS);
    let mut range = |key: &str, at: &At<u16>| {
        let ports = RankPorts::new(at.value, ranks);
        if ports.is_none() && at.value != 0 {
            let allowed =
                format!("1 to {}, because rank r of {ranks} has this port plus r", RankPorts::greatest_first(ranks));
            sink.out_of_range(at.span, &format!("{path}.{key}"), at.value, &allowed);
        }
        ports
    };
    let replay = file.replay_port.as_ref().and_then(|at| range("replayPort", at));
    // With `bind`, servers connect to Attaché.
    let plain = At { value: file.port(), span: Span::default() };
    let port = file.port.as_ref().unwrap_or(&plain);
    let events = if file.bind.is_none() { range("port", port) } else { None };
    if let (Some(events), Some(replay), Some(at)) = (events, replay, file.replay_port)
        && events.overlaps(replay)
    {
        let error = PortError::Overlap { events, replay };
        let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.replayPort"), error.to_string());
        let help = format!("the two ports must differ by at least {ranks}");
        sink.push(diagnostic.at(at.span).related(port.span, "the port of the events").help(help));
    }
}

/// Checks the ports that labels of the file's endpoints name. Those of other endpoints are known later.
fn check_ports(endpoints: &[At<schema::Endpoint>], events: &KvEventSettings, path: &str, sink: &mut Sink) {
    let pool = (events.bind.is_none().then_some(events.port), events.replay_port);
    let mut known: Vec<(IpAddr, RankPorts, Span)> = Vec::with_capacity(endpoints.len());
    for (i, at) in endpoints.iter().enumerate() {
        let labels: BTreeMap<Arc<str>, Arc<str>> = at
            .value
            .labels
            .iter()
            .map(|(name, value)| (name.value.as_str().into(), value.value.as_str().into()))
            .collect();
        let own =
            |name: &str| at.value.labels.iter().find(|(known, _)| known.value == name).map(|(_, value)| value.span);
        let path = format!("{path}.endpoints[{i}].labels");
        let ports = match KvEventPorts::of(&labels, pool, (0, events.ranks)) {
            Ok(ports) => ports,
            Err(error) => {
                // Without a label, the section is wrong. That was reported there, and values of labels before.
                let is_known = matches!(error, PortError::NotAPort { .. });
                if let (Some(span), false) = (own(PORT_LABEL).or_else(|| own(REPLAY_PORT_LABEL)), is_known) {
                    let code =
                        if matches!(error, PortError::Overlap { .. }) { Code::Contradiction } else { Code::OutOfRange };
                    sink.push(Diagnostic::new(code, path, error.to_string()).at(span));
                }
                continue;
            }
        };
        let Ok(address) = at.value.address.value.parse::<SocketAddr>() else { continue };
        let Some(events) = ports.events else { continue };
        let other = known.iter().find(|(ip, ports, _)| *ip == address.ip() && ports.overlaps(events));
        if let Some((_, _, first)) = other {
            let message = format!("two endpoints on {} have events at the same {events}", address.ip());
            let diagnostic =
                Diagnostic::new(Code::Contradiction, path, message).at(at.span).related(*first, "the first one");
            sink.push(diagnostic.help(format!("name each one's port by the label `{PORT_LABEL}`")));
        }
        known.push((address.ip(), events, at.span));
    }
}

fn kv_events(file: schema::KvEvents, path: &str, sink: &mut Sink) -> KvEventSettings {
    rank_ports(&file, path, sink);
    if let (Some(bind), Some(port)) = (&file.bind, &file.port) {
        let message = "`port` has no effect: with `bind` the publishers connect here";
        sink.push(
            Diagnostic::new(Code::NoEffect, format!("{path}.port"), message)
                .at(port.span)
                .related(bind.span, "the socket that is bound"),
        );
    }
    if let Some(at) = file.require_sender_address.filter(|_| file.bind.is_none()) {
        let message = "`requireSenderAddress` has no effect without `bind`: Attaché connects to the endpoints itself";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.requireSenderAddress"), message).at(at.span));
    }
    if let Some(at) = &file.bind
        && at.value.strip_prefix("tcp://").is_none_or(|rest| rest.parse::<std::net::SocketAddr>().is_err())
    {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, &format!("{path}.bind"), format!("`{shown}`"), "`tcp://ip:port`");
    }
    KvEventSettings {
        port: file.port(),
        replay_port: file.replay_port.map(|at| at.value),
        ranks: file.ranks(),
        require_sender_address: file.require_sender_address(),
        // Every topic, so that publishers with vLLM's default topic, which is empty, are included.
        topic: file.topic.map(|at| at.value).unwrap_or_default(),
        bind: file.bind.map(|at| at.value),
    }
}
