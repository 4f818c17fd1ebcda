//! The section `schedulingProfiles`, and the pipeline that results from it and the plugins, with
//! the rules for omitted parts.

use super::catalogue::Slot;
use super::mapping::{self, Mapped};
use super::plugins::{Declared, Plugins, undefined};
use crate::schema::{self, Opt};
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_config_schema::document::{Node, Value};
use attache_scheduling::division::{Division, StageProfile, Stages};
use attache_scheduling::plugin::Plugin;
use serde_json::{Value as Json, json};
use std::collections::HashMap;

/// The strategy of a file of this kind.
const PIPELINE: &str = "pipeline";

/// The profile that is used if the file has none.
const DEFAULT_PROFILE: &str = "default";
/// The picker that is used if the file has none.
const DEFAULT_PICKER: &str = "max-score-picker";

/// One profile: its plugins in order, with their weights.
struct ProfilePlugins<'p> {
    name: At<String>,
    plugins: Vec<(&'p Declared, Option<f64>)>,
}

/// Builds the pipeline of the file. Without meaning if an error was reported.
pub(super) fn pipeline(
    f: &mut Fields<'_>,
    plugins: &Plugins,
    mapped: &mut Mapped,
    sink: &mut Sink,
) -> At<schema::Strategy> {
    let node = f.node("schedulingProfiles");
    let span = node.map_or(f.span, |n| n.span);
    let mut profiles = read(node, plugins, sink);
    check_names(&profiles, sink);
    if profiles.is_empty() {
        profiles.extend(default_profile(plugins, span));
    } else {
        warn_of_unused(plugins, &profiles, sink);
    }
    for profile in &mut profiles {
        check_pickers(profile, sink);
        add_picker(profile, plugins);
    }
    let handler = handler(plugins, &profiles, span, sink);
    check_deciders(plugins, handler, sink);
    let has_profile = |stage: &StageProfile| profiles.iter().any(|own| own.name.value == stage.profile);
    let shares = stages(handler).is_some_and(|stages| stages.iter().any(has_profile));
    if let Some(handler) = handler.filter(|_| shares) {
        mapping::sidecars(mapped, handler.name.span);
    }
    let parameters = (!profiles.is_empty()).then(|| parameters(plugins, &profiles, handler));
    let strategy = schema::Strategy {
        name: At { value: PIPELINE.to_owned(), span },
        parameters: parameters.map(|value| schema::Parameters::composed(value, span)),
    };
    At { value: strategy, span }
}

fn read<'p>(node: Option<&Node>, plugins: &'p Plugins, sink: &mut Sink) -> Vec<ProfilePlugins<'p>> {
    let items: &[Node] = match node {
        None => &[],
        Some(Node { value: Value::List(items), .. }) => items,
        Some(node) => {
            sink.wrong_type(node, "schedulingProfiles", "a list");
            &[]
        }
    };
    let mut profiles = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let path = format!("schedulingProfiles[{i}]");
        let Some(mut f) = Fields::of(item, &path, sink) else { continue };
        let name = f.required::<String>("name", sink);
        let below = f.path_of("plugins");
        let parts = f.node("plugins").map(|node| entries(node, &below, plugins, sink)).unwrap_or_default();
        f.finish(sink);
        // A profile without a name was reported; it still counts as a profile.
        let name = name.unwrap_or(At { value: path, span: item.span });
        profiles.push(ProfilePlugins { name, plugins: parts });
    }
    profiles
}

fn entries<'p>(node: &Node, path: &str, plugins: &'p Plugins, sink: &mut Sink) -> Vec<(&'p Declared, Option<f64>)> {
    let Value::List(items) = &node.value else {
        sink.wrong_type(node, path, "a list");
        return Vec::new();
    };
    let items = items.iter().enumerate();
    items.filter_map(|(i, item)| entry(item, &format!("{path}[{i}]"), plugins, sink)).collect()
}

fn entry<'p>(node: &Node, path: &str, plugins: &'p Plugins, sink: &mut Sink) -> Option<(&'p Declared, Option<f64>)> {
    let mut f = Fields::of(node, path, sink)?;
    let reference = f.required::<String>("pluginRef", sink);
    let weight: Opt<f64> = f.get("weight", sink);
    let (reference_path, weight_path) = (f.path_of("pluginRef"), f.path_of("weight"));
    f.finish(sink);
    let reference = reference?;
    if let Some(at) = weight.filter(|at| !(0.0..=f64::from(f32::MAX)).contains(&at.value)) {
        sink.out_of_range(at.span, &weight_path, at.value, "0 or more");
    }
    let Some(declared) = plugins.named(&reference.value) else {
        let made_by_itself = reference.value == DEFAULT_PICKER && !plugins.declared.iter().any(is_picker);
        if !made_by_itself {
            undefined(&reference, &reference_path, plugins, sink);
        }
        return None;
    };
    let no_effect = |span: Span, path: &str, what: &str, why: &str| {
        Diagnostic::new(Code::NoEffect, path, format!("{what} has no effect: {why}")).at(span)
    };
    match (&declared.part, weight) {
        // Reported with its declaration.
        (None, _) if declared.broken || declared.is_idle() => None,
        (None | Some(Plugin::Handler(_) | Plugin::Decider(_)), _) => {
            let what = format!("`{}` in a profile", reference.value);
            let why = format!("its type, `{}`, neither filters, nor scores, nor picks", declared.kind);
            sink.push(no_effect(reference.span, &reference_path, &what, &why));
            None
        }
        (Some(Plugin::Filter(_) | Plugin::Picker(_)), Some(at)) => {
            let why = format!("`{}` does not score", reference.value);
            sink.push(no_effect(at.span, &weight_path, "`weight`", &why));
            Some((declared, None))
        }
        (Some(_), weight) => Some((declared, weight.map(|at| at.value))),
    }
}

fn is_picker(declared: &Declared) -> bool {
    matches!(declared.part, Some(Plugin::Picker(_)))
}

fn is_handler(declared: &Declared) -> bool {
    matches!(declared.part, Some(Plugin::Handler(_)))
}

fn is_decider(declared: &Declared) -> bool {
    matches!(declared.part, Some(Plugin::Decider(_)))
}

/// The stages of a handler besides decode.
fn stages(handler: Option<&Declared>) -> Option<Stages> {
    let Some(Plugin::Handler(part)) = &handler?.part else { return None };
    match part.division() {
        Division::Stages(stages) => Some(stages),
        Division::ByPool | Division::ByCaller => None,
    }
}

/// Whether the handler uses the plugin called `name`.
fn asks(stages: Option<&Stages>, name: &str) -> bool {
    stages.is_some_and(|s| s.iter().any(|stage| stage.decider.as_ref().is_some_and(|d| d.name == name)))
}

fn check_names(profiles: &[ProfilePlugins<'_>], sink: &mut Sink) {
    let mut first: HashMap<&str, Span> = HashMap::new();
    for profile in profiles {
        if let Some(span) = first.insert(&profile.name.value, profile.name.span) {
            let shown: String = profile.name.value.chars().take(60).collect();
            let message = format!("two profiles are called `{shown}`");
            let diagnostic = Diagnostic::new(Code::DuplicateName, "schedulingProfiles", message);
            sink.push(diagnostic.at(profile.name.span).related(span, "the first one"));
        }
    }
}

/// All filters, scorers and pickers of a profile, in the order of the file. `None` if it has none:
/// then the pipeline's default applies.
fn default_profile(plugins: &Plugins, span: Span) -> Option<ProfilePlugins<'_>> {
    let parts = plugins.declared.iter().filter(|d| d.part.is_some() && !is_handler(d) && !is_decider(d));
    let parts: Vec<_> = parts.map(|d| (d, None)).collect();
    let name = At { value: DEFAULT_PROFILE.to_owned(), span };
    (!parts.is_empty()).then_some(ProfilePlugins { name, plugins: parts })
}

/// Warns of plugins that are declared for a profile and used in none. Pickers replace those that a profile omits, and
/// saturation detectors have a section of their own.
fn warn_of_unused(plugins: &Plugins, profiles: &[ProfilePlugins<'_>], sink: &mut Sink) {
    for declared in &plugins.declared {
        let detector = declared.entry.is_some_and(|e| e.slots.contains(&Slot::Detector));
        // By name: if two have the same name, which was reported, either may be meant.
        let used = profiles.iter().flat_map(|p| &p.plugins).any(|(d, _)| d.name.value == declared.name.value);
        let elsewhere = is_picker(declared) || is_handler(declared) || is_decider(declared);
        if declared.part.is_none() || detector || used || elsewhere {
            continue;
        }
        let message = format!("`{}` has no effect: no profile names it", declared.name.value);
        sink.push(Diagnostic::new(Code::NoEffect, "plugins", message).at(declared.name.span));
    }
}

fn check_pickers(profile: &ProfilePlugins<'_>, sink: &mut Sink) {
    let mut pickers = profile.plugins.iter().filter(|(d, _)| is_picker(d)).map(|(d, _)| &d.name);
    if let (Some(first), Some(second)) = (pickers.next(), pickers.next()) {
        let message =
            format!("profile `{}` has two pickers: `{}` and `{}`", profile.name.value, first.value, second.value);
        let diagnostic = Diagnostic::new(Code::Contradiction, "schedulingProfiles", message).at(profile.name.span);
        sink.push(diagnostic.related(second.span, "the second picker").help("a profile has one; leave the other out"));
    }
}

/// The picker of a profile without one: a declared picker, as upstream. Upstream takes any of them, Attaché the first.
fn add_picker<'p>(profile: &mut ProfilePlugins<'p>, plugins: &'p Plugins) {
    if !profile.plugins.iter().any(|(d, _)| is_picker(d)) {
        profile.plugins.extend(plugins.declared.iter().find(|d| is_picker(d)).map(|d| (d, None)));
    }
}

fn handler<'p>(
    plugins: &'p Plugins,
    profiles: &[ProfilePlugins<'_>],
    span: Span,
    sink: &mut Sink,
) -> Option<&'p Declared> {
    let mut handlers = plugins.declared.iter().filter(|d| is_handler(d));
    let (first, second) = (handlers.next(), handlers.next());
    if let (Some(first), Some(second)) = (first, second) {
        let message = format!("two profile handlers: `{}` and `{}`", first.name.value, second.name.value);
        let diagnostic = Diagnostic::new(Code::Contradiction, "plugins", message).at(second.name.span);
        sink.push(diagnostic.related(first.name.span, "the first one").help("one handler chooses among all profiles"));
    }
    let names: Vec<&str> = profiles.iter().map(|p| p.name.value.as_str()).collect();
    match first.map(|handler| (handler, &handler.part)) {
        Some((handler, Some(Plugin::Handler(part)))) if second.is_none() && !names.is_empty() => {
            if let Division::Stages(stages) = part.division() {
                check_stages(handler, &stages, &names, plugins, sink);
            }
            if let Err(error) = part.eligible(&names) {
                let message = format!("`{}` can't work with these profiles: {error}", handler.name.value);
                let diagnostic = Diagnostic::new(Code::Contradiction, "schedulingProfiles", message).at(span);
                sink.push(diagnostic.related(handler.name.span, "the handler"));
            }
        }
        None if names.len() > 1 && !plugins.declared.iter().any(|d| d.broken) => {
            let message = format!("{} profiles and no profile handler: nothing says which one decides", names.len());
            let diagnostic = Diagnostic::new(Code::Contradiction, "schedulingProfiles", message).at(span);
            sink.push(diagnostic.help("declare one, such as `header-profile-handler` or `disagg-profile-handler`"));
        }
        _ => {}
    }
    first
}

/// Reports what keeps the stages of a handler from running.
fn check_stages(handler: &Declared, stages: &Stages, profiles: &[&str], plugins: &Plugins, sink: &mut Sink) {
    let no_effect = |message: String| Diagnostic::new(Code::NoEffect, "plugins", message).at(handler.name.span);
    let named = |stage: &StageProfile| profiles.contains(&stage.profile.as_str());
    for stage in stages.iter().filter(|stage| !named(stage)) {
        let message = format!("`{}` has no effect on requests to be split: no profile is called so", stage.profile);
        sink.push(no_effect(message));
    }
    for decider in stages.iter().filter_map(|stage| stage.decider.as_ref()) {
        match plugins.named(&decider.name) {
            Some(declared) if declared.broken || is_decider(declared) => {}
            Some(declared) => {
                let message = format!("`{}` is no decider: its type is `{}`", decider.name, declared.kind);
                let diagnostic = Diagnostic::new(Code::WrongPlugin, "plugins", message).at(handler.name.span);
                sink.push(diagnostic.related(declared.name.span, "declared here"));
            }
            None if decider.otherwise.is_some() => {}
            None => {
                let named = At { value: decider.name.clone(), span: handler.name.span };
                undefined(&named, "plugins", plugins, sink);
            }
        }
    }
}

/// Warns of a decider that no handler uses.
fn check_deciders(plugins: &Plugins, handler: Option<&Declared>, sink: &mut Sink) {
    let stages = stages(handler);
    for declared in plugins.declared.iter().filter(|d| is_decider(d)) {
        let name = &declared.name;
        if !asks(stages.as_ref(), &name.value) {
            let message = format!("`{}` has no effect: no profile handler asks it", name.value);
            sink.push(Diagnostic::new(Code::NoEffect, "plugins", message).at(name.span));
        }
    }
}

/// The parameters of the `pipeline` strategy.
fn parameters(plugins: &Plugins, profiles: &[ProfilePlugins<'_>], handler: Option<&Declared>) -> Json {
    let stages = stages(handler);
    let used = |d: &&Declared| {
        let named = profiles.iter().flat_map(|p| &p.plugins).any(|(p, _)| std::ptr::eq(*p, *d));
        let asked = is_decider(d) && asks(stages.as_ref(), &d.name.value);
        named || asked || handler.is_some_and(|h| std::ptr::eq(h, *d))
    };
    let declared = plugins.declared.iter().filter(used);
    let declared = declared.map(|d| json!({"name": d.name.value, "type": d.kind, "parameters": d.parameters}));
    let entry = |(d, weight): &(&Declared, Option<f64>)| match weight {
        Some(weight) => json!({"pluginRef": d.name.value, "weight": weight}),
        None => json!({"pluginRef": d.name.value}),
    };
    let profile = |p: &ProfilePlugins<'_>| {
        let plugins: Vec<Json> = p.plugins.iter().map(entry).collect();
        json!({"name": p.name.value, "plugins": plugins})
    };
    json!({"plugins": declared.collect::<Vec<_>>(), "profiles": profiles.iter().map(profile).collect::<Vec<_>>()})
}
