//! Files of kind `EndpointPickerConfig`, in the format of GIE's picker and llm-d's router: one
//! pool with the strategy `pipeline`.
//!
//! Such a file declares plugins and puts them into profiles. It names no endpoints, so those come from flags.
//! `catalogue` lists how each plugin type is handled: as a part of the pipeline, as settings (`mapping`), as always in
//! effect, or without effect, which is a warning with the reason. Nothing is dropped silently, and a plugin without
//! which requests would go elsewhere is rejected. `plugins` builds the plugins, `profiles` the pipeline, `flow` the
//! queues, and `sections` checks the rest. Older versions of the format are supported. Called by `schema`; the result
//! is a [`schema::File`], which `validate` handles like any other.
//!
//! Source: the configuration API and loaders of GIE v0.5 to v1.5 and of llm-d-router v0.10.

mod catalogue;
mod flow;
mod mapping;
mod plugins;
mod profiles;
mod sections;
#[cfg(test)]
mod tests;

use super::decode::{Fields, Sink};
use super::defaults::DEFAULT_POOL;
use super::diagnostic::{At, Code, Diagnostic, Span};
use super::document::{Node, Value};
use super::schema::{self, File};
use attache_scheduling::Registry;
use mapping::Mapped;
use plugins::Plugins;

/// Kind of the document.
pub(super) const KIND: &str = "EndpointPickerConfig";
/// Supported versions: those of both projects, the present one first, and a group in some of GIE's documentation.
const API_VERSIONS: &[&str] =
    &["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1", "config.x-k8s.io/v1alpha1"];

/// Whether the document is of this kind.
pub(super) fn is(root: &Node) -> bool {
    let Value::Map(entries) = &root.value else { return false };
    entries.iter().any(|(key, node)| key.value == "kind" && matches!(&node.value, Value::Text(kind) if kind == KIND))
}

/// Reads the document. `None` if its version is unknown: then nothing else in it can be checked.
pub(super) fn read(root: &Node, registry: &Registry, sink: &mut Sink) -> Option<File> {
    let mut f = Fields::of(root, "", sink)?;
    f.expect(&["kind"]);
    if !check_version(&mut f, sink) {
        return None;
    }
    let before = errors(sink);
    let mut mapped = Mapped::default();
    let gates = sections::feature_gates(&mut f, sink);
    mapped.queues = gates.flow_control.is_some();
    let plugins = Plugins::read(&mut f, registry, &mut mapped, sink);
    let strategy = profiles::pipeline(&mut f, &plugins, &mut mapped, sink);
    sections::data_layer(&mut f, &plugins, &mut mapped, sink);
    // Files from before llm-d v0.9 have it outside of `dataLayer`.
    sections::section(&mut f, "discovery", sink, |f, sink| sections::discovery(f, &plugins, &mut mapped, sink));
    sections::parsers(&mut f, &plugins, sink);
    flow::flow_control(&mut f, &gates, &plugins, &mut mapped, sink);
    f.finish(sink);
    // A pipeline with a missing part would only cause a second report of the same mistake.
    let strategy = if errors(sink) == before { Some(strategy) } else { None };
    mapped.flow_control = mapped.flow_control.filter(|_| strategy.is_some());
    Some(file(mapped, strategy, root.span, sink))
}

fn errors(sink: &Sink) -> usize {
    sink.diagnostics.iter().filter(|d| d.is_error()).count()
}

fn check_version(f: &mut Fields<'_>, sink: &mut Sink) -> bool {
    let node = f.node("apiVersion");
    let got = match node.map(|n| &n.value) {
        Some(Value::Text(text)) if API_VERSIONS.contains(&text.as_str()) => return true,
        Some(value) => format!("got {}", value.describe()),
        None => "it is missing".to_owned(),
    };
    let message = format!("`apiVersion` of an {KIND} must be {}, {got}", versions());
    sink.push(Diagnostic::new(Code::Version, "apiVersion", message).at(node.map_or(f.span, |n| n.span)));
    false
}

/// The supported versions, for messages.
pub(super) fn versions() -> String {
    let quoted: Vec<String> = API_VERSIONS.iter().map(|version| format!("`{version}`")).collect();
    match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.join(", "),
    }
}

/// The configuration with one pool.
fn file(mapped: Mapped, strategy: Option<At<schema::Strategy>>, span: Span, sink: &mut Sink) -> File {
    let Mapped { block_size, tokenizer, kv_events, choose_rank, scrape, endpoints, mut exchange, flow_control, .. } =
        mapped;
    if let Some(at) = exchange.session_headers.take_if(|_| !mapped.queues)
        && !mapped.agent_affinity
    {
        let message =
            "`agent-identity` has no effect: without the feature gate `flowControl` no requests are queued by session";
        let help = "set the gate, or name the attribute among the `sources` of `session-affinity-filter`";
        sink.push(Diagnostic::new(Code::NoEffect, "plugins", message).at(at.span).help(help));
    }
    let endpoints_file = mapped.endpoints_file.filter(|at| {
        if !mapped.discovers {
            let message = "the endpoints file has no effect: `dataLayer.discovery.endpoints` does not name its plugin";
            sink.push(Diagnostic::new(Code::NoEffect, "plugins", message).at(at.span));
        }
        mapped.discovers
    });
    let disaggregation = mapping::fetching(mapped.disaggregation, mapped.source_tokens);
    let kv_events = match (&tokenizer, kv_events) {
        (None, Some(events)) => {
            let message =
                "KV events have no effect: they name blocks by tokens, and nothing says where tokens come from";
            sink.push(Diagnostic::new(Code::NoEffect, "plugins", message).at(events.span).help(
                "declare a `token-producer` with `vllm: {url: …}`; until then caches are learned from what is routed",
            ));
            None
        }
        (_, events) => events,
    };
    let prefix = schema::PrefixCache { block_size, tokenizer, kv_events, choose_rank, ..Default::default() };
    let pool = schema::Pool {
        name: At { value: DEFAULT_POOL.to_owned(), span },
        strategy,
        endpoints_file,
        scrape,
        prefix_cache: Some(At { value: prefix, span }),
        disaggregation,
        flow_control,
        from_flags: Some(endpoints),
        ..schema::Pool::default()
    };
    let pools = Some(At { value: vec![At { value: pool, span }], span });
    File { exchange, pools, ..File::default() }
}
