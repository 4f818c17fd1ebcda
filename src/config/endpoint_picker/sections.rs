//! The sections of the file besides `plugins` and profiles: feature gates, data layer, parsers, flow control. Their shape and their
//! references are checked in full, as upstream; most of what they say is always so here, or is not in force yet.

use super::catalogue::Slot;
use super::mapping::{Mapped, ignored};
use super::plugins::Plugins;
use crate::config::decode::{Fields, Read, Sink};
use crate::config::diagnostic::{At, Code, Diagnostic, Span, closest};
use crate::config::document::{Node, Value};
use crate::pool::Engine;
use std::time::Duration;

const NOT_QUEUED: &str = "`flowControl` of a file of kind `Attache` queues requests; files of this kind do not";
/// The gate of flow control.
const FLOW_CONTROL: &str = "flowControl";
/// All gates of all versions.
const GATES: &[&str] =
    &[FLOW_CONTROL, "dataLayer", "enableLegacyMetrics", "haPopulateNonLeaderDatastore", "prepareDataPlugins"];

/// The gates that something depends on here.
#[derive(Debug, Default)]
pub(super) struct Gates {
    /// Where flow control is asked for.
    flow_control: Option<Span>,
}

fn no_effect(path: &str, span: Span, why: &str) -> Diagnostic {
    let name = path.rsplit('.').next().unwrap_or(path);
    Diagnostic::new(Code::NoEffect, path, format!("`{name}` has no effect: {why}")).at(span)
}

/// `featureGates`: names, each alone or with `=true` or `=false`.
pub(super) fn feature_gates(f: &mut Fields<'_>, sink: &mut Sink) -> Gates {
    let mut gates = Gates::default();
    for (i, at) in
        f.get::<Vec<At<String>>>("featureGates", sink).map(|at| at.value).unwrap_or_default().iter().enumerate()
    {
        let path = format!("featureGates[{i}]");
        let (name, value) = at.value.split_once('=').map_or((at.value.as_str(), "true"), |(n, v)| (n, v.trim()));
        let on = match value.to_ascii_lowercase().as_str() {
            "true" | "t" | "1" => true,
            "false" | "f" | "0" => false,
            _ => {
                let shown: String = value.chars().take(60).collect();
                sink.out_of_range(at.span, &path, format!("`{shown}`"), "`true` or `false` after the `=`");
                false
            }
        };
        if !GATES.contains(&name) {
            let shown: String = name.chars().take(60).collect();
            let message = format!("no feature gate is called `{shown}`; there are: {}", GATES.join(", "));
            let mut diagnostic = Diagnostic::new(Code::OutOfRange, path, message).at(at.span);
            if let Some(meant) = closest(name, GATES.iter().copied()) {
                diagnostic = diagnostic.help(format!("did you mean `{meant}`?"));
            }
            sink.push(diagnostic);
        } else if name == FLOW_CONTROL {
            gates.flow_control = on.then_some(at.span);
        } else if name == "haPopulateNonLeaderDatastore" {
            sink.push(
                Diagnostic::new(Code::NoEffect, path, format!("`{name}` has no effect: every replica serves"))
                    .at(at.span),
            );
        }
    }
    gates
}

/// A list of mappings below `key`; each is read by `read` and what that leaves is reported.
fn each(f: &mut Fields<'_>, key: &'static str, sink: &mut Sink, mut read: impl FnMut(&mut Fields<'_>, &mut Sink)) {
    let path = f.path_of(key);
    let items = match f.node(key) {
        None => return,
        Some(Node { value: Value::List(items), .. }) => items,
        Some(node) => return sink.wrong_type(node, &path, "a list"),
    };
    for (i, item) in items.iter().enumerate() {
        if let Some(mut f) = Fields::of(item, &format!("{path}[{i}]"), sink) {
            read(&mut f, sink);
            f.finish(sink);
        }
    }
}

/// A mapping below `key`, likewise.
fn section(f: &mut Fields<'_>, key: &'static str, sink: &mut Sink, read: impl FnOnce(&mut Fields<'_>, &mut Sink)) {
    let path = f.path_of(key);
    if let Some(mut f) = f.node(key).and_then(|node| Fields::of(node, &path, sink)) {
        read(&mut f, sink);
        f.finish(sink);
    }
}

/// The plugin that `pluginRef` names, when it can stand there; its type.
fn plugin_ref<'p>(f: &mut Fields<'_>, slot: Slot, plugins: &'p Plugins, sink: &mut Sink) -> Option<(&'p str, Span)> {
    let at = f.required::<String>("pluginRef", sink)?;
    let path = f.path_of("pluginRef");
    plugins.in_slot(&at, slot, &path, sink).map(|kind| (kind, at.span))
}

/// `dataLayer`, which was `data` in between.
pub(super) fn data_layer(f: &mut Fields<'_>, plugins: &Plugins, mapped: &mut Mapped, sink: &mut Sink) {
    if let (Some(_), Some(old)) = (f.node("dataLayer"), f.node("data")) {
        sink.push(no_effect("data", old.span, "`dataLayer` is its new name, and is there too"));
    }
    let key = if f.node("dataLayer").is_some() { "dataLayer" } else { "data" };
    section(f, key, sink, |f, sink| {
        let mut scraped = f.get::<bool>("injectDefaults", sink).is_none_or(|at| at.value);
        each(f, "sources", sink, |f, sink| {
            scraped |=
                plugin_ref(f, Slot::Source, plugins, sink).is_some_and(|(kind, _)| kind == "metrics-data-source");
            each(f, "extractors", sink, |f, sink| {
                plugin_ref(f, Slot::Extractor, plugins, sink);
            });
        });
        if !scraped {
            // Nobody is to read metrics: the ledger alone decides.
            mapped.endpoints.engine = Some(At { value: Engine::None, span: f.span });
        }
        section(f, "discovery", sink, |f, sink| {
            plugin_ref(f, Slot::Discovery, plugins, sink);
        });
        let alone = "replicas do not share what they know in this version";
        ignored(f, &["peerDiscovery", "crossReplicaSyncInterval"], alone, sink);
        if let Some(at) = f.get::<String>("crossReplicaSyncerPluginRef", sink) {
            plugins.in_slot(&at, Slot::Syncer, &f.path_of("crossReplicaSyncerPluginRef"), sink);
        }
    });
}

/// `requestHandler.parsers`, which was `parser`.
pub(super) fn parsers(f: &mut Fields<'_>, plugins: &Plugins, sink: &mut Sink) {
    let mut named = Vec::new();
    section(f, "requestHandler", sink, |f, sink| {
        each(f, "parsers", sink, |f, sink| named.extend(plugin_ref(f, Slot::Parser, plugins, sink)));
    });
    let old = f.node("parser").map(|node| node.span);
    section(f, "parser", sink, |f, sink| {
        let parser = plugin_ref(f, Slot::Parser, plugins, sink);
        match old {
            Some(span) if !named.is_empty() => {
                sink.push(no_effect("parser", span, "`requestHandler.parsers` is its new name, and is there too"));
            }
            _ => named.extend(parser),
        }
    });
    if let [("passthrough-parser", span)] = named[..] {
        let why = "bodies are read where their path is known; others pass unread, whoever asks";
        sink.push(no_effect("passthrough-parser", span, why));
    }
}

/// `saturationDetector` and `flowControl`.
pub(super) fn flow_control(f: &mut Fields<'_>, gates: &Gates, plugins: &Plugins, sink: &mut Sink) {
    detector(f, plugins, sink);
    let Some(node) = f.node(FLOW_CONTROL) else {
        sink.diagnostics.extend(gates.flow_control.map(|span| no_effect(FLOW_CONTROL, span, NOT_QUEUED)));
        return;
    };
    let why = match gates.flow_control {
        Some(_) => NOT_QUEUED,
        None => "the feature gate `flowControl` is not set",
    };
    sink.push(no_effect(FLOW_CONTROL, node.span, why));
    // Without the gate nobody looks at the references, there as here.
    let plugins = gates.flow_control.map(|_| plugins);
    section(f, FLOW_CONTROL, sink, |f, sink| {
        limits(f, sink);
        for key in ["defaultRequestTTL", "noEndpointRequestTTL"] {
            f.get::<Duration>(key, sink);
        }
        f.get::<bool>("enableEviction", sink);
        policy(f, "usageLimitPolicyPluginRef", Slot::UsageLimit, plugins, sink);
        section(f, "saturationDetector", sink, |f, sink| policy(f, "pluginRef", Slot::Detector, plugins, sink));
        for key in ["defaultPriorityBand", "defaultNegativePriorityBand"] {
            section(f, key, sink, |f, sink| {
                f.get::<i32>("priority", sink);
                band(f, plugins, sink);
            });
        }
        each(f, "priorityBands", sink, |f, sink| {
            f.required::<i32>("priority", sink);
            band(f, plugins, sink);
        });
    });
}

/// `saturationDetector`: a reference, or until GIE v1.4 the thresholds themselves.
fn detector(f: &mut Fields<'_>, plugins: &Plugins, sink: &mut Sink) {
    if let Some(node) = f.node("saturationDetector") {
        sink.push(no_effect("saturationDetector", node.span, NOT_QUEUED));
    }
    section(f, "saturationDetector", sink, |f, sink| {
        policy(f, "pluginRef", Slot::Detector, Some(plugins), sink);
        f.get::<f64>("queueDepthThreshold", sink);
        f.get::<f64>("kvCacheUtilThreshold", sink);
        f.get::<Duration>("metricsStalenessThreshold", sink);
    });
}

fn band(f: &mut Fields<'_>, plugins: Option<&Plugins>, sink: &mut Sink) {
    limits(f, sink);
    policy(f, "fairnessPolicyRef", Slot::Fairness, plugins, sink);
    policy(f, "orderingPolicyRef", Slot::Ordering, plugins, sink);
}

fn limits(f: &mut Fields<'_>, sink: &mut Sink) {
    for key in ["maxBytes", "maxRequests"] {
        f.get::<Quantity>(key, sink);
    }
}

fn policy(f: &mut Fields<'_>, key: &'static str, slot: Slot, plugins: Option<&Plugins>, sink: &mut Sink) {
    if let (Some(at), Some(plugins)) = (f.get::<String>(key, sink), plugins) {
        plugins.in_slot(&at, slot, &f.path_of(key), sink);
    }
}

/// A quantity of Kubernetes, such as `4Gi`, `500M`, `1k` or `1e3`; a number until GIE v1.4.
struct Quantity;

impl Read for Quantity {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        const UNITS: &[&str] = &["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let good = match &node.value {
            Value::Int(n) => *n >= 0,
            Value::Float(n) => n.is_finite() && *n >= 0.0,
            Value::Text(text) => {
                let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
                let number = text.strip_suffix(unit).unwrap_or_default();
                let exponent = unit.strip_prefix(['e', 'E']).is_some_and(|e| e.parse::<i8>().is_ok());
                number.parse::<f64>().is_ok() && (UNITS.contains(&unit) || exponent)
            }
            _ => false,
        };
        if !good {
            sink.wrong_type(node, path, "a quantity such as `4Gi` or `1000`");
        }
        good.then_some(Self)
    }
}
