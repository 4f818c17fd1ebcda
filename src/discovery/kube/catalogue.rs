//! Which `InferencePool`s a selector finds, and what the `ConfigMap`s say of them that are theirs. Pure.

use super::objects::{FromObject, Kind, Object};
use super::table::{Change, Table, Unreadable};
use attache_scheduling::selector::LabelSelector;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The label by which a `ConfigMap` says whose configuration it holds: the name of an `InferencePool` of its namespace.
pub const CONFIG_LABEL: &str = "attache.dev/pool";
/// The annotation by which a `ConfigMap` of several keys says which one holds the configuration.
pub const CONFIG_KEY_ANNOTATION: &str = "attache.dev/config-key";
/// The port of a Service that is named without one, as the API has it.
const DEFAULT_PORT: u16 = 9002;
/// Keys that a message names.
const SHOWN_KEYS: usize = 8;

/// An `InferencePool` that is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPool {
    /// The Service that its `endpointPickerRef` names: by that one gateways ask for its endpoints.
    pub service: Option<String>,
    /// The port of that Service.
    pub port: u16,
    /// Its own configuration.
    pub config: Option<FoundConfig>,
}

/// A configuration that is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundConfig {
    /// The `ConfigMap`'s name.
    pub name: Arc<str>,
    /// The text.
    pub text: Arc<str>,
}

/// Those that are found, by their names.
pub type Found = BTreeMap<String, FoundPool>;

/// What a search has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Finding {
    /// There is no answer yet.
    #[default]
    Unknown,
    /// There is none, and will be none until somebody allows the question or installs the kind.
    Refused,
    /// These are there.
    Found(Found),
}

impl Finding {
    /// What is found; nothing without an answer.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &FoundPool)> {
        let found = if let Self::Found(found) = self { Some(found) } else { None };
        found.into_iter().flatten()
    }
}

/// What is known of the pools and the configurations of a namespace.
#[derive(Debug)]
pub struct Catalogue {
    selector: String,
    pools: Table<Announced>,
    configs: Table<Config>,
    /// Configurations are listed, or can't be.
    heard_of_configs: bool,
    /// Pools may not be listed, or there is no such kind.
    refused: bool,
}

/// What matters of an `InferencePool` here: whether it can be served is for its own pool to say.
#[derive(Clone, Debug, PartialEq)]
struct Announced {
    labels: BTreeMap<Arc<str>, Arc<str>>,
    service: Option<String>,
    port: u16,
}

impl FromObject for Announced {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Reference {
            kind: Option<String>,
            name: Option<String>,
            port: Value,
            port_number: Value,
        }
        // v1 and v1alpha2 call it so.
        let reference = ["endpointPickerRef", "extensionRef"].into_iter().find_map(|key| object.spec.get(key));
        let reference = reference.cloned().unwrap_or(Value::Object(Default::default()));
        let reference = Reference::deserialize(reference).map_err(|e| format!("`spec.endpointPickerRef`: {e}"))?;
        let is_service = reference.kind.as_deref().is_none_or(|kind| kind.is_empty() || kind == "Service");
        let service = reference.name.filter(|name| is_service && !name.is_empty());
        let number = reference.port.get("number").unwrap_or(&reference.port_number).as_u64();
        let port = number.and_then(|number| u16::try_from(number).ok()).unwrap_or(DEFAULT_PORT);
        Ok(Self { labels: object.meta.labels, service, port })
    }
}

/// A `ConfigMap` that is somebody's.
#[derive(Clone, Debug, PartialEq)]
struct Config {
    pool: Arc<str>,
    created: i64,
    text: Arc<str>,
}

impl FromObject for Config {
    fn from_object(object: Object) -> Result<Self, String> {
        let pool =
            object.meta.labels.get(CONFIG_LABEL).ok_or_else(|| format!("the label `{CONFIG_LABEL}` is missing"))?;
        let data: BTreeMap<String, String> = match object.spec {
            Value::Null => BTreeMap::new(),
            data => Deserialize::deserialize(data).map_err(|e| format!("`data`: {e}"))?,
        };
        let text = text_of(&data, object.meta.annotations.get(CONFIG_KEY_ANNOTATION).map(String::as_str))?;
        Ok(Self { pool: pool.clone(), created: object.meta.created, text: text.into() })
    }
}

/// The text under the key that is named, else under the only one.
fn text_of<'d>(data: &'d BTreeMap<String, String>, named: Option<&str>) -> Result<&'d str, String> {
    let keys = || {
        let shown = data.keys().take(SHOWN_KEYS).map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        if data.len() > SHOWN_KEYS { format!("{shown}, …") } else { shown }
    };
    let mut texts = data.values();
    match (named, texts.next(), data.len()) {
        (_, None, _) => Err("`data` has no key: one must hold the configuration".to_owned()),
        (Some(key), Some(_), _) => data.get(key).map(String::as_str).ok_or_else(|| {
            let shown: String = key.chars().take(60).collect();
            format!(
                "the annotation `{CONFIG_KEY_ANNOTATION}` names `{shown}`, which is no key of `data`; there are: {}",
                keys()
            )
        }),
        (None, Some(text), 1) => Ok(text),
        (None, Some(_), count) => Err(format!(
            "`data` has {count} keys ({}): the annotation `{CONFIG_KEY_ANNOTATION}` must name the one that holds the configuration",
            keys()
        )),
    }
}

impl Catalogue {
    /// Nothing is known yet of the pools that `selector` means.
    #[must_use]
    pub fn new(selector: String) -> Self {
        Self { selector, pools: Table::default(), configs: Table::default(), heard_of_configs: false, refused: false }
    }

    /// Takes in a change of an `InferencePool` or a `ConfigMap`. True when others may be found afterwards.
    ///
    /// # Errors
    /// The object that can't be read; what was known of it stays.
    pub fn apply(&mut self, kind: Kind, change: Change) -> Result<bool, Unreadable> {
        match kind {
            Kind::Pool(_) => self.pools.apply(change),
            Kind::ConfigMap => {
                let listed = matches!(change, Change::ListDone);
                let changed = self.configs.apply(change);
                if listed { Ok(self.heard_of_configs()) } else { changed }
            }
            _ => Ok(false),
        }
    }

    /// Configurations are listed, or can't be: pools wait for them no longer. True, since others may be found afterwards.
    pub fn heard_of_configs(&mut self) -> bool {
        self.heard_of_configs = true;
        true
    }

    /// Pools may not be listed, or there is no such kind. What is known of them stays. True, since that is news.
    pub fn refused(&mut self) -> bool {
        self.refused = true;
        true
    }

    /// What is found. Of two configurations of a pool the older one holds, of two as old the first.
    #[must_use]
    pub fn found(&self) -> Finding {
        if !self.pools.is_listed() {
            return if self.refused { Finding::Refused } else { Finding::Unknown };
        }
        // It was read when the settings were.
        let Ok(selector) = LabelSelector::parse(&self.selector) else { return Finding::Unknown };
        if !self.heard_of_configs {
            return Finding::Unknown;
        }
        let config = |pool: &str| {
            let own = self.configs.iter().filter(|(_, config)| *config.pool == *pool);
            let (name, config) = own.min_by_key(|(name, config)| (config.created, *name))?;
            Some(FoundConfig { name: name.into(), text: config.text.clone() })
        };
        let pools = self.pools.iter().filter(|(_, pool)| selector.matches(&pool.labels));
        let found = pools.map(|(name, pool)| {
            let (service, port) = (pool.service.clone(), pool.port);
            (name.to_owned(), FoundPool { service, port, config: config(name) })
        });
        Finding::Found(found.collect())
    }
}

#[cfg(test)]
mod tests;
