//! The `InferencePool`s that a selector finds, and the configurations that `ConfigMap`s hold for them. Pure.

use super::objects::{FromObject, Object, ObjectKind};
use super::table::{ObjectChange, ObjectTable, Unreadable};
use attache_scheduling::selector::LabelSelector;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Label of a `ConfigMap` that holds the configuration of a pool: the name of an `InferencePool` of its namespace.
pub const CONFIG_LABEL: &str = "attache.dev/pool";
/// Annotation of a `ConfigMap` with several keys: the key that holds the configuration.
pub const CONFIG_KEY_ANNOTATION: &str = "attache.dev/config-key";
/// Default port of a Service in `endpointPickerRef`, as in the API.
const DEFAULT_PORT: u16 = 9002;
/// Most keys that an error message lists.
const SHOWN_KEYS: usize = 8;

/// An `InferencePool` that the selector found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPool {
    /// The Service in its `endpointPickerRef`: gateways use that name to ask for its endpoints.
    pub service: Option<String>,
    /// Port of that Service.
    pub port: u16,
    /// The configuration of this pool alone, if a `ConfigMap` holds one.
    pub config: Option<FoundConfig>,
}

/// A configuration in a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundConfig {
    /// Name of the `ConfigMap`.
    pub name: Arc<str>,
    /// Text of the configuration, YAML.
    pub text: Arc<str>,
}

/// The pools that were found, by name.
pub type Found = BTreeMap<String, FoundPool>;

/// The result of a search for pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Finding {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// The API server refuses the list, or the kind is not installed.
    Refused,
    /// The pools that exist.
    Found(Found),
}

impl Finding {
    /// The pools that were found; empty without an answer.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &FoundPool)> {
        let found = if let Self::Found(found) = self { Some(found) } else { None };
        found.into_iter().flatten()
    }
}

/// The known pools and configurations of a namespace.
#[derive(Debug)]
pub struct Catalogue {
    selector: String,
    pools: ObjectTable<Announced>,
    configs: ObjectTable<Config>,
    /// Whether configurations are listed, or known to be unavailable.
    configs_resolved: bool,
    /// Whether pools may not be listed, or the kind is not installed.
    refused: bool,
}

/// The fields of an `InferencePool` that routing needs. The pool's own source checks the rest.
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
        // The field name differs between v1 and v1alpha2.
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

/// A `ConfigMap` that names a pool.
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

/// The text under the named key, or under the only key.
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
            "`data` has {count} keys ({}): the annotation `{CONFIG_KEY_ANNOTATION}` must name the one that holds \
             the configuration",
            keys()
        )),
    }
}

impl Catalogue {
    /// A catalogue without any known pool.
    #[must_use]
    pub fn new(selector: String) -> Self {
        Self {
            selector,
            pools: ObjectTable::default(),
            configs: ObjectTable::default(),
            configs_resolved: false,
            refused: false,
        }
    }

    /// Applies a change of an `InferencePool` or a `ConfigMap`. Returns whether the result may differ.
    ///
    /// # Errors
    /// If the object is invalid; its last valid version stays.
    pub fn apply(&mut self, kind: ObjectKind, change: ObjectChange) -> Result<bool, Unreadable> {
        match kind {
            ObjectKind::Pool(_) => self.pools.apply(change),
            ObjectKind::ConfigMap => {
                let listed = matches!(change, ObjectChange::ListDone);
                let changed = self.configs.apply(change);
                if listed { Ok(self.configs_resolved()) } else { changed }
            }
            _ => Ok(false),
        }
    }

    /// Records that configurations are listed or unavailable, so that pools no longer wait for them. Always true,
    /// since the result may differ.
    pub fn configs_resolved(&mut self) -> bool {
        self.configs_resolved = true;
        true
    }

    /// Records that pools may not be listed or the kind is not installed. Known pools stay. Always true,
    /// since the result may differ.
    pub fn refused(&mut self) -> bool {
        self.refused = true;
        true
    }

    /// The pools that were found. Of two configurations for one pool the older one is used, of two equally old
    /// ones the first by name.
    #[must_use]
    pub fn found(&self) -> Finding {
        if !self.pools.is_listed() {
            return if self.refused { Finding::Refused } else { Finding::Unknown };
        }
        // The configuration was validated before, so the selector is valid.
        let Ok(selector) = LabelSelector::parse(&self.selector) else { return Finding::Unknown };
        if !self.configs_resolved {
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
