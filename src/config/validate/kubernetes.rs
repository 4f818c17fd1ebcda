//! The checks of a pool's `kubernetes`, and of the flags that stand for it.

use super::given;
use super::pools::metrics;
use crate::config::Overrides;
use crate::config::decode::Sink;
use crate::config::diagnostic::{At, Code, Diagnostic, Span};
use crate::config::schema::{self, Opt};
use crate::config::settings::kubernetes::check_ports;
use crate::config::settings::{KubernetesSource, PodsOf, PoolGroup};
use crate::scheduling::selector::LabelSelector;

/// The pods that flags name, where `like` says what those are like that say nothing themselves.
pub(super) fn of_flags(
    flags: &Overrides,
    like: Option<&schema::FromFlags>,
    sink: &mut Sink,
) -> Option<KubernetesSource> {
    fn at<T>(value: T) -> At<T> {
        At { value, span: Span::default() }
    }
    let k = &flags.kubernetes;
    let ports = &k.endpoint_target_ports;
    let section = schema::Kubernetes {
        pool: k.pool_name.clone().map(at),
        namespace: k.pool_namespace.clone().filter(|namespace| !namespace.is_empty()).map(at),
        group: k.pool_group.clone().map(at),
        selector: k.endpoint_selector.clone().map(at),
        target_ports: (!ports.is_empty()).then(|| at(ports.iter().copied().map(at).collect())),
        engine: k.engine.map(at).or(like.and_then(|like| like.engine)),
        metrics: None,
    };
    if section.pool.is_none() && section.selector.is_none() {
        let without = [
            ("--pool-namespace", section.namespace.is_some()),
            ("--pool-group", section.group.is_some()),
            ("--endpoint-target-ports", section.target_ports.is_some()),
        ];
        for (flag, _) in without.into_iter().filter(|(_, given)| *given) {
            let message = format!("`{flag}` has no effect without `--pool-name` or `--endpoint-selector`");
            sink.push(Diagnostic::new(Code::NoEffect, flag, message));
        }
        return None;
    }
    let mut source = source(&section, Span::default(), "--pool-name", sink)?;
    source.metrics = metrics(like.map(|like| &like.metrics), "--pool-name", sink);
    if let Some(scheme) = &k.metrics_scheme {
        source.metrics.scheme = scheme.as_str().into();
    }
    if let Some(path) = &k.metrics_path {
        source.metrics.path = path.as_str().into();
    }
    // 0 is how the reference says that the metrics are at the serving port.
    source.metrics.port = k.metrics_port.filter(|port| *port != 0).or(source.metrics.port);
    Some(source)
}

/// The pods that a section of the file names.
pub(super) fn of_file(file: &Opt<schema::Kubernetes>, path: &str, sink: &mut Sink) -> Option<KubernetesSource> {
    let At { value, span } = file.as_ref()?;
    source(value, *span, &format!("{path}.kubernetes"), sink)
}

fn source(file: &schema::Kubernetes, span: Span, path: &str, sink: &mut Sink) -> Option<KubernetesSource> {
    if cfg!(not(feature = "kube")) {
        let message = "this build can't ask Kubernetes (it lacks the feature `kube`)";
        sink.push(Diagnostic::new(Code::Contradiction, path, message).at(span));
    }
    if let Some(at) = file.namespace.as_ref().filter(|at| !is_name(&at.value)) {
        wrong_name(at, "namespace", path, sink);
    }
    let pods = match (&file.pool, &file.selector) {
        (Some(pool), None) => of_pool(pool, file, path, sink),
        (None, Some(selector)) => of_selector(selector, file, path, sink),
        (Some(pool), Some(selector)) => {
            let message = "pods are named twice: by an InferencePool and by a selector";
            let diagnostic = Diagnostic::new(Code::Contradiction, path, message).at(pool.span);
            sink.push(diagnostic.related(selector.span, "the selector").help("keep one of the two"));
            None
        }
        (None, None) => {
            let message = "`kubernetes` says neither which `pool` nor which `selector`";
            let diagnostic = Diagnostic::new(Code::MissingKey, path, message).at(span);
            sink.push(diagnostic.help("as in `kubernetes: {pool: vllm-pool}` or `kubernetes: {selector: app=vllm}`"));
            None
        }
    };
    Some(KubernetesSource {
        namespace: file.namespace.as_ref().map(|at| at.value.clone()),
        pods: pods?,
        engine: given(file.engine, Default::default()),
        metrics: metrics(file.metrics.as_ref().map(|at| &at.value), path, sink),
    })
}

fn of_pool(pool: &At<String>, file: &schema::Kubernetes, path: &str, sink: &mut Sink) -> Option<PodsOf> {
    if !is_name(&pool.value) {
        wrong_name(pool, "pool", path, sink);
    }
    if let Some(at) = &file.target_ports {
        let message = "`targetPorts` has no effect: the InferencePool names the ports";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.targetPorts"), message).at(at.span));
    }
    let group = match &file.group {
        None => PoolGroup::default(),
        Some(at) => {
            let group = PoolGroup::of(&at.value);
            if group.is_none() {
                let allowed = PoolGroup::ALL.map(|group| format!("`{}`", group.as_str())).join(" or ");
                sink.out_of_range(at.span, &format!("{path}.group"), format!("`{}`", shown(&at.value)), &allowed);
            }
            group?
        }
    };
    Some(PodsOf::Pool { name: pool.value.clone(), group })
}

fn of_selector(selector: &At<String>, file: &schema::Kubernetes, path: &str, sink: &mut Sink) -> Option<PodsOf> {
    if let Some(at) = &file.group {
        let message = "`group` has no effect: there is no InferencePool to look for";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.group"), message).at(at.span));
    }
    let problem = match LabelSelector::parse(&selector.value) {
        Ok(_) if selector.value.trim().is_empty() => Some("it is empty".to_owned()),
        Ok(_) => None,
        Err(error) => Some(error),
    };
    if let Some(problem) = problem {
        let message = format!("`{}` is no label selector: {problem}", shown(&selector.value));
        let diagnostic = Diagnostic::new(Code::OutOfRange, format!("{path}.selector"), message).at(selector.span);
        sink.push(diagnostic.help("as in `app=vllm` or `app in (vllm,sglang),tier!=test`"));
        return None;
    }
    let mut target_ports = Vec::new();
    if let Some(at) = &file.target_ports {
        target_ports = at.value.iter().map(|port| port.value).collect();
        if let Err(problem) = check_ports(&target_ports) {
            let path = format!("{path}.targetPorts");
            sink.push(Diagnostic::new(Code::OutOfRange, path, format!("`targetPorts`: {problem}")).at(at.span));
        }
    }
    Some(PodsOf::Selector { selector: selector.value.clone(), target_ports })
}

fn wrong_name(at: &At<String>, key: &str, path: &str, sink: &mut Sink) {
    let got = format!("`{}`", shown(&at.value));
    sink.out_of_range(at.span, &format!("{path}.{key}"), got, "lower-case letters, digits, `-` and `.`");
}

/// Whether it can be the name of an object.
fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    text.len() <= 253 && text.chars().all(inner) && end(text.chars().next()) && end(text.chars().next_back())
}

fn shown(text: &str) -> String {
    text.chars().take(60).collect()
}
