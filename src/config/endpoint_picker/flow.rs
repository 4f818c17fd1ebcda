//! Queueing and shedding in the file: `flowControl` and its feature gate, `saturationDetector`, and the policies and
//! admitters among the plugins. They become `flowControl` of the pool, with the defaults of GIE and llm-d.
//!
//! With the gate, requests are queued. Without it, both projects refuse sheddable requests while the pool is saturated
//! and let all others proceed; the detector is `utilization-detector` unless the file names another. With the gate, or
//! with a detector or an admitter, priorities and tenants come from headers, which are trusted as in both projects.

use super::catalogue::Slot;
use super::mapping::Mapped;
use super::plugins::Plugins;
use super::sections::{FLOW_CONTROL, Gates, each, no_effect, section};
use crate::schema::{self, Opt, Parameters, Strategy};
use attache_config_schema::decode::{Bytes, Fields, Read, Sink};
use attache_config_schema::diagnostic::{At, Span};
use attache_config_schema::document::{Node, Value};
use attache_flow::registry::{ADMITTERS, find};
use attache_flow::settings::{DEFAULT_BAND_BYTES, DEFAULT_BAND_REQUESTS};
use attache_flow::{EvictRunning, Overflow};
use serde_json::{Map, Value as Json};
use std::time::Duration;

/// The default detector of both projects.
const DEFAULT_DETECTOR: &str = "utilization-detector";
/// The default order between flows in both projects.
const DEFAULT_FAIRNESS: &str = "global-strict-fairness-policy";
/// The default order within a flow in both projects.
const DEFAULT_ORDERING: &str = "fcfs-ordering-policy";

/// Default time in the queue in both projects: 60 s.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// Reads `saturationDetector` and `flowControl`.
pub(super) fn flow_control(f: &mut Fields<'_>, gates: &Gates, plugins: &Plugins, mapped: &mut Mapped, sink: &mut Sink) {
    let old = f.node("saturationDetector").map(|node| node.span);
    let detector = detector(f, plugins, sink);
    let node = f.node(FLOW_CONTROL).map(|node| node.span);
    let admitters = admitters(plugins);
    let (flow, trusting) = if let Some(gate) = gates.flow_control {
        let mut flow = queues(f, gate, plugins, sink);
        if flow.detector.is_none() {
            flow.detector = detector.or_else(|| Some(strategy(DEFAULT_DETECTOR, None, gate)));
        } else if let Some(span) = old {
            sink.push(no_effect("saturationDetector", span, "`flowControl.saturationDetector` says it"));
        }
        flow.admitters = Some(At { value: admitters, span: gate });
        (At { value: flow, span: gate }, Some(gate))
    } else {
        if let Some(span) = node {
            sink.push(no_effect(FLOW_CONTROL, span, "the feature gate `flowControl` is not set"));
            // Without the gate the references are not checked, as in both projects.
            section(f, FLOW_CONTROL, sink, |f, sink| drop(limits(f, span, None, sink)));
        }
        // Shedding needs no trust in headers: a client that names a sheddable objective affects only itself.
        let trusting = detector.as_ref().or(admitters.first()).map(|at| at.span);
        (At { value: shedding(detector, admitters, f.span), span: f.span }, trusting)
    };
    mapped.exchange.trust_client_headers = trusting.map(|span| At { value: true, span });
    mapped.flow_control = Some(flow);
}

/// Flow control without queues: sheddable requests are refused while the pool is saturated.
fn shedding(detector: Opt<Strategy>, admitters: Vec<At<Strategy>>, span: Span) -> schema::FlowControl {
    schema::FlowControl {
        enabled: Some(At { value: true, span }),
        queue: Some(At { value: false, span }),
        detector: detector.or_else(|| Some(strategy(DEFAULT_DETECTOR, None, span))),
        admitters: Some(At { value: admitters, span }),
        ..schema::FlowControl::default()
    }
}

/// Reads the section, with the gate set.
fn queues(f: &mut Fields<'_>, gate: Span, plugins: &Plugins, sink: &mut Sink) -> schema::FlowControl {
    let mut flow = schema::FlowControl {
        enabled: Some(At { value: true, span: gate }),
        evict_sheddable: Some(At { value: false, span: gate }),
        default_band: Some(At { value: usual_band(gate), span: gate }),
        ..schema::FlowControl::default()
    };
    let span = f.node(FLOW_CONTROL).map_or(gate, |node| node.span);
    section(f, FLOW_CONTROL, sink, |f, sink| flow = limits(f, span, Some(plugins), sink));
    flow.ttl = flow.ttl.or(Some(At { value: DEFAULT_TTL, span: gate }));
    flow
}

fn limits(f: &mut Fields<'_>, span: Span, plugins: Option<&Plugins>, sink: &mut Sink) -> schema::FlowControl {
    // 0 means no limit.
    let max_bytes = positive(f.get("maxBytes", sink));
    let max_requests = positive(f.get("maxRequests", sink));
    let [ttl, empty_ttl] = ["defaultRequestTTL", "noEndpointRequestTTL"].map(|key| lifetime(f, key, sink));
    let evicts = f.get::<bool>("enableEviction", sink).filter(|at| at.value);
    let ceiling = policy(f, "usageLimitPolicyPluginRef", Slot::UsageLimit, plugins, sink);
    let mut detector = None;
    section(f, "saturationDetector", sink, |f, sink| detector = policy(f, "pluginRef", Slot::Detector, plugins, sink));
    let mut default_band = usual_band(span);
    section(f, "defaultPriorityBand", sink, |f, sink| {
        f.get::<i32>("priority", sink);
        default_band = band(f, plugins, sink);
    });
    let mut sheddable_band = None;
    section(f, "defaultNegativePriorityBand", sink, |f, sink| {
        f.get::<i32>("priority", sink);
        sheddable_band = Some(At { value: band(f, plugins, sink), span: f.span });
    });
    let mut bands = Vec::new();
    each(f, "priorityBands", sink, |f, sink| {
        let priority = f.required("priority", sink);
        bands.push(At { value: schema::Band { priority, ..band(f, plugins, sink) }, span: f.span });
    });
    schema::FlowControl {
        enabled: Some(At { value: true, span }),
        detector,
        ceiling,
        ttl,
        empty_ttl,
        max_requests: max_requests.map(|at| At { value: at.value.0, span: at.span }),
        max_bytes: max_bytes.map(|at| At { value: Bytes(at.value.0), span: at.span }),
        // Queued requests are never evicted there.
        evict_sheddable: Some(At { value: false, span }),
        evict_running: evicts.map(|at| At { value: EvictRunning::Any, span: at.span }),
        default_band: Some(At { value: default_band, span }),
        sheddable_band,
        bands: Some(At { value: bands, span }),
        ..schema::FlowControl::default()
    }
}

/// A quantity above 0; 0 is the same as none.
fn positive(at: Opt<Quantity>) -> Opt<Quantity> {
    at.filter(|at| at.value.0 > 0)
}

/// Longest time in the queue from `key`. 0 would mean forever there.
fn lifetime(f: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> Opt<Duration> {
    let ttl = f.get::<Duration>(key, sink);
    if let Some(at) = ttl.as_ref().filter(|at| at.value.is_zero()) {
        sink.push(no_effect(&f.path_of(key), at.span, "no request waits for ever; the default holds"));
    }
    ttl.filter(|at| !at.value.is_zero())
}

/// A band with the defaults of both projects.
fn usual_band(span: Span) -> schema::Band {
    schema::Band {
        priority: None,
        fairness: Some(strategy(DEFAULT_FAIRNESS, None, span)),
        ordering: Some(strategy(DEFAULT_ORDERING, None, span)),
        max_requests: Some(At { value: DEFAULT_BAND_REQUESTS, span }),
        max_bytes: Some(At { value: Bytes(DEFAULT_BAND_BYTES), span }),
        overflow: Some(At { value: Overflow::Newcomer, span }),
        ttl: None,
    }
}

fn band(f: &mut Fields<'_>, plugins: Option<&Plugins>, sink: &mut Sink) -> schema::Band {
    let usual = usual_band(f.span);
    let ttl = lifetime(f, "defaultRequestTTL", sink);
    // 0 means the default: a band always has both limits.
    let [max_bytes, max_requests] = ["maxBytes", "maxRequests"].map(|key| positive(f.get(key, sink)));
    schema::Band {
        fairness: policy(f, "fairnessPolicyRef", Slot::Fairness, plugins, sink).or(usual.fairness),
        ordering: policy(f, "orderingPolicyRef", Slot::Ordering, plugins, sink).or(usual.ordering),
        max_requests: max_requests.map(|at| At { value: at.value.0, span: at.span }).or(usual.max_requests),
        max_bytes: max_bytes.map(|at| At { value: Bytes(at.value.0), span: at.span }).or(usual.max_bytes),
        ttl,
        ..usual
    }
}

/// Reads `saturationDetector`: a reference, or until GIE v1.4 the thresholds themselves.
fn detector(f: &mut Fields<'_>, plugins: &Plugins, sink: &mut Sink) -> Opt<Strategy> {
    let mut detector = None;
    section(f, "saturationDetector", sink, |f, sink| {
        detector = policy(f, "pluginRef", Slot::Detector, Some(plugins), sink);
        let mut parameters = Map::new();
        for key in ["queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold"] {
            parameters.extend(f.node(key).map(|node| (key.to_owned(), node.value.to_json())));
        }
        if !parameters.is_empty() {
            detector.get_or_insert_with(|| strategy(DEFAULT_DETECTOR, Some(Json::Object(parameters)), f.span));
        }
    });
    detector
}

/// All admitters: both projects use every declared one.
fn admitters(plugins: &Plugins) -> Vec<At<Strategy>> {
    let declared = plugins.declared.iter().filter(|d| !d.broken && find(ADMITTERS, &d.kind).is_some());
    declared.map(|d| strategy(&d.kind, given(&d.parameters), d.name.span)).collect()
}

/// The policy that a reference names.
fn policy(
    f: &mut Fields<'_>,
    key: &'static str,
    slot: Slot,
    plugins: Option<&Plugins>,
    sink: &mut Sink,
) -> Opt<Strategy> {
    let at = f.get::<String>(key, sink)?;
    let plugins = plugins?;
    let kind = plugins.in_slot(&at, slot, &f.path_of(key), sink)?;
    let declared = plugins.named(&at.value);
    // Its errors were reported with its declaration.
    if declared.is_some_and(|d| d.broken) {
        return None;
    }
    Some(strategy(kind, declared.and_then(|d| given(&d.parameters)), at.span))
}

fn given(parameters: &Json) -> Option<Json> {
    (!parameters.is_null()).then(|| parameters.clone())
}

fn strategy(name: &str, parameters: Option<Json>, span: Span) -> At<Strategy> {
    let name = At { value: name.to_owned(), span };
    let parameters = parameters.map(|value| Parameters::composed(value, span));
    At { value: Strategy { name, parameters }, span }
}

/// A quantity of Kubernetes, such as `4Gi`, `500M`, `+1k` or `1e3`, rounded up; a plain number until GIE v1.4.
struct Quantity(u64);

impl Read for Quantity {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "it saturates"
    )]
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let number = match &node.value {
            Value::Int(n) => Some(*n as f64),
            Value::Float(n) => Some(*n),
            Value::Text(text) => quantity(text),
            _ => None,
        };
        match number.filter(|n| n.is_finite()) {
            Some(number) if number < 0.0 => {
                let shown = match &node.value {
                    Value::Text(text) => format!("`{}`", text.chars().take(60).collect::<String>()),
                    _ => number.to_string(),
                };
                sink.out_of_range(node.span, path, shown, "a quantity of 0 or more, such as `4Gi` or `1000`");
                None
            }
            Some(number) => Some(Self(number.ceil() as u64)),
            None => {
                sink.wrong_type(node, path, "a quantity such as `4Gi` or `1000`");
                None
            }
        }
    }
}

/// The number that a quantity stands for.
fn quantity(text: &str) -> Option<f64> {
    const UNITS: &[(&str, f64)] = &[
        ("", 1.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
    ];
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let unit = digits.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
    if let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) {
        return Some(number * factor);
    }
    let exponent: i8 = unit.strip_prefix(['e', 'E'])?.parse().ok()?;
    Some(number * 10f64.powi(exponent.into()))
}
