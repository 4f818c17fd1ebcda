//! Which `InferencePool`s a selector finds, and what the `ConfigMap`s say of them that are theirs. Pure.

use super::objects::{FromObject, Kind, Object};
use super::table::{Change, Table, Unreadable};
use crate::scheduling::selector::LabelSelector;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The label by which a `ConfigMap` says whose configuration it holds: the name of an `InferencePool` of its namespace.
pub const CONFIG_LABEL: &str = "attache.dev/pool";

/// An `InferencePool` that is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPool {
    /// The Service that its `endpointPickerRef` names: by that one gateways ask for its endpoints.
    pub service: Option<String>,
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

/// What is known of the pools and the configurations of a namespace.
#[derive(Debug)]
pub struct Catalogue {
    selector: String,
    pools: Table<Announced>,
    configs: Table<Config>,
    /// Configurations are listed, or can't be.
    heard_of_configs: bool,
}

/// What matters of an `InferencePool` here: whether it can be served is for its own pool to say.
#[derive(Clone, Debug, PartialEq)]
struct Announced {
    labels: BTreeMap<Arc<str>, Arc<str>>,
    service: Option<String>,
}

impl FromObject for Announced {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Reference {
            kind: Option<String>,
            name: Option<String>,
        }
        // v1 and v1alpha2 call it so.
        let reference = ["endpointPickerRef", "extensionRef"].into_iter().find_map(|key| object.spec.get(key));
        let reference = reference.cloned().unwrap_or(Value::Object(Default::default()));
        let reference = Reference::deserialize(reference).map_err(|e| format!("`spec.endpointPickerRef`: {e}"))?;
        let is_service = reference.kind.as_deref().is_none_or(|kind| kind.is_empty() || kind == "Service");
        let service = reference.name.filter(|name| is_service && !name.is_empty());
        Ok(Self { labels: object.meta.labels, service })
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
        let count = data.len();
        let mut texts = data.into_values();
        match (texts.next(), count) {
            (Some(text), 1) => Ok(Self { pool: pool.clone(), created: object.meta.created, text: text.into() }),
            _ => Err(format!("`data` has {count} keys, one is allowed: it holds the configuration")),
        }
    }
}

impl Catalogue {
    /// Nothing is known yet of the pools that `selector` means.
    #[must_use]
    pub fn new(selector: String) -> Self {
        Self { selector, pools: Table::default(), configs: Table::default(), heard_of_configs: false }
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

    /// What is found; `None` while it is not known. Of two configurations of a pool the older one holds, of two as old the first.
    #[must_use]
    pub fn found(&self) -> Option<Found> {
        if !self.pools.is_listed() || !self.heard_of_configs {
            return None;
        }
        // It was read when the settings were.
        let selector = LabelSelector::parse(&self.selector).ok()?;
        let config = |pool: &str| {
            let own = self.configs.iter().filter(|(_, config)| *config.pool == *pool);
            let (name, config) = own.min_by_key(|(name, config)| (config.created, *name))?;
            Some(FoundConfig { name: name.into(), text: config.text.clone() })
        };
        let pools = self.pools.iter().filter(|(_, pool)| selector.matches(&pool.labels));
        let found = pools
            .map(|(name, pool)| (name.to_owned(), FoundPool { service: pool.service.clone(), config: config(name) }));
        Some(found.collect())
    }
}

#[cfg(test)]
mod tests;
