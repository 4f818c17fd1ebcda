//! The sections besides `plugins`, profiles and flow control: feature gates, data layer, parsers. Structure and
//! references are checked as upstream does; most of their content is always in effect in Attaché.

use super::super::defaults::BY_SYNC;
use super::catalogue::Slot;
use super::mapping::{Mapped, ignored};
use super::plugins::Plugins;
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span, closest};
use attache_config_schema::document::{Node, Value};
use attache_pool::Engine;

/// The feature gate of flow control.
pub(super) const FLOW_CONTROL: &str = "flowControl";
/// All feature gates of all versions.
const GATES: &[&str] =
    &[FLOW_CONTROL, "dataLayer", "enableLegacyMetrics", "haPopulateNonLeaderDatastore", "prepareDataPlugins"];

/// The feature gates with an effect in Attaché.
#[derive(Debug, Default)]
pub(super) struct Gates {
    /// Where flow control is enabled.
    pub(super) flow_control: Option<Span>,
}

pub(super) fn no_effect(path: &str, span: Span, why: &str) -> Diagnostic {
    let name = path.rsplit('.').next().unwrap_or(path);
    Diagnostic::new(Code::NoEffect, path, format!("`{name}` has no effect: {why}")).at(span)
}

/// Reads `featureGates`: names, each alone or with `=true` or `=false`.
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

/// Reads a list of mappings below `key`, each with `read`, and reports unknown keys.
pub(super) fn each(
    f: &mut Fields<'_>,
    key: &'static str,
    sink: &mut Sink,
    mut read: impl FnMut(&mut Fields<'_>, &mut Sink),
) {
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

/// Reads a mapping below `key` with `read`, and reports unknown keys.
pub(super) fn section(
    f: &mut Fields<'_>,
    key: &'static str,
    sink: &mut Sink,
    read: impl FnOnce(&mut Fields<'_>, &mut Sink),
) {
    let path = f.path_of(key);
    if let Some(mut f) = f.node(key).and_then(|node| Fields::of(node, &path, sink)) {
        read(&mut f, sink);
        f.finish(sink);
    }
}

/// The type of the plugin in `pluginRef`, if it can be used there.
fn plugin_ref<'p>(f: &mut Fields<'_>, slot: Slot, plugins: &'p Plugins, sink: &mut Sink) -> Option<(&'p str, Span)> {
    let at = f.required::<String>("pluginRef", sink)?;
    let path = f.path_of("pluginRef");
    plugins.in_slot(&at, slot, &path, sink).map(|kind| (kind, at.span))
}

/// Reads `dataLayer`, which was called `data` in some versions.
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
            // Without a source metrics are not scraped: the ledger alone decides.
            mapped.endpoints.engine = Some(At { value: Engine::None, span: f.span });
        }
        section(f, "discovery", sink, |f, sink| discovery(f, plugins, mapped, sink));
        ignored(f, &["peerDiscovery", "crossReplicaSyncInterval", "crossReplicaPublishTimeout"], BY_SYNC, sink);
        syncer(f, "crossReplicaSyncerPluginRef", plugins, sink);
        // The names of llm-d v1.
        section(f, "crossReplica", sink, |f, sink| {
            ignored(f, &["syncInterval", "publishTimeout"], BY_SYNC, sink);
            syncer(f, "syncerPluginRef", plugins, sink);
        });
    });
}

/// Checks the reference to the plugin that shares state; its declaration is warned of.
fn syncer(f: &mut Fields<'_>, key: &'static str, plugins: &Plugins, sink: &mut Sink) {
    if let Some(at) = f.get::<String>(key, sink) {
        plugins.in_slot(&at, Slot::Syncer, &f.path_of(key), sink);
    }
}

/// Reads `discovery`: before llm-d v1 the reference was in the section itself.
pub(super) fn discovery(f: &mut Fields<'_>, plugins: &Plugins, mapped: &mut Mapped, sink: &mut Sink) {
    if f.node("endpoints").is_some() {
        section(f, "endpoints", sink, |f, sink| {
            mapped.discovers |= plugin_ref(f, Slot::Discovery, plugins, sink).is_some()
        });
    } else {
        mapped.discovers |= plugin_ref(f, Slot::Discovery, plugins, sink).is_some();
    }
}

/// Reads `requestHandler.parsers`, which was called `parser`.
pub(super) fn parsers(f: &mut Fields<'_>, plugins: &Plugins, sink: &mut Sink) {
    let mut named = Vec::new();
    section(f, "requestHandler", sink, |f, sink| {
        each(f, "parsers", sink, |f, sink| named.extend(plugin_ref(f, Slot::Parser, plugins, sink)));
        section(f, "parser", sink, |f, sink| named.extend(plugin_ref(f, Slot::Parser, plugins, sink)));
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
        let why = "bodies are parsed if their path is known; others pass unread for all clients";
        sink.push(no_effect("passthrough-parser", span, why));
    }
}
