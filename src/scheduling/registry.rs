//! The plugins of a process, by name.
//!
//! A crate with plugins exports a [`PluginList`]. The composition root joins these lists to one [`Registry`] and
//! passes it to everything that builds strategies: configurations, replays, tests. No other crate names a plugin
//! crate.

use super::plugin::{Inert, ParamError, Plugin, Strategy};
use super::weighted::{self, Weighted};
use attache_types::declare::Section;
use serde_json::Value;
use std::fmt::Debug;
use std::sync::Arc;

/// Name, summary and constructor of a strategy: one `pub const PLUGIN` in its file, one line in the list of its crate.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The name in configurations: kebab-case, unique.
    pub name: &'static str,
    /// One sentence: what it does.
    pub summary: &'static str,
    /// The source of the algorithm: product, paper or "ours".
    pub source: &'static str,
    /// The declaration of its parameters.
    pub parameters: fn() -> Section,
    /// Builds the strategy from its parameters (`null` for none). Unknown names and values out of range are errors.
    /// A strategy that combines others finds them in the registry.
    pub build: BuildStrategy,
}

/// Constructor of a strategy from its parameters.
pub type BuildStrategy = fn(&Value, &Registry) -> Result<Box<dyn Strategy>, ParamError>;

/// Name, summary and constructor of a part of a `pipeline`.
#[derive(Clone, Copy, Debug)]
pub struct PluginDescriptor {
    /// The `type` in configurations: kebab-case, unique.
    pub name: &'static str,
    /// Types of older versions with the same meaning.
    pub aliases: &'static [&'static str],
    /// `filter`, `scorer`, `picker`, `handler`, `decider`; several with `, ` between them.
    pub kind: &'static str,
    /// One sentence: what it does.
    pub summary: &'static str,
    /// The source of the plugin: product, paper or "ours".
    pub source: &'static str,
    /// The declaration of its parameters.
    pub parameters: fn() -> Section,
    /// Builds the plugin from its parameters.
    pub build: fn(&Value) -> Result<Plugin, ParamError>,
}

/// The plugins of one crate.
#[derive(Clone, Copy, Debug, Default)]
pub struct PluginList {
    /// Strategies of the crate.
    pub strategies: &'static [&'static Descriptor],
    /// The crate's parts of the `pipeline` strategy.
    pub plugins: &'static [&'static PluginDescriptor],
    /// When parameters of these plugins change nothing, which is a warning.
    pub inert: &'static [&'static [Inert]],
}

/// All plugins that configurations can name. A clone shares the tables. The default has none.
#[derive(Clone, Default)]
pub struct Registry(Arc<Tables>);

#[derive(Default)]
struct Tables {
    /// Sorted by name.
    strategies: Vec<&'static Descriptor>,
    /// Sorted by name.
    plugins: Vec<&'static PluginDescriptor>,
    inert: Vec<&'static Inert>,
}

impl Registry {
    /// The plugins of all `lists`.
    ///
    /// # Panics
    /// Two strategies or two parts of the pipeline have the same name, so a configuration would be ambiguous.
    #[must_use]
    #[expect(clippy::panic, reason = "the lists are constants, and the program makes its registry at the start")]
    pub fn new(lists: &[PluginList]) -> Self {
        let mut strategies: Vec<_> = lists.iter().flat_map(|list| list.strategies).copied().collect();
        let mut plugins: Vec<_> = lists.iter().flat_map(|list| list.plugins).copied().collect();
        strategies.sort_by_key(|d| d.name);
        plugins.sort_by_key(|d| d.name);
        let mut names: Vec<&str> = plugins.iter().flat_map(|d| d.aliases.iter().chain([&d.name])).copied().collect();
        names.sort_unstable();
        let of_strategies = strategies.iter().zip(strategies.iter().skip(1)).find(|(a, b)| a.name == b.name);
        let of_plugins = names.iter().zip(names.iter().skip(1)).find(|(a, b)| a == b);
        if let Some(name) = of_strategies.map(|(a, _)| a.name).or(of_plugins.map(|(a, _)| *a)) {
            panic!("two plugins are called `{name}`");
        }
        let inert = lists.iter().flat_map(|list| list.inert).copied().flatten().collect();
        Self(Arc::new(Tables { strategies, plugins, inert }))
    }

    /// All strategies, by name: the order in which `attache plugins` and the README list them.
    #[must_use]
    pub fn strategies(&self) -> &[&'static Descriptor] {
        &self.0.strategies
    }

    /// All parts of the `pipeline` strategy, by name.
    #[must_use]
    pub fn plugins(&self) -> &[&'static PluginDescriptor] {
        &self.0.plugins
    }

    /// The part of a pipeline with this type or alias.
    #[must_use]
    pub fn plugin(&self, name: &str) -> Option<&'static PluginDescriptor> {
        self.0.plugins.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
    }

    /// The strategy with this name, or with this name in another product.
    #[must_use]
    pub fn strategy(&self, name: &str) -> Option<&'static Descriptor> {
        let name = canonical(name);
        self.0.strategies.iter().copied().find(|d| d.name == name)
    }

    /// The parameters among `given` that change nothing, each as an error at its key: those of the strategy or part
    /// called `name`, and of the plugins that they name. `all` are the valid parameters that it is built with.
    #[must_use]
    pub fn inert(&self, name: &str, given: &Value, all: &Value) -> Vec<ParamError> {
        let own = self.plugin(name).map_or_else(|| canonical(name), |part| part.name);
        let mut found = Inert::find(self.0.inert.iter().copied(), own, given, all);
        if weighted::is_weighted(name) {
            for (part, given) in given.as_object().into_iter().flatten() {
                found.extend(self.inert(part, given, given).into_iter().map(|e| e.under(part)));
            }
        }
        self.inert_below(given, &mut found, &|error| error);
        found
    }

    /// As [`Registry::inert`], for the plugins that are named anywhere below `value`: by `type` or `name`, beside
    /// their `parameters`.
    fn inert_below(&self, value: &Value, found: &mut Vec<ParamError>, place: &dyn Fn(ParamError) -> ParamError) {
        match value {
            Value::Object(entries) => {
                let name = entries.get("type").or_else(|| entries.get("name")).and_then(Value::as_str);
                if let (Some(name), Some(parameters)) = (name, entries.get("parameters")) {
                    let errors = self.inert(name, parameters, parameters);
                    found.extend(errors.into_iter().map(|e| place(e.under("parameters"))));
                    return;
                }
                for (key, value) in entries {
                    self.inert_below(value, found, &|error| place(error.under(key)));
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    self.inert_below(value, found, &|error| place(error.in_item(index)));
                }
            }
            _ => {}
        }
    }

    /// Builds the strategy called `name`: one of [`Registry::strategies`], or a weighted sum of several
    /// (`prefix-cache:2,least-latency`).
    ///
    /// # Errors
    /// As [`BuildError`].
    pub fn build(&self, name: &str, parameters: &Value) -> Result<Box<dyn Strategy>, BuildError> {
        match self.strategy(name) {
            Some(descriptor) => Ok((descriptor.build)(parameters, self)?),
            None if weighted::is_weighted(name) || name.is_empty() => Weighted::build(name, parameters, self),
            None => Err(BuildError::Unknown(name.chars().filter(|c| !c.is_control()).take(64).collect())),
        }
    }
}

impl Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (strategies, plugins) = (self.0.strategies.len(), self.0.plugins.len());
        f.debug_struct("Registry").field("strategies", &strategies).field("plugins", &plugins).finish()
    }
}

/// Strategies that need a queue in front of the pool, with the fairness policy of the same name.
pub const QUEUED: &[&str] = &["vtc-fair", "vtc-max-fair", "vtc-pred"];

/// Names of strategies in other products, with Attaché's names.
const OTHER_NAMES: &[(&str, &str)] = &[
    // Default of AIBrix's environment variable, by its documentation.
    ("prefix-aware", "prefix-cache"),
    // Neutree's names; its API writes them into `scheduler.type`.
    ("consistent_hash", "consistent-hash"),
    ("leastconn", "least-request"),
    ("pow2", "power-of-two"),
    ("power_of_two", "power-of-two"),
    ("roundrobin", "round-robin"),
    (STATIC_HASH, "consistent-hash"),
];

/// Neutree's name for placement by the hash of the body alone, without regard to load.
pub const STATIC_HASH: &str = "static_hash";

/// Attaché's name of a strategy that another product calls `name`; otherwise `name` itself. The case of letters and
/// what separates words do not matter: Neutree's own users write `roundrobin`, `round_robin` and `RoundRobin`.
#[must_use]
pub fn canonical(name: &str) -> &str {
    OTHER_NAMES.iter().find(|(other, _)| is_spelling(name, other)).map_or(name, |(_, own)| own)
}

/// Whether two names differ at most in the case of letters and in what separates words.
#[must_use]
pub fn is_spelling(name: &str, other: &str) -> bool {
    letters(name).eq(letters(other))
}

fn letters(name: &str) -> impl Iterator<Item = u8> + '_ {
    name.bytes().filter(|byte| !b"-_ ".contains(byte)).map(|byte| byte.to_ascii_lowercase())
}

/// Why a strategy can't be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// No strategy has this name.
    #[error("no strategy is called `{0}`")]
    Unknown(String),
    /// The strategy rejects these parameters, or the parts of a weighted name are invalid or can't be combined.
    #[error(transparent)]
    Parameters(#[from] ParamError),
}
