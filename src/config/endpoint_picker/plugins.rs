//! The section `plugins`: names, types and parameters, and how each is handled.

use super::catalogue::{self, IMPLICIT, PluginEntry, PluginHandling, Slot};
use super::mapping::{Mapped, ignored};
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span, closest};
use attache_config_schema::document::{Node, Value};
use attache_flow::registry::{ADMITTERS, CEILINGS, FAIRNESS, ORDERINGS, PolicyDescriptor, find};
use attache_scheduling::facts::session::{AGENT_ATTRIBUTE, AGENT_HEADERS};
use attache_scheduling::plugin::Plugin;
use attache_scheduling::registry::Registry;
use attache_types::params::{ParamError, Step};
use serde_json::{Value as Json, json};
use std::collections::HashMap;

/// The parameter by which parts of the pipeline name their producer of prefixes.
const PREFIX_PRODUCER: &str = "prefixMatchInfoProducerName";
/// The producer that both projects create if none is declared.
const DEFAULT_PREFIX_PRODUCER: &str = "approx-prefix-cache-producer";

/// 2: llm-d's `mm-embeddings-cache-producer` assumes 2 MiB for the embeddings of an item.
const MEGABYTES_PER_ITEM: u64 = 2;

/// One declared plugin.
#[derive(Debug)]
pub(super) struct Declared {
    /// Name of the plugin; by default its type.
    pub name: At<String>,
    /// Type of the plugin, under its present name.
    pub kind: String,
    /// The entry in the catalogue; `None` for types that only the registry has, and for unknown ones.
    pub entry: Option<&'static PluginEntry>,
    /// The part of the pipeline, if the plugin is one.
    pub part: Option<Plugin>,
    /// Parameters that the plugin was built with.
    pub parameters: Json,
    /// Whether an error of it was reported, so that nothing else is known about it.
    pub broken: bool,
}

impl Declared {
    /// Whether it has no effect, which was reported.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.entry, Some(PluginEntry { fate: PluginHandling::Idle(..), .. }))
    }
}

/// All declared plugins, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Plugins {
    pub(super) declared: Vec<Declared>,
}

/// Name, type and parameters of a plugin before it is built.
struct Head<'n> {
    path: String,
    name: At<String>,
    kind: Option<At<String>>,
    parameters: Fields<'n>,
}

impl Plugins {
    /// Reads the section, builds the parts of the pipeline and maps the rest to settings.
    pub(super) fn read(f: &mut Fields<'_>, registry: &Registry, mapped: &mut Mapped, sink: &mut Sink) -> Self {
        let items: &[Node] = match f.node("plugins") {
            None => &[],
            Some(Node { value: Value::List(items), .. }) => items,
            Some(node) => {
                sink.wrong_type(node, "plugins", "a list");
                &[]
            }
        };
        let heads = items.iter().enumerate().filter_map(|(i, item)| head(item, &format!("plugins[{i}]"), sink));
        let heads: Vec<Head<'_>> = heads.collect();
        let mut first: HashMap<&str, Span> = HashMap::new();
        for head in &heads {
            if let Some(span) = first.insert(&head.name.value, head.name.span) {
                let message = format!("two plugins are called `{}`", clip(&head.name.value));
                let diagnostic = Diagnostic::new(Code::DuplicateName, "plugins", message).at(head.name.span);
                sink.push(diagnostic.related(span, "the first one").help("give one of them a `name` of its own"));
            }
        }
        let beside = RelatedSettings::of(&heads);
        mapped.agent_affinity = beside.agent_affinity;
        Self { declared: heads.into_iter().map(|head| declare(head, &beside, registry, mapped, sink)).collect() }
    }

    /// The names of all plugins.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.declared.iter().map(|d| d.name.value.as_str())
    }

    /// The plugin of this name.
    pub(super) fn named(&self, name: &str) -> Option<&Declared> {
        self.declared.iter().find(|d| d.name.value == name)
    }

    /// The type of the plugin that a section names, if it can be used there.
    pub(super) fn in_slot(&self, at: &At<String>, slot: Slot, path: &str, sink: &mut Sink) -> Option<&str> {
        let found = self.named(&at.value);
        let implicit = || IMPLICIT.contains(&at.value.as_str()).then(|| catalogue::entry(&at.value)).flatten();
        let (entry, kind) = match found {
            Some(declared) if declared.broken => return Some(&declared.kind),
            Some(declared) => (declared.entry, declared.kind.as_str()),
            None => match implicit() {
                Some(entry) => (Some(entry), entry.name),
                None => {
                    undefined(at, path, self, sink);
                    return None;
                }
            },
        };
        if entry.is_some_and(|e| e.slots.contains(&slot)) {
            return Some(kind);
        }
        let message = format!("`{}` is no {}: its type is `{kind}`", clip(&at.value), slot.noun());
        let place = found.map(|d| d.name.span).unwrap_or_default();
        sink.push(Diagnostic::new(Code::WrongPlugin, path, message).at(at.span).related(place, "declared here"));
        None
    }
}

/// Settings of a plugin that other parts of the file decide.
struct RelatedSettings {
    /// The names of all plugins.
    names: Vec<String>,
    /// The headers of `agent-identity`, if it is declared.
    session_headers: Option<Vec<String>>,
    /// Whether a plugin keeps the sessions of `agent-identity` together.
    agent_affinity: bool,
    /// Items per server in the cache of `mm-embeddings-cache-producer`, if it is set.
    encoded_items: Option<u32>,
}

impl RelatedSettings {
    /// Reads them without reports; mistakes are reported where the plugins themselves are read.
    fn of(heads: &[Head<'_>]) -> Self {
        let parameters = |kind: &str| {
            let is = |head: &&Head<'_>| head.kind.as_ref().is_some_and(|at| at.value == kind);
            heads.iter().find(is).map(|head| rest(&head.parameters))
        };
        let session_headers = parameters("agent-identity").map(|given| {
            let more = given.get("additionalSessionHeaders").and_then(Json::as_array).into_iter().flatten();
            more.filter_map(Json::as_str).chain(AGENT_HEADERS).map(str::to_owned).collect()
        });
        let encoded_items = parameters("mm-embeddings-cache-producer").and_then(|given| {
            let number = |key: &str| given.get(key).and_then(Json::as_u64);
            let megabytes = number("cacheSizeInMBPerServer").or_else(|| number("cacheSizeInMB"));
            let items =
                megabytes.map(|megabytes| (megabytes / MEGABYTES_PER_ITEM).max(1)).or_else(|| number("cacheSize"));
            u32::try_from(items?).ok()
        });
        let agents = json!({"attribute": AGENT_ATTRIBUTE});
        let asks = |head: &Head<'_>| {
            let given = rest(&head.parameters);
            let sources = given.pointer("/sessionIdConfig/sources").and_then(Json::as_array);
            sources.is_some_and(|sources| sources.contains(&agents))
        };
        let agent_affinity = heads.iter().any(asks);
        let names = heads.iter().map(|head| head.name.value.clone()).collect();
        Self { names, session_headers, agent_affinity, encoded_items }
    }

    /// The parameters of a part, completed by other plugins.
    fn complete(&self, type_name: &str, mut parameters: Json) -> Json {
        match type_name {
            "mm-embeddings-cache-scorer" if parameters.is_null() => {
                if let Some(items) = self.encoded_items {
                    parameters = json!({"itemsPerServer": items});
                }
            }
            "session-affinity-filter" | "session-affinity-scorer" => {
                let sources = parameters.pointer_mut("/sessionIdConfig/sources").and_then(Json::as_array_mut);
                if let (Some(sources), Some(headers)) = (sources, &self.session_headers) {
                    let agents = json!({"attribute": AGENT_ATTRIBUTE});
                    let by_header = || headers.iter().map(|name| json!({"header": name})).collect::<Vec<_>>();
                    let given = std::mem::take(sources);
                    sources.extend(given.into_iter().flat_map(|s| if s == agents { by_header() } else { vec![s] }));
                }
            }
            _ => {}
        }
        parameters
    }
}

/// Shortens a text for a message.
fn clip(text: &str) -> String {
    text.chars().take(60).collect()
}

fn head<'n>(item: &'n Node, path: &str, sink: &mut Sink) -> Option<Head<'n>> {
    let mut f = Fields::of(item, path, sink)?;
    let name = f.get::<String>("name", sink);
    let kind = f.required::<String>("type", sink);
    let below = f.path_of("parameters");
    let place = kind.as_ref().map_or(f.span, |at| at.span);
    let parameters = match f.node("parameters") {
        Some(node) => Fields::of(node, &below, sink),
        None => None,
    };
    f.finish(sink);
    let parameters = parameters.unwrap_or_else(|| Fields::none(&below, place));
    let name = name.or_else(|| kind.clone())?;
    Some(Head { path: path.to_owned(), name, kind, parameters })
}

fn declare(
    head: Head<'_>,
    beside: &RelatedSettings,
    registry: &Registry,
    mapped: &mut Mapped,
    sink: &mut Sink,
) -> Declared {
    let Head { path, name, kind, parameters: mut f } = head;
    let path = format!("{path}.type");
    let mut declared = Declared {
        name,
        kind: kind.as_ref().map(|at| at.value.clone()).unwrap_or_default(),
        entry: None,
        part: None,
        parameters: Json::Null,
        broken: true,
    };
    let Some(kind) = kind else { return declared };
    let entry = catalogue::entry(&kind.value);
    let type_name = entry.map_or(kind.value.as_str(), |e| e.name);
    declared.kind = type_name.to_owned();
    declared.entry = entry;
    for (keys, why) in entry.map_or(&[][..], |entry| entry.inert) {
        ignored(&mut f, keys, why, sink);
    }
    let made = match entry.map(|e| e.fate) {
        None | Some(PluginHandling::Part) => part(&kind, &path, type_name, f, beside, registry, sink),
        Some(PluginHandling::PartAnd(reads)) => {
            reads(&mut f, mapped, sink);
            part(&kind, &path, type_name, f, beside, registry, sink)
        }
        Some(PluginHandling::Policy) => {
            declared.parameters = rest(&f);
            let error = policy_error(type_name, &declared.parameters);
            error.iter().for_each(|error| refused(type_name, error, &f, sink));
            if error.is_none() {
                let kept = attache_flow::registry::inert(type_name, &declared.parameters);
                kept.iter().for_each(|warning| idle(type_name, warning, &f, sink));
            }
            declared.broken = error.is_some();
            None
        }
        Some(fate) => {
            declared.broken = !apply(&kind, &path, fate, f, mapped, sink);
            None
        }
    };
    if let Some((part, parameters)) = made {
        declared.part = Some(part);
        declared.parameters = parameters;
        declared.broken = false;
    }
    declared
}

/// Applies a plugin that is not a part of the pipeline; false if it is rejected.
fn apply(
    kind: &At<String>,
    path: &str,
    fate: PluginHandling,
    mut f: Fields<'_>,
    mapped: &mut Mapped,
    sink: &mut Sink,
) -> bool {
    match fate {
        PluginHandling::Settings(reads) => reads(&mut f, mapped, sink),
        PluginHandling::Idle(why, keys) => {
            let message = format!("`{}` has no effect: {why}", kind.value);
            sink.push(Diagnostic::new(Code::NoEffect, path, message).at(kind.span));
            match keys {
                Some(keys) => f.expect(keys),
                None => return true,
            }
        }
        PluginHandling::Absent(why) => {
            let message = format!("plugins of type `{}` are not in this version: {why}", kind.value);
            let help = "take it out of `plugins` and of the profiles to do without";
            sink.push(Diagnostic::new(Code::UnknownPlugin, path, message).at(kind.span).help(help));
            return false;
        }
        PluginHandling::BuiltIn | PluginHandling::Part | PluginHandling::PartAnd(_) | PluginHandling::Policy => {}
    }
    f.finish(sink);
    true
}

/// Builds a part of the pipeline from the remaining parameters.
fn part(
    kind: &At<String>,
    path: &str,
    type_name: &str,
    mut f: Fields<'_>,
    beside: &RelatedSettings,
    registry: &Registry,
    sink: &mut Sink,
) -> Option<(Plugin, Json)> {
    let Some(descriptor) = registry.plugin(type_name) else {
        unknown(kind, path, registry, sink);
        return None;
    };
    // A pool has one prefix index, whichever producer is named.
    if let Some(at) = f.get::<String>(PREFIX_PRODUCER, sink)
        && at.value != DEFAULT_PREFIX_PRODUCER
        && !beside.names.contains(&at.value)
    {
        let message = format!("no plugin is called `{}`", clip(&at.value));
        let mut diagnostic = Diagnostic::new(Code::UndefinedReference, f.path_of(PREFIX_PRODUCER), message).at(at.span);
        if let Some(meant) = closest(&at.value, beside.names.iter().map(String::as_str)) {
            diagnostic = diagnostic.help(format!("did you mean `{meant}`?"));
        }
        sink.push(diagnostic);
    }
    let parameters = beside.complete(type_name, rest(&f));
    match (descriptor.build)(&parameters) {
        Ok(part) => {
            let warnings = registry.inert(type_name, &rest(&f), &parameters);
            warnings.iter().for_each(|warning| idle(descriptor.name, warning, &f, sink));
            Some((part, parameters))
        }
        Err(error) => {
            refused(descriptor.name, &error, &f, sink);
            None
        }
    }
}

/// The parameters that were not read before.
fn rest(f: &Fields<'_>) -> Json {
    let rest: serde_json::Map<String, Json> =
        f.rest().map(|(k, node)| (k.value.clone(), node.value.to_json())).collect();
    if rest.is_empty() { Json::Null } else { Json::Object(rest) }
}

/// Reports parameters that a plugin does not take, at the position of the invalid value.
fn refused(name: &str, error: &ParamError, f: &Fields<'_>, sink: &mut Sink) {
    let (path, span) = place(error, f);
    let message = format!("`{name}` does not take these parameters: {error}");
    sink.push(Diagnostic::new(Code::BadParameters, path, message).at(span));
}

/// Warns of a parameter that changes nothing.
fn idle(name: &str, error: &ParamError, f: &Fields<'_>, sink: &mut Sink) {
    let (path, span) = place(error, f);
    sink.push(Diagnostic::new(Code::NoEffect, path, format!("`{name}`: {error}")).at(span));
}

/// Path and position of a wrong value among the parameters.
fn place(error: &ParamError, f: &Fields<'_>) -> (String, Span) {
    let (first, rest) = match error.steps() {
        [Step::Key(first), rest @ ..] => (Some(first), rest),
        steps => (None, steps),
    };
    let span = match first.and_then(|first| f.rest().find(|(key, _)| key.value == *first)) {
        Some((key, _)) if error.is_of_key() && rest.is_empty() => key.span,
        Some((_, node)) => node.place(rest, error.is_of_key()),
        None => f.span,
    };
    (error.steps().iter().fold(f.path.clone(), |path, step| format!("{path}{step}")), span)
}

fn unknown(kind: &At<String>, path: &str, registry: &Registry, sink: &mut Sink) {
    let shown = clip(&kind.value);
    if catalogue::entry(&kind.value).is_some() {
        let message = format!("plugins of type `{shown}` are not in this version");
        let help = "take it out of `plugins` and of the profiles to do without";
        sink.push(Diagnostic::new(Code::UnknownPlugin, path, message).at(kind.span).help(help));
        return;
    }
    let diagnostic =
        Diagnostic::new(Code::UnknownPlugin, path, format!("no plugin has the type `{shown}`")).at(kind.span);
    let help = match closest(&kind.value, catalogue::names(registry)) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => "docs/reference/plugins.md lists the types that there are".to_owned(),
    };
    sink.push(diagnostic.help(help));
}

/// The error if a policy of this type can't be built with these parameters.
pub(super) fn policy_error(kind: &str, parameters: &Json) -> Option<ParamError> {
    fn of<P: ?Sized>(policies: &[&'static PolicyDescriptor<P>], kind: &str, parameters: &Json) -> Option<ParamError> {
        (find(policies, kind)?.build)(parameters).err()
    }
    of(FAIRNESS, kind, parameters)
        .or_else(|| of(ORDERINGS, kind, parameters))
        .or_else(|| of(CEILINGS, kind, parameters))
        .or_else(|| of(ADMITTERS, kind, parameters))
}

/// Reports a reference to an undeclared plugin.
pub(super) fn undefined(at: &At<String>, path: &str, declared: &Plugins, sink: &mut Sink) {
    let shown: String = at.value.chars().take(60).collect();
    let message = format!("no plugin is called `{shown}`");
    let diagnostic = Diagnostic::new(Code::UndefinedReference, path, message).at(at.span);
    let help = match closest(&at.value, declared.names().chain(IMPLICIT.iter().copied())) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => "declare it under `plugins`; a plugin without a name is called like its type".to_owned(),
    };
    sink.push(diagnostic.help(help));
}
