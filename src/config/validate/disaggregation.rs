//! The checks of `disaggregation` and of endpoints' roles.

use crate::aibrix_env::AibrixDefaults;
use crate::schema::{self, DeciderKind, DisaggregationMode, word_of};
use crate::settings::Disaggregation;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_disagg::attempts::AttemptLimits;
use attache_disagg::connector;
use attache_disagg::policy::{BY_LABEL, Direct, Fallback, Mode, default_together};
use attache_pool::ports::{PORT_LABELS, PortError, port};
use attache_pool::role::ROLE_LABEL;
use attache_pool::{EndpointSpec, Roles};
use attache_scheduling::{Decider, SplitPolicy};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// 60 s: `messageTimeout` of the EnvoyExtensionPolicy that AIBrix installs.
const AIBRIX_MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The labels of an endpoint, including its `role`.
pub(super) fn labels(
    file: &[(At<String>, At<String>)],
    role: Option<&At<String>>,
    path: &str,
    sink: &mut Sink,
) -> BTreeMap<Arc<str>, Arc<str>> {
    let mut labels: BTreeMap<Arc<str>, Arc<str>> =
        file.iter().map(|(k, v)| (k.value.as_str().into(), v.value.as_str().into())).collect();
    for label in PORT_LABELS {
        let Some((_, at)) = file.iter().find(|(key, at)| key.value == label && port(&at.value).is_none()) else {
            continue;
        };
        let error = PortError::NotAPort { label, value: at.value.chars().take(60).collect() };
        sink.push(Diagnostic::new(Code::OutOfRange, format!("{path}.labels"), error.to_string()).at(at.span));
    }
    let said = file.iter().find(|(key, _)| key.value == ROLE_LABEL).map(|(_, value)| value);
    for (at, path) in
        role.map(|at| (at, format!("{path}.role"))).into_iter().chain(said.map(|at| (at, path.to_owned())))
    {
        if Roles::of_word(&at.value).is_none() {
            let shown: String = at.value.chars().take(60).collect();
            sink.out_of_range(at.span, &path, format!("`{shown}`"), &Roles::words().join(", "));
        }
    }
    if let Some(role) = role {
        if let Some(label) = said.filter(|label| label.value != role.value) {
            let message = format!("`role` is {}, and the label `{ROLE_LABEL}` says {}", role.value, label.value);
            sink.push(Diagnostic::new(Code::Contradiction, format!("{path}.role"), message).at(role.span));
        }
        labels.insert(ROLE_LABEL.into(), role.value.as_str().into());
    }
    labels
}

/// What a pool's strategies require of its endpoints.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pairs<'p> {
    /// Whether the pool's own strategy is `pd`.
    pub(super) by_pool: bool,
    /// Whether a model's rule or a request may select `pd`.
    pub(super) by_others: bool,
    /// Whether `pd` decides exactly as in AIBrix.
    pub(super) exact: bool,
    /// Endpoints that the configuration lists.
    pub(super) endpoints: &'p [EndpointSpec],
    /// Whether further endpoints are discovered later, with unknown labels.
    pub(super) are_found: bool,
}

impl Pairs<'_> {
    /// Whether an endpoint may be a prefill worker.
    fn have_prefill(&self) -> bool {
        self.are_found || self.endpoints.iter().any(|spec| Roles::of_labels(&spec.labels).has(Roles::PREFILL))
    }
}

/// How a pool splits requests: as the file configures it, else by AIBrix's labels if `pd` may be selected and
/// has endpoints to choose from.
pub(super) fn of_pool(
    file: Option<At<schema::Disaggregation>>,
    pairs: &Pairs<'_>,
    path: &str,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Option<Disaggregation> {
    if pairs.by_pool && !pairs.endpoints.is_empty() && !pairs.have_prefill() {
        let message = "`pd` has nothing to pair: no endpoint of the pool computes prompts for others";
        let help = "give prefill servers `role: prefill`, or AIBrix's label `role-name: prefill`, and decode \
                    servers `role: decode`";
        sink.push(Diagnostic::new(Code::Contradiction, format!("{path}.strategy"), message).help(help));
    }
    let path = format!("{path}.disaggregation");
    let by_label = (pairs.by_pool || pairs.by_others) && pairs.have_prefill();
    let file = match file {
        Some(at) => at.value,
        None if by_label => {
            let at = |value| Some(At { value, span: Span::default() });
            let decider = schema::Decider::plain(At { value: DeciderKind::Strategy, span: Span::default() });
            let decider = Some(At { value: decider, span: Span::default() });
            schema::Disaggregation { connector: at(BY_LABEL.to_owned()), decider, ..Default::default() }
        }
        None => {
            tell_void(&path, env, sink);
            return None;
        }
    };
    disaggregation(file, pairs.by_pool && pairs.exact, &path, env, sink)
}

/// Warns of AIBrix's variables without effect on a pool that does not split requests.
fn tell_void(path: &str, env: &AibrixDefaults, sink: &mut Sink) {
    let set = [
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", env.prefill_timeout.is_some()),
        ("AIBRIX_KV_CONNECTOR_TYPE", env.kv_connector.is_some()),
    ];
    for (variable, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
        let message =
            format!("`{variable}` has no effect: there is no `{path}`, nor a prefill server for the strategy `pd`");
        sink.push(Diagnostic::new(Code::NoEffect, variable, message));
    }
}

/// The mode in which a sidecar sends the prefill leg; warns of keys that only apply to Attaché's own calls.
fn header_mode(file: &schema::Disaggregation, path: &str, sink: &mut Sink) -> Mode {
    let direct_only: [(&str, Option<_>); 10] = [
        ("messageTimeout", file.message_timeout.map(|at| at.span)),
        ("connector", file.connector.as_ref().map(|at| at.span)),
        ("prefillTimeout", file.prefill_timeout.map(|at| at.span)),
        ("hedgeAfter", file.hedge_after.map(|at| at.span)),
        ("fallback", file.fallback.map(|at| at.span)),
        ("scheme", file.scheme.map(|at| at.span)),
        ("pathPrefix", file.path_prefix.as_ref().map(|at| at.span)),
        ("insecureSkipVerify", file.insecure_skip_verify.map(|at| at.span)),
        ("bootstrapPort", file.bootstrap_port.map(|at| at.span)),
        ("decoderBlocksTtl", file.decoder_blocks_ttl.map(|at| at.span)),
    ];
    for (key, span) in direct_only.into_iter().filter_map(|(key, span)| Some((key, span?))) {
        let message = format!("`{key}` is the sidecar's business with `mode: header`");
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.{key}"), message).at(span));
    }
    Mode::Header { source_tokens: file.cache_source_tokens.map(|at| at.value) }
}

/// The connector in the file, else in AIBrix's environment, else the default, with its name there; and whether labels
/// of workers select it.
fn connector(
    file: &schema::Disaggregation,
    path: &str,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Option<(&'static connector::ConnectorDescriptor, bool)> {
    let said = &*file.connector();
    let by_label = said == BY_LABEL;
    let name = if by_label { env.kv_connector.unwrap_or(connector::shfs::CONNECTOR.name) } else { said };
    if let Some(of_env) = env.kv_connector.filter(|of_env| *of_env != name) {
        let message = format!("`AIBRIX_KV_CONNECTOR_TYPE` has no effect: `connector` is `{name}`, not `{of_env}`");
        sink.push(Diagnostic::new(Code::Overridden, "AIBRIX_KV_CONNECTOR_TYPE", message));
    }
    let Some(descriptor) = connector::named(name) else {
        let names: Vec<&str> = connector::CONNECTORS.iter().map(|d| d.name).chain([BY_LABEL]).collect();
        let span = file.connector.as_ref().map(|at| at.span).unwrap_or_default();
        let shown: String = name.chars().take(60).collect();
        sink.out_of_range(span, &format!("{path}.connector"), format!("`{shown}`"), &names.join(", "));
        return None;
    };
    Some((descriptor, by_label))
}

/// The prefix of API paths on model servers, without a slash at the end.
fn path_prefix<'f>(file: Option<&'f At<String>>, path: &str, sink: &mut Sink) -> &'f str {
    let path_prefix = file.map_or("", |at| at.value.trim_end_matches('/'));
    let is_path = path_prefix.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#'));
    if let Some(at) = file.filter(|_| !is_path || !matches!(path_prefix.get(..1), None | Some("/"))) {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, &format!("{path}.pathPrefix"), format!("`{shown}`"), "a path such as /llm");
    }
    path_prefix
}

/// Checks the section; `None` if its connector is unknown. If the strategy decides exactly as in AIBrix (`exact`), a
/// failed prefill fails the request.
fn disaggregation(
    file: schema::Disaggregation,
    exact: bool,
    path: &str,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Option<Disaggregation> {
    let together = match &file.together {
        None => default_together(),
        Some(at) => at.value.iter().map(|label| label.value.as_str().into()).collect(),
    };
    let decider = decider(file.decider.as_ref(), path, sink);
    let split = SplitPolicy { decider, together, whole: true, required: false };
    if file.mode() == DisaggregationMode::Header {
        return Some(Disaggregation { split, mode: header_mode(&file, path, sink) });
    }
    if let Some(at) = file.cache_source_tokens {
        let message = "only a sidecar can fetch a cached prefix from another server: this needs `mode: header`";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.cacheSourceTokens"), message).at(at.span));
    }
    let (descriptor, by_label) = connector(&file, path, env, sink)?;
    let name = descriptor.name;
    let split = SplitPolicy { whole: descriptor.connector.serves_whole(), ..split };
    if let Some(at) = file.decider.as_ref().filter(|_| !split.whole && split.decider == Decider::Never) {
        let message = format!("no request is split, and decode servers of `connector: {name}` serve none that is not");
        let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.decider"), message).at(at.span);
        sink.push(diagnostic.help("leave `decider` out, or `disaggregation` where all servers serve whole requests"));
    }
    let timeout = file.prefill_timeout.map(|at| at.value).or(env.prefill_timeout);
    let timeout = timeout.unwrap_or_else(|| file.prefill_timeout());
    let hedge_after = file.hedge_after.map(|at| at.value);
    if let (Some(after), Some(at)) = (hedge_after.filter(|after| *after >= timeout), file.hedge_after) {
        let message = format!("a second server is asked after {after:?}, when the prefill has ended after {timeout:?}");
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.hedgeAfter"), message).at(at.span));
    }
    if let Some(at) = file.decoder_blocks_ttl.filter(|_| !descriptor.connector.carries()) {
        let message = format!("decode servers keep nothing for the next turn with `connector: {name}`");
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.decoderBlocksTtl"), message).at(at.span));
    }
    let path_prefix = path_prefix(file.path_prefix.as_ref(), path, sink);
    let message_timeout = file.message_timeout.map(|at| at.value);
    let fallback = if exact { Fallback::Fail } else { Fallback::default() };
    let direct = Direct {
        connector: descriptor.connector,
        by_label,
        bounds: AttemptLimits { timeout, hedge_after },
        // That of the file, else AIBrix's where its environment is set.
        message_timeout: message_timeout.or_else(|| env.is_aibrix().then_some(AIBRIX_MESSAGE_TIMEOUT)),
        fallback: file.fallback.map_or(fallback, |at| at.value),
        scheme: word_of(file.scheme()).into(),
        path_prefix: path_prefix.into(),
        insecure_skip_verify: file.insecure_skip_verify(),
        bootstrap_port: file.bootstrap_port(),
        decoder_blocks_ttl: file.decoder_blocks_ttl(),
    };
    let split = SplitPolicy { required: direct.fallback == Fallback::Fail, ..split };
    Some(Disaggregation { split, mode: Mode::Direct(direct) })
}

fn decider(file: Option<&At<schema::Decider>>, path: &str, sink: &mut Sink) -> Decider {
    let Some(At { value: file, .. }) = file else { return Decider::default() };
    let numbers = [("nonCachedTokens", file.non_cached_tokens), ("promptTokens", file.prompt_tokens)];
    if file.kind.value != DeciderKind::PrefixBased {
        for (key, at) in numbers.iter().filter_map(|(key, at)| Some((key, (*at)?))) {
            let message = format!("`{key}` belongs to `type: prefix-based`");
            sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.decider.{key}"), message).at(at.span));
        }
    }
    match file.kind.value {
        DeciderKind::Predicted => Decider::Predicted,
        DeciderKind::Always => Decider::Always,
        DeciderKind::Never => Decider::Never,
        DeciderKind::Strategy => Decider::Strategy,
        DeciderKind::PrefixBased => {
            let non_cached_tokens = file.non_cached_tokens();
            if non_cached_tokens == 0 {
                let message = "no request is split: `nonCachedTokens` is 0";
                let diagnostic = Diagnostic::new(Code::NoEffect, format!("{path}.decider"), message);
                sink.push(diagnostic.at(file.kind.span).help("give the tokens that are worth a transfer, such as 16"));
            }
            Decider::PrefixBased { non_cached_tokens, prompt_tokens: file.prompt_tokens() }
        }
    }
}
