//! Configuration of a pipeline, and the checks that build one from it.

use super::stages::{self, Division, Stages};
use super::{NamedPart, Pipeline, PipelineProfile};
use crate::filter::role;
use crate::picker::max_score::MaxScore;
use crate::profile::single::{self, Single};
use attache_pool::Roles;
use attache_scheduling::division::{self, DeciderName, StageProfile};
use attache_scheduling::plugin::{ParamError, Plugin, ProfileHandler, StageDecider};
use attache_scheduling::registry::{PluginDescriptor, Registry};
use attache_types::declare::{Catalogue, Kind};
use attache_types::parameters;
use attache_types::spelling::closest;
use serde_json::Value;
use std::sync::Arc;

/// Name of the profile if the configuration has none.
const DEFAULT_PROFILE: &str = "default";
/// Weight of a scorer without `weight`.
const DEFAULT_WEIGHT: f32 = 1.0;
/// Scorers and weights of a pipeline without parameters: GIE's own default.
const DEFAULT_SCORERS: [(&str, f32); 3] =
    [("queue-scorer", 2.0), ("kv-cache-utilization-scorer", 2.0), ("prefix-cache-scorer", 3.0)];

parameters! {
    /// Either one profile in short form, or named plugins and the profiles that refer to them.
    pub(super) struct Params {
        /// Short form: the filters of the only profile, in order.
        "filters" => filters: Option<Vec<PartParams>> { absent: "none"; },
        /// Short form: the scorers of the only profile.
        "scorers" => scorers: Option<Vec<ScorerParams>> { absent: "those of GIE, if there is no other parameter"; },
        /// Short form: the picker of the only profile.
        "picker" => picker: Option<PartParams> { absent: "`max-score-picker`"; },
        /// Long form: named plugins, to which `profiles` refer.
        "plugins" => plugins: Option<Vec<PluginParams>> { absent: "none"; },
        /// Long form: the profiles. Several need a profile handler among `plugins`.
        "profiles" => profiles: Option<Vec<ProfileParams>> { absent: "one profile of all `plugins`"; },
    }
    /// A plugin.
    struct PartParams {
        /// Its type.
        "type" => r#type: String,
        /// Its parameters.
        "parameters" => parameters: Value { absent: "its defaults"; kind: Kind::Parameters(Catalogue::Parts); },
    }
    /// A scorer.
    struct ScorerParams {
        /// Its type.
        "type" => r#type: String,
        /// Factor of its scores, 0 or more.
        "weight" => weight: f32 { default: DEFAULT_WEIGHT; unit: "weight"; },
        /// Its parameters.
        "parameters" => parameters: Value { absent: "its defaults"; kind: Kind::Parameters(Catalogue::Parts); },
    }
    /// A plugin that profiles refer to.
    struct PluginParams {
        /// Name to which profiles refer. It is unique.
        "name" => name: Option<String> { absent: "its type"; },
        /// Its type.
        "type" => r#type: String,
        /// Its parameters.
        "parameters" => parameters: Value { absent: "its defaults"; kind: Kind::Parameters(Catalogue::Parts); },
    }
    /// A profile.
    struct ProfileParams {
        /// Name of the profile. It is unique and not empty.
        "name" => name: String,
        /// Plugins of the profile. Each may be listed once.
        "plugins" => plugins: Vec<Reference> { absent: "none"; },
    }
    /// A plugin of a profile.
    struct Reference {
        /// Name of a plugin in `plugins`.
        "pluginRef" => plugin_ref: String,
        /// Factor of the scores of a scorer, 0 or more. Other plugins ignore it.
        "weight" => weight: f32 { default: DEFAULT_WEIGHT; unit: "weight"; },
    }
}

impl Params {
    pub(super) fn build(self, registry: &Registry) -> Result<Pipeline, ParamError> {
        let Self { filters, scorers, picker, plugins, profiles } = self;
        let short = filters.is_some() || scorers.is_some() || picker.is_some();
        match (short, plugins.is_some() || profiles.is_some()) {
            (true, true) => {
                let message = "`filters`, `scorers` and `picker` make one profile, `plugins` and `profiles` name \
                               several; use either";
                Err(ParamError::new(message))
            }
            (true, false) => from_parts(filters.unwrap_or_default(), scorers.unwrap_or_default(), picker, registry),
            (false, true) => from_profiles(plugins.unwrap_or_default(), profiles.unwrap_or_default(), registry),
            (false, false) => {
                let scorer = |(name, weight): (&str, f32)| ScorerParams {
                    r#type: name.to_owned(),
                    weight,
                    parameters: Value::Null,
                };
                from_parts(Vec::new(), DEFAULT_SCORERS.map(scorer).into(), None, registry)
            }
        }
    }
}

/// A built plugin and the name by which profiles refer to it.
struct BuiltPlugin {
    name: String,
    descriptor: &'static PluginDescriptor,
    plugin: Plugin,
}

impl BuiltPlugin {
    fn new(name: Option<String>, kind: &str, parameters: &Value, registry: &Registry) -> Result<Self, ParamError> {
        let descriptor = registry.plugin(kind).ok_or_else(|| unknown_type(kind, registry))?;
        let name = name.unwrap_or_else(|| kind.to_owned());
        let plugin = (descriptor.build)(parameters).map_err(|e| e.under("parameters").named(&name))?;
        Ok(Self { name, descriptor, plugin })
    }

    /// Builds a plugin that must be of the kind `wanted`; its name is its type.
    fn of_kind(wanted: &str, kind: &str, parameters: &Value, registry: &Registry) -> Result<Self, ParamError> {
        let made = Self::new(None, kind, parameters, registry)?;
        if made.descriptor.kind.split(", ").any(|kind| kind == wanted) {
            return Ok(made);
        }
        Err(ParamError::new(format!("`{kind}` is no {wanted}; its kind is {}", made.descriptor.kind)).under("type"))
    }
}

fn unknown_type(kind: &str, registry: &Registry) -> ParamError {
    let known = || registry.plugins().iter().flat_map(|d| d.aliases.iter().chain([&d.name])).copied();
    ParamError::new(match closest(kind, known()) {
        Some(meant) => format!("unknown type `{kind}`; did you mean `{meant}`?"),
        None => {
            let names: Vec<&str> = registry.plugins().iter().map(|d| d.name).collect();
            format!("unknown type `{kind}`; known: {}", names.join(", "))
        }
    })
    .under("type")
}

/// The short form: one profile.
fn from_parts(
    filters: Vec<PartParams>,
    scorers: Vec<ScorerParams>,
    picker: Option<PartParams>,
    registry: &Registry,
) -> Result<Pipeline, ParamError> {
    if filters.is_empty() && scorers.is_empty() && picker.is_none() {
        let message = "the pipeline is empty; at least one of `filters`, `scorers` and `picker` is needed";
        return Err(ParamError::new(message));
    }
    let mut draft = ProfileDraft::new(DEFAULT_PROFILE);
    for (index, part) in filters.into_iter().enumerate() {
        let made = BuiltPlugin::of_kind("filter", &part.r#type, &part.parameters, registry);
        made.and_then(|made| draft.add(&made, DEFAULT_WEIGHT)).map_err(|e| e.in_item(index).under("filters"))?;
    }
    for (index, part) in scorers.into_iter().enumerate() {
        let made = BuiltPlugin::of_kind("scorer", &part.r#type, &part.parameters, registry);
        made.and_then(|made| draft.add(&made, part.weight)).map_err(|e| e.in_item(index).under("scorers"))?;
    }
    if let Some(part) = picker {
        let made = BuiltPlugin::of_kind("picker", &part.r#type, &part.parameters, registry);
        made.and_then(|made| draft.add(&made, DEFAULT_WEIGHT)).map_err(|e| e.under("picker"))?;
    }
    let handler = NamedPart { name: single::PLUGIN.name, part: Arc::new(Single) as Arc<dyn ProfileHandler> };
    Ok(pipeline(handler, vec![Arc::new(draft.profile)], Division::ByPool))
}

fn pipeline(
    handler: NamedPart<dyn ProfileHandler>,
    profiles: Vec<Arc<PipelineProfile>>,
    division: Division,
) -> Pipeline {
    let sorts =
        |p: &Arc<PipelineProfile>| p.filters.iter().any(|f| [role::PREFILL.name, role::ENCODE.name].contains(&f.name));
    let roles = match (&division, profiles.as_slice()) {
        (Division::ByCaller, _) => Roles::NONE,
        (Division::ByPool, [only]) if sorts(only) => Roles::NONE,
        _ => Roles::DECODE,
    };
    Pipeline { handler, profiles, division, roles }
}

/// The long form: named plugins and the profiles that refer to them.
fn from_profiles(
    plugins: Vec<PluginParams>,
    profiles: Vec<ProfileParams>,
    registry: &Registry,
) -> Result<Pipeline, ParamError> {
    let mut made: Vec<BuiltPlugin> = Vec::with_capacity(plugins.len());
    for (index, plugin) in plugins.into_iter().enumerate() {
        let here = |error: ParamError| error.in_item(index).under("plugins");
        let next = BuiltPlugin::new(plugin.name, &plugin.r#type, &plugin.parameters, registry).map_err(here)?;
        if made.iter().any(|m| m.name == next.name) {
            let message = format!("two plugins are called `{}`; give one another `name`", next.name);
            return Err(here(ParamError::new(message).under("name")));
        }
        made.push(next);
    }
    let drafts = if profiles.is_empty() { vec![all_of(&made)?] } else { drafts(&made, profiles)? };
    let names: Vec<&str> = drafts.iter().map(|d| d.profile.name.as_str()).collect();
    let handler = handler(&made, &names, registry)?;
    let eligible = handler.part.eligible(&names).map_err(|e| e.named(handler.name))?;
    let all: Vec<Arc<PipelineProfile>> = drafts.into_iter().map(|draft| Arc::new(draft.profile)).collect();
    let division = match handler.part.division() {
        division::Division::ByPool => Division::ByPool,
        division::Division::ByCaller => Division::ByCaller,
        division::Division::Stages(stages) => Division::Stages(Stages {
            prefill: stage_of(stages.prefill, &all, &made, handler.name)?,
            encode: stage_of(stages.encode, &all, &made, handler.name)?,
            prefill_first: stages.prefill_first,
        }),
    };
    let profiles = eligible.iter().filter_map(|at| all.get(*at).cloned()).collect();
    Ok(pipeline(handler, profiles, division))
}

/// A stage with its profile and its decider; `None` if it cannot run.
fn stage_of(
    said: Option<StageProfile>,
    profiles: &[Arc<PipelineProfile>],
    made: &[BuiltPlugin],
    handler: &str,
) -> Result<Option<stages::ProfileStage>, ParamError> {
    let Some(said) = said else { return Ok(None) };
    let decider = said.decider.map(|name| decider(name, made, handler)).transpose()?;
    let profile = profiles.iter().find(|p| p.name == said.profile).cloned();
    Ok(profile.map(|profile| stages::ProfileStage { profile, decider }))
}

fn decider(said: DeciderName, made: &[BuiltPlugin], handler: &str) -> Result<Arc<dyn StageDecider>, ParamError> {
    match (made.iter().find(|m| m.name == said.name).map(|m| &m.plugin), said.otherwise) {
        (Some(Plugin::Decider(decider)), _) => Ok(decider.clone()),
        (None, Some(decider)) => Ok(decider),
        (Some(_), _) => {
            let message = format!("`{handler}`: `{}` is no decider", said.name);
            Err(ParamError::new(message))
        }
        (None, None) => {
            let message = format!("`{handler}` asks `{}`, which is not among `plugins`", said.name);
            Err(ParamError::new(message))
        }
    }
}

/// The profile of a configuration with plugins but without profiles: all plugins.
fn all_of(made: &[BuiltPlugin]) -> Result<ProfileDraft, ParamError> {
    let mut draft = ProfileDraft::new(DEFAULT_PROFILE);
    for made in made.iter().filter(|m| !matches!(m.plugin, Plugin::Handler(_) | Plugin::Decider(_))) {
        draft.add(made, DEFAULT_WEIGHT)?;
    }
    Ok(draft)
}

fn drafts(made: &[BuiltPlugin], profiles: Vec<ProfileParams>) -> Result<Vec<ProfileDraft>, ParamError> {
    let mut drafts: Vec<ProfileDraft> = Vec::with_capacity(profiles.len());
    for (index, profile) in profiles.into_iter().enumerate() {
        let here = |error: ParamError| error.in_item(index).under("profiles");
        if profile.name.is_empty() {
            return Err(here(ParamError::new("a profile has an empty `name`; a name is needed").under("name")));
        }
        if drafts.iter().any(|d| d.profile.name == profile.name) {
            let message = format!("two profiles are called `{}`; one of them needs another name", profile.name);
            return Err(here(ParamError::new(message).under("name")));
        }
        let mut draft = ProfileDraft::new(&profile.name);
        for (index, reference) in profile.plugins.into_iter().enumerate() {
            let named = made.iter().find(|m| m.name == reference.plugin_ref);
            let named = named.ok_or_else(|| undefined(made, &profile.name, &reference.plugin_ref));
            let listed = named.and_then(|named| draft.refer(named, reference.weight));
            listed.map_err(|e| here(e.in_item(index).under("plugins")))?;
        }
        drafts.push(draft);
    }
    Ok(drafts)
}

fn undefined(made: &[BuiltPlugin], profile: &str, name: &str) -> ParamError {
    let known = || made.iter().map(|m| m.name.as_str());
    let help = match closest(name, known()) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("`plugins` has: {}", known().collect::<Vec<_>>().join(", ")),
    };
    ParamError::new(format!("profile `{profile}` refers to `{name}`, which is not among `plugins`; {help}"))
        .under("pluginRef")
}

fn handler(
    made: &[BuiltPlugin],
    profiles: &[&str],
    registry: &Registry,
) -> Result<NamedPart<dyn ProfileHandler>, ParamError> {
    let mut found: Option<NamedPart<dyn ProfileHandler>> = None;
    for made in made {
        let Plugin::Handler(handler) = &made.plugin else { continue };
        if let Some(first) = found {
            let message = format!("`{}` and `{}` are both profile handlers; one is allowed", first.name, made.name);
            return Err(ParamError::new(message));
        }
        found = Some(NamedPart { name: made.descriptor.name, part: handler.clone() });
    }
    match found {
        Some(handler) => Ok(handler),
        None if profiles.len() == 1 => Ok(NamedPart { name: single::PLUGIN.name, part: Arc::new(Single) }),
        None => {
            let profiles = profiles.join(", ");
            let handlers = registry.plugins().iter().filter(|d| d.kind == "handler").map(|d| d.name);
            let handlers = handlers.collect::<Vec<_>>().join(", ");
            Err(ParamError::new(format!(
                "several profiles ({profiles}) need a profile handler among `plugins`: {handlers}"
            )))
        }
    }
}

/// A profile under construction.
struct ProfileDraft {
    profile: PipelineProfile,
    /// Names of its plugins.
    listed: Vec<String>,
    /// Name of its picker, if the configuration has one.
    picker: Option<String>,
}

impl ProfileDraft {
    fn new(name: &str) -> Self {
        let profile = PipelineProfile {
            name: name.to_owned(),
            filters: Vec::new(),
            scorers: Vec::new(),
            picker: Arc::new(MaxScore::default()),
            plugins: Vec::new(),
        };
        Self { profile, listed: Vec::new(), picker: None }
    }

    fn add(&mut self, made: &BuiltPlugin, weight: f32) -> Result<(), ParamError> {
        let (profile, name) = (&mut self.profile, &made.name);
        if !weight.is_finite() || weight < 0.0 {
            let message = format!("weight of `{name}` is {weight}; 0 or more is allowed");
            return Err(ParamError::new(message).under("weight"));
        }
        match &made.plugin {
            Plugin::Filter(filter) => profile.filters.push(named_part(made, filter)),
            Plugin::Scorer(scorer) => profile.scorers.push((named_part(made, scorer), weight)),
            Plugin::FilterAndScorer(filter, scorer) => {
                profile.filters.push(named_part(made, filter));
                profile.scorers.push((named_part(made, scorer), weight));
            }
            Plugin::Picker(picker) => {
                if let Some(first) = self.picker.replace(name.clone()) {
                    let profile = &profile.name;
                    let message = format!("profile `{profile}` has the pickers `{first}` and `{name}`; one is allowed");
                    return Err(ParamError::new(message));
                }
                profile.picker = picker.clone();
            }
            Plugin::Handler(_) => {
                let message = format!("`{name}` is a profile handler and can't be in profile `{}`", profile.name);
                return Err(ParamError::new(message));
            }
            Plugin::Decider(_) => {
                let message = format!("`{name}` is a decider and can't be in profile `{}`", profile.name);
                return Err(ParamError::new(message));
            }
        }
        profile.plugins.push(made.plugin.clone());
        Ok(())
    }

    /// Adds the plugin that a profile refers to; each only once.
    fn refer(&mut self, made: &BuiltPlugin, weight: f32) -> Result<(), ParamError> {
        if self.listed.contains(&made.name) {
            let message = format!("profile `{}` lists `{}` twice; once is allowed", self.profile.name, made.name);
            return Err(ParamError::new(message));
        }
        self.listed.push(made.name.clone());
        self.add(made, weight)
    }
}

fn named_part<T: ?Sized>(made: &BuiltPlugin, part: &Arc<T>) -> NamedPart<T> {
    NamedPart { name: made.descriptor.name, part: part.clone() }
}
