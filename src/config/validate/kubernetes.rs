//! The checks of a pool's `kubernetes`, and of the flags that stand for it.

use super::pools::metrics;
use crate::schema::{self, Opt};
use crate::settings::{KubernetesSource, PodsOf, PoolGroup, PoolSearch};
use crate::{KubernetesFlags, Overrides};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_pool::MetricsSource;
use attache_pool::source::check_ports;
use attache_scheduling::selector::LabelSelector;

/// The pods that flags select; `like` has defaults for engine and metrics.
pub(super) fn of_flags(
    flags: &Overrides,
    like: Option<&schema::FromFlags>,
    sink: &mut Sink,
) -> Option<SelectedObjects> {
    fn at<T>(value: T) -> At<T> {
        At { value, span: Span::default() }
    }
    let k = &flags.kubernetes;
    let ports = &k.endpoint_target_ports;
    let section = schema::Kubernetes {
        pool: k.pool_name.clone().map(at),
        pool_selector: k.pool_selector.clone().map(at),
        namespace: k.pool_namespace.clone().filter(|namespace| !namespace.is_empty()).map(at),
        group: k.pool_group.clone().map(at),
        selector: k.endpoint_selector.clone().map(at),
        target_ports: (!ports.is_empty()).then(|| at(ports.iter().copied().map(at).collect())),
        engine: k.engine.map(at).or(like.and_then(|like| like.engine)),
        metrics: None,
    };
    if !k.any() {
        return None;
    }
    let mut named = named(&section, Span::default(), SettingPlace::Flags, sink)?;
    match &mut named {
        SelectedObjects::Pods(source) => {
            source.metrics = metrics_of_flags(k, like, sink);
            if let (Some(port), true) = (metrics_port(k), several_ports(&source.pods)) {
                port_of_several("--model-server-metrics-port", port, Span::default(), sink);
            }
        }
        SelectedObjects::Pools(search) => search.metrics = metrics_of_flags(k, like, sink),
    }
    Some(named)
}

/// Where model servers that flags name have their metrics; `like` has the defaults.
pub(super) fn metrics_of_flags(
    flags: &KubernetesFlags,
    like: Option<&schema::FromFlags>,
    sink: &mut Sink,
) -> MetricsSource {
    let mut source = metrics(like.map(|like| &like.metrics), "metrics-data-source", sink);
    if let Some(scheme) = &flags.metrics_scheme {
        source.scheme = scheme.as_str().into();
    }
    if let Some(path) = &flags.metrics_path {
        source.path = Some(path.as_str().into());
    }
    source.port = metrics_port(flags).or(source.port);
    source
}

/// Warns of flags about endpoints that no flag names. `has_file`: the file names no endpoints and uses an endpoints
/// file, to which the flags apply too.
pub(super) fn tell_void(flags: &Overrides, has_file: bool, sink: &mut Sink) {
    let k = &flags.kubernetes;
    let of_pods = [
        ("--pool-namespace", k.pool_namespace.as_ref().is_some_and(|namespace| !namespace.is_empty())),
        ("--pool-group", k.pool_group.is_some()),
        ("--endpoint-target-ports", !k.endpoint_target_ports.is_empty()),
    ];
    for (flag, _) in of_pods.into_iter().filter(|(_, given)| *given && !k.any()) {
        let message =
            format!("`{flag}` has no effect without `--pool-name`, `--pool-selector` or `--endpoint-selector`");
        sink.push(Diagnostic::new(Code::NoEffect, flag, message));
    }
    let of_servers = [
        ("--engine", k.engine.is_some()),
        ("--model-server-metrics-scheme", k.metrics_scheme.is_some()),
        ("--model-server-metrics-path", k.metrics_path.is_some()),
        ("--model-server-metrics-port", metrics_port(k).is_some()),
    ];
    let names_none = !k.any() && flags.endpoints.is_empty() && !has_file;
    for (flag, _) in of_servers.into_iter().filter(|(_, given)| *given && names_none) {
        let message = format!("`{flag}` has no effect: it speaks of servers that flags name, and none does");
        let help = "the file says it beside its own: `engine` and `metrics` of `kubernetes`, `dns` and `endpoints`";
        sink.push(Diagnostic::new(Code::NoEffect, flag, message).help(help));
    }
}

fn several_ports(pods: &PodsOf) -> bool {
    matches!(pods, PodsOf::Selector { target_ports, .. } if target_ports.len() > 1)
}

fn port_of_several(path: &str, port: u16, span: Span, sink: &mut Sink) {
    let message = format!("the metrics port {port} has no effect: each rank of several has a page at its own port");
    sink.push(Diagnostic::new(Code::NoEffect, path, message).at(span));
}

/// The port in a flag; 0 means the port of the model server, as in the reference picker.
fn metrics_port(flags: &KubernetesFlags) -> Option<u16> {
    flags.metrics_port.filter(|port| *port != 0)
}

/// Warns of flags that contradict the file about the endpoints which flags name.
pub(super) fn tell_replaced(flags: &KubernetesFlags, like: Option<&schema::FromFlags>, sink: &mut Sink) {
    let Some(like) = like else { return };
    let file = &like.metrics;
    // Their errors are reported where they are used.
    let metrics = metrics(Some(file), "metrics-data-source", &mut Sink::default());
    let engine = like.engine.filter(|at| flags.engine.is_some_and(|engine| engine != at.value)).map(|at| at.span);
    let other = |flag: &Option<String>, known: &str| flag.as_deref().is_some_and(|given| given != known);
    let scheme = file.scheme.filter(|_| other(&flags.metrics_scheme, &metrics.scheme)).map(|at| at.span);
    let path = file.path.as_ref().filter(|at| other(&flags.metrics_path, &at.value)).map(|at| at.span);
    let port = file.port.filter(|at| metrics_port(flags).is_some_and(|port| port != at.value)).map(|at| at.span);
    let all = [
        ("--engine", engine),
        ("--model-server-metrics-scheme", scheme),
        ("--model-server-metrics-path", path),
        ("--model-server-metrics-port", port),
    ];
    for (flag, span) in all.into_iter().filter_map(|(flag, span)| Some((flag, span?))) {
        let message = format!("`{flag}` replaces what the file says");
        sink.push(Diagnostic::new(Code::Overridden, flag, message).at(span));
    }
}

/// Where a selection of pods is configured.
#[derive(Clone, Copy)]
enum SettingPlace<'a> {
    /// In the section of the file with this path.
    File(&'a str),
    /// By command-line flags.
    Flags,
}

impl SettingPlace<'_> {
    /// The name of a setting there: a key of the section, or a flag.
    fn name(self, key: &'static str) -> &'static str {
        match (self, key) {
            (Self::File(_), key) => key,
            (Self::Flags, "namespace") => "--pool-namespace",
            (Self::Flags, "group") => "--pool-group",
            (Self::Flags, "selector") => "--endpoint-selector",
            (Self::Flags, "poolSelector") => "--pool-selector",
            (Self::Flags, "targetPorts") => "--endpoint-target-ports",
            (Self::Flags, _) => "--pool-name",
        }
    }

    /// The path of a key, or the flag.
    fn path(self, key: &'static str) -> String {
        match self {
            Self::File(path) => format!("{path}.{key}"),
            Self::Flags => self.name(key).to_owned(),
        }
    }
}

/// The objects that a section of the file, or flags, select.
pub(super) enum SelectedObjects {
    /// Pods, which are a pool's endpoints.
    Pods(KubernetesSource),
    /// InferencePools, which become pools.
    Pools(PoolSearch),
}

/// The objects that a section of the file selects.
pub(super) fn of_file(file: &Opt<schema::Kubernetes>, path: &str, sink: &mut Sink) -> Option<SelectedObjects> {
    let At { value, span } = file.as_ref()?;
    let path = format!("{path}.kubernetes");
    named(value, *span, SettingPlace::File(&path), sink)
}

fn named(file: &schema::Kubernetes, span: Span, place: SettingPlace<'_>, sink: &mut Sink) -> Option<SelectedObjects> {
    // For the section as a whole: contradicting flags were rejected before.
    let path = match place {
        SettingPlace::File(path) => path,
        SettingPlace::Flags if file.pool.is_some() => "--pool-name",
        SettingPlace::Flags if file.pool_selector.is_some() => "--pool-selector",
        SettingPlace::Flags => "--endpoint-selector",
    };
    if cfg!(not(feature = "full")) {
        let message = "this build can't ask Kubernetes (it lacks the feature `full`)";
        sink.push(Diagnostic::new(Code::Contradiction, path, message).at(span));
    }
    if let Some(at) = file.namespace.as_ref().filter(|at| !is_name(&at.value)) {
        wrong_name(at, "namespace", place, sink);
    }
    let ways = [
        ("an InferencePool", &file.pool),
        ("a selector", &file.selector),
        ("a selector of InferencePools", &file.pool_selector),
    ];
    let mut ways = ways.into_iter().filter_map(|(way, at)| Some((way, at.as_ref()?.span)));
    if let (Some((way, first)), Some((other, second))) = (ways.next(), ways.next()) {
        let message = format!("pods are named twice: by {way} and by {other}");
        let diagnostic = Diagnostic::new(Code::Contradiction, path, message).at(first);
        sink.push(diagnostic.related(second, "and here").help("keep one of the two"));
        return None;
    }
    let namespace = file.namespace.as_ref().map(|at| at.value.clone());
    let engine = file.engine();
    let metrics = metrics(file.metrics.as_ref().map(|at| &at.value), path, sink);
    if let Some(at) = &file.pool_selector {
        let selector = selector_of(at, "poolSelector", place, sink);
        let group = of_inference_pool(file, place, sink);
        return Some(SelectedObjects::Pools(PoolSearch {
            namespace,
            group: group?,
            selector: selector?,
            engine,
            metrics,
        }));
    }
    let pods = match (&file.pool, &file.selector) {
        (Some(pool), _) => of_pool(pool, file, place, sink),
        (None, Some(selector)) => of_selector(selector, file, place, sink),
        (None, None) => {
            let message = "`kubernetes` has none of `pool`, `poolSelector` and `selector`";
            let diagnostic = Diagnostic::new(Code::MissingKey, path, message).at(span);
            sink.push(diagnostic.help("as in `kubernetes: {pool: vllm-pool}` or `kubernetes: {selector: app=vllm}`"));
            None
        }
    };
    let pods = pods?;
    let port = file.metrics.as_ref().and_then(|metrics| metrics.value.port);
    if let (Some(at), true) = (port, several_ports(&pods)) {
        port_of_several(&format!("{path}.metrics.port"), at.value, at.span, sink);
    }
    Some(SelectedObjects::Pods(KubernetesSource { namespace, pods, engine, metrics, found: false }))
}

fn of_pool(pool: &At<String>, file: &schema::Kubernetes, place: SettingPlace<'_>, sink: &mut Sink) -> Option<PodsOf> {
    if !is_name(&pool.value) {
        wrong_name(pool, "pool", place, sink);
    }
    Some(PodsOf::Pool { name: pool.value.clone(), group: of_inference_pool(file, place, sink)? })
}

/// The group of an InferencePool, which also names the ports.
fn of_inference_pool(file: &schema::Kubernetes, place: SettingPlace<'_>, sink: &mut Sink) -> Option<PoolGroup> {
    if let Some(at) = &file.target_ports {
        let message = format!("`{}` has no effect: the InferencePool names the ports", place.name("targetPorts"));
        sink.push(Diagnostic::new(Code::NoEffect, place.path("targetPorts"), message).at(at.span));
    }
    let Some(at) = &file.group else { return Some(PoolGroup::default()) };
    let group = PoolGroup::of(&at.value);
    if group.is_none() {
        let allowed = PoolGroup::ALL.map(|group| format!("`{}`", group.as_str())).join(" or ");
        sink.out_of_range(at.span, &place.path("group"), format!("`{}`", shown(&at.value)), &allowed);
    }
    group
}

fn of_selector(
    selector: &At<String>,
    file: &schema::Kubernetes,
    place: SettingPlace<'_>,
    sink: &mut Sink,
) -> Option<PodsOf> {
    if let Some(at) = &file.group {
        let message = format!("`{}` has no effect: there is no InferencePool to look for", place.name("group"));
        sink.push(Diagnostic::new(Code::NoEffect, place.path("group"), message).at(at.span));
    }
    let selector = selector_of(selector, "selector", place, sink)?;
    let mut target_ports = Vec::new();
    if let Some(at) = &file.target_ports {
        target_ports = at.value.iter().map(|port| port.value).collect();
        if let Err(problem) = check_ports(&target_ports) {
            let message = format!("`{}`: {problem}", place.name("targetPorts"));
            sink.push(Diagnostic::new(Code::OutOfRange, place.path("targetPorts"), message).at(at.span));
        }
    }
    Some(PodsOf::Selector { selector, target_ports })
}

fn selector_of(at: &At<String>, key: &'static str, place: SettingPlace<'_>, sink: &mut Sink) -> Option<String> {
    let problem = match LabelSelector::parse(&at.value) {
        Ok(_) if at.value.trim().is_empty() => "it is empty".to_owned(),
        Ok(_) => return Some(at.value.clone()),
        Err(error) => error,
    };
    let message = format!("`{}` is no label selector: {problem}", shown(&at.value));
    let diagnostic = Diagnostic::new(Code::OutOfRange, place.path(key), message).at(at.span);
    sink.push(diagnostic.help("as in `app=vllm` or `app in (vllm,sglang),tier!=test`"));
    None
}

fn wrong_name(at: &At<String>, key: &'static str, place: SettingPlace<'_>, sink: &mut Sink) {
    let got = format!("`{}`", shown(&at.value));
    sink.out_of_range(at.span, &place.path(key), got, "lower-case letters, digits, `-` and `.`");
}

/// Whether the text can be the name of an object.
pub(super) fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    text.len() <= 253 && text.chars().all(inner) && end(text.chars().next()) && end(text.chars().next_back())
}

fn shown(text: &str) -> String {
    text.chars().take(60).collect()
}
